"""Tests over vLLM's CPU build, in an environment that has it: `make test-engines`. Elsewhere none is collected."""

from __future__ import annotations

import importlib.util
import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from attn_backends.engine.models.checkpoint import DEFAULT_MODEL, find_model
from attn_backends.engine.models.load import convert_gguf
from tests.engines.vllm.processes import HERE, Serve, environment, started
from tests.engines.vllm.scenarios import LORA, LORA_RANK, SMOLLM2, TINY

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models by name, and what makes this checkout and the example plugin look installed."""
    made = tmp_path_factory.mktemp("vllm")
    (made / SMOLLM2).symlink_to(find_model(DEFAULT_MODEL, convert_gguf))
    for name, config in TINY.items():
        (made / name).mkdir()
        (made / name / "config.json").write_text(json.dumps(config))
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(made / name), dtype=torch.float32
        )
        for each, weight in model.named_parameters():
            if "sinks" in each:
                weight.data.normal_(0, 1)
        model.save_pretrained(made / name)
        (made / name / "config.json").write_text(json.dumps(config))  # as it was written, without transformers' words
        if config.get("num_nextn_predict_layers"):
            _add_drafting_layer(made / name / "model.safetensors", config["num_hidden_layers"])
    _make_lora(made / LORA, made / SMOLLM2)
    _installed(made, "attn-backends", {
        "vllm.general_plugins": "attn_backends = attn_backends.adapters.vllm.plugin:add_to_vllm",
    })  # fmt: skip
    _installed(made, "attn-backends-naive", {"attn_backends.backends": "NAIVE = attn_backends_naive:NaiveBackend"})
    return made


def _add_drafting_layer(file: Path, index: int) -> None:
    """DeepSeek's layer that predicts the token after the next, which transformers leaves out."""
    weights = load_file(file)
    last, own = f"model.layers.{index - 1}.", f"model.layers.{index}."
    added = {own + name.removeprefix(last): weight for name, weight in weights.items() if name.startswith(last)}
    hidden = weights["model.norm.weight"].shape[0]
    added |= {f"{own}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    added |= {
        f"{own}eh_proj.weight": torch.randn(hidden, 2 * hidden) / 8,
        f"{own}embed_tokens.weight": weights["model.embed_tokens.weight"],
        f"{own}shared_head.head.weight": weights["lm_head.weight"],
    }
    save_file({name: weight.clone() for name, weight in (weights | added).items()}, file)


def _make_lora(folder: Path, model: Path) -> None:
    """An adapter of random weights to a model's attention."""
    config = transformers.AutoConfig.from_pretrained(model)
    hidden, kv = config.hidden_size, config.hidden_size * config.num_key_value_heads // config.num_attention_heads
    sizes = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
    torch.manual_seed(5)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, out in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(LORA_RANK, hidden) / hidden**0.5
            weights[f"{at}.lora_B.weight"] = torch.randn(out, LORA_RANK) / 8
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK, "target_modules": [*sizes], "bias": "none",
            "task_type": "CAUSAL_LM", "base_model_name_or_path": SMOLLM2}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(told))


def _installed(folder: Path, name: str, points: dict[str, str]) -> None:
    info = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{point}\n" for group, point in points.items()))


@pytest.fixture(scope="session")
def serve(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """What a process of some version serves: `serve("0.32", "eager", "ngram", ATTN_BACKENDS_VLLM="TORCH")`. A process
    that was run already is not run again."""
    begun: dict[tuple[object, ...], Future[dict[str, Any]]] = {}
    pool = ThreadPoolExecutor(2)

    def begin(version: str, *names: str, **variables: str) -> Future[dict[str, Any]]:
        key = (version, names, *sorted(variables.items()))
        if key not in begun:
            out = tmp_path_factory.mktemp("out") / "served.json"
            command = [sys.executable, str(HERE / "serve.py"), str(folder), str(out), *names]
            begun[key] = pool.submit(started, command, environment(folder, version, **variables), out)
        return begun[key]

    return Serve(begin)

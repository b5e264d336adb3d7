"""The models that vLLM serves in the tests: the default one, and checkpoints of small ones with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from attn_backends.engine.models.checkpoint import DEFAULT_MODEL, find_model
from attn_backends.engine.models.load import convert_gguf
from tests.engines.vllm.scenarios import LORA, LORA_RANK, SMOLLM2, TINY

QUANTIZED = "quantization_config"  # what transformers is not told of: its weights are plain


def make_models(folder: Path) -> None:
    """Each by its name in a folder."""
    (folder / SMOLLM2).symlink_to(find_model(DEFAULT_MODEL, convert_gguf))
    for name, config in TINY.items():
        _make_tiny(folder / name, config)
    _make_lora(folder / LORA, folder / SMOLLM2)


def _make_tiny(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    file, weights = folder / "config.json", folder / "model.safetensors"
    file.write_text(json.dumps({key: value for key, value in config.items() if key != QUANTIZED}))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    for name, weight in model.named_parameters():
        if "sinks" in name:
            weight.data.normal_(0, 1)
    model.save_pretrained(folder)
    file.write_text(json.dumps(config))  # as it was written, without transformers' words
    if config.get("num_nextn_predict_layers"):
        _add_drafting_layer(weights, config["num_hidden_layers"])
    if shared := config.get("num_kv_shared_layers"):
        _add_norms(weights, range(config["num_hidden_layers"] - shared, config["num_hidden_layers"]))
    if QUANTIZED in config:
        _add_scales(weights, config["num_hidden_layers"])


def _add_norms(file: Path, layers: range) -> None:
    """Norms of keys in layers that have none of their own: older versions of vLLM look for them, as checkpoints have
    them, and transformers leaves them out."""
    weights = load_file(file)
    norm = weights["model.layers.0.self_attn.k_norm.weight"]
    added = {f"model.layers.{layer}.self_attn.k_norm.weight": norm.clone() for layer in layers}
    save_file(weights | added, file)


def _add_scales(file: Path, layers: int) -> None:
    """Scales of cached keys and values, others in each layer."""
    scales = {
        f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(scale * (layer + 1))
        for layer in range(layers)
        for name, scale in (("k", 0.02), ("v", 0.005))
    }
    save_file(load_file(file) | scales, file)


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

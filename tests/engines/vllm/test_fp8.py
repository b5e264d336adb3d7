"""A cache of fp8 with the scales of a checkpoint's layers, beside transformers' layers over keys and values rounded so.

Not beside vLLM's own attention for CPUs: it rounds towards zero, and its tokens are others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.engines.vllm.models import QUANTIZED
from tests.engines.vllm.processes import Serve
from tests.engines.vllm.scenarios import random_rounds
from tests.engines.vllm.test_vllm import NEWEST


@pytest.mark.long
def test_layers_have_their_scales(serve: Serve, folder: Path) -> None:
    """A key that lies in the middle of two numbers of the cache may become either: few tokens see it."""
    ours = serve(NEWEST, "fp8", ATTN_BACKENDS_VLLM="TORCH")["served"]["fp8"]
    assert ours["impls"] == ["CPU_ATTN__TORCH_Impl"]
    apart = _distances(ours, folder / "fp8", _scales(folder / "fp8"))
    assert apart.median() < 1e-5
    assert apart.max() < 0.05
    equal = [dict.fromkeys(layer, 0.02) for layer in _scales(folder / "fp8")]
    assert _distances(ours, folder / "fp8", equal).median() > 1e-3


def _distances(served: dict[str, Any], folder: Path, scales: list[dict[str, float]]) -> torch.Tensor:
    """How far the log-probabilities of served tokens are from those of transformers."""
    model = _rounding(folder, scales)
    prompts = [prompt for prompts in random_rounds() for prompt in prompts]
    found = []
    for prompt, tokens, logprobs in zip(prompts, served["tokens"], served["logprobs"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found.append((expected - torch.tensor(logprobs)).abs())
    return torch.cat(found)


def _rounding(folder: Path, scales: list[dict[str, float]]) -> Any:
    """The model, whose layers attend to keys and values as a cache of fp8 with these scales holds them."""

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any) -> Any:
        own = scales[module.layer_idx]
        return sdpa_attention_forward(module, query, _rounded(key, own["k"]), _rounded(value, own["v"]), *args, **kw)

    transformers.AttentionInterface.register("rounding", attend)
    config = transformers.AutoConfig.from_pretrained(folder)
    delattr(config, QUANTIZED)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="rounding"
    )


def _rounded(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (tensor / scale).clamp(-largest, largest).to(torch.float8_e4m3fn).float() * scale


def _scales(folder: Path) -> list[dict[str, float]]:
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = sorted(name for name in weights.keys() if name.endswith("_scale"))  # noqa: SIM118
        found = {name: float(weights.get_tensor(name)) for name in names}
    layers = range(len(found) // 2)
    return [{kind: found[f"model.layers.{layer}.self_attn.{kind}_scale"] for kind in "kv"} for layer in layers]

"""Decoder layers of the Llama form with random sizes and weights, for tests of the forms that take their place."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from attn_backends.engine.models.fused.native import Operators, operators
from attn_backends.engine.models.hf import ATTENTION_NAME
from tests.helpers.threads import threads

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # and what the norm of a token's result may be off by


def needs_operators(dtype: torch.dtype) -> Operators:
    found = operators(dtype)
    if found is None:
        pytest.skip("needs a C compiler and a CPU with AVX-512")
    return found


class Mix:
    """An attention context for tests: any function of the three will do; the result does not lie together."""

    def attend(self, module: Any, new: tuple[torch.Tensor, ...], constants: object) -> torch.Tensor:
        query, key, value = new
        groups = query.shape[1] // key.shape[1]
        mixed = query * 0.5 + (key - value).repeat_interleave(groups, 1)
        return mixed.mT.contiguous().mT


def drawn(numbers: Random, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(numbers.getrandbits(32)))


def layer_and_angles(numbers: Random, dtype: torch.dtype, **sizes: int) -> tuple[Any, LlamaRotaryEmbedding]:
    """A layer, and its rotary embedding; of random sizes but for those that are given."""
    kv_heads, groups = numbers.randint(1, 3), numbers.randint(1, 4)
    heads, head_dim = kv_heads * groups, 2 * numbers.randint(3, 40)
    drawn_sizes = {
        "hidden_size": heads * numbers.randint(1, 60) + heads * 6, "intermediate_size": numbers.randint(6, 200),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip
    config = LlamaConfig(**drawn_sizes | sizes, attn_implementation=ATTENTION_NAME)
    layer = LlamaDecoderLayer(config, 0).to(dtype).requires_grad_(False)
    for name, weight in layer.named_parameters():
        weight.copy_(drawn(numbers, *weight.shape) * (1 if "norm" in name else weight.shape[-1] ** -0.5))
    return layer, LlamaRotaryEmbedding(config)


def far(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a token's row, relative."""
    got, expected = got.double().flatten(0, -2), expected.double().flatten(0, -2)
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def assert_same_by_threads(linear: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> None:
    """A product is the same to the last bit, however many threads share it."""
    results = []
    for num in (1, 2, 3, 7):
        with threads(num):
            results.append(linear(tokens))
    assert all(torch.equal(result, results[0]) for result in results)

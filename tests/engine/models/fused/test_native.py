"""A layer's two operators in C, and products, against torch's own path; and who sees them."""

from __future__ import annotations

import copy
import logging
import mmap
from pathlib import Path
from random import Random
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from attn_backends.engine.models.fused import native
from attn_backends.engine.models.fused.cpu import FusedLayer, _Rotation, fuse_layers
from attn_backends.engine.models.fused.huge_pages import HUGE_BYTES, settle
from attn_backends.engine.models.fused.native import NativeLayer, NativeLinear, operators, serves
from attn_backends.engine.models.hf import ATTENTION_NAME
from attn_backends.testing.graphs.simulator import GraphSimulator
from tests.helpers.native_layers import (
    DTYPES,
    Mix,
    assert_same_by_threads,
    drawn,
    far,
    layer_and_angles,
    needs_operators,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_layers(dtype: torch.dtype, seed: int) -> None:
    """Of any size and number of tokens, over rows that lie in a larger tensor, as torch's operators have them."""
    needs_operators(dtype)
    numbers = Random(seed)
    layer, rotary = layer_and_angles(numbers, dtype)
    wide = copy.deepcopy(layer).double()
    fused, in_torch = NativeLayer(layer), FusedLayer(copy.deepcopy(layer), _Rotation())
    for num_tokens in (numbers.randint(1, 40), numbers.choice([1, 4, 16, 64, 65, 150])):
        whole = drawn(numbers, 1, num_tokens, layer.hidden_size + 5).to(dtype)
        hidden = whole[..., : layer.hidden_size]
        cos, sin = rotary(hidden, torch.arange(3, 3 + num_tokens)[None])
        own = {"position_embeddings": (cos, sin), "attention_context": Mix()}
        expected = wide(hidden.double(), **own | {"position_embeddings": (cos.double(), sin.double())})
        got = fused(hidden, **own)
        assert (got.shape, got.dtype) == (hidden.shape, dtype)
        assert far(got, expected) < DTYPES[dtype]
        assert far(in_torch(hidden.contiguous(), **own), expected) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_products(dtype: torch.dtype, seed: int) -> None:
    """Of any size from a tile's on, with a bias or without, of rows that do not lie together; NaN stays in its row."""
    needs_operators(dtype)
    numbers = Random(seed)
    rows, size, num_tokens = (
        numbers.choice([6, 7, 100, 131]),
        numbers.choice([1, 16, 31, 96, 500]),
        numbers.randint(1, 40),
    )
    weight = torch.nn.Parameter((drawn(numbers, rows, size) * size**-0.5).to(dtype), requires_grad=False)
    bias = numbers.choice([None, drawn(numbers, rows).to(dtype)])
    linear = NativeLinear(weight, bias)
    tokens = drawn(numbers, 2, size, num_tokens).to(dtype).mT
    tokens[0, 0, 0] = torch.nan
    got, expected = linear(tokens), F.linear(tokens.double(), weight.double(), None if bias is None else bias.double())
    assert got.shape == expected.shape
    limit = DTYPES[dtype] * (expected.abs() + F.linear(tokens.double().abs(), weight.double().abs()))
    right = ((got.double() - expected).abs() <= limit + 1e-6) | (got.isnan() & expected.isnan())
    assert bool(right.all())


def test_tokens_of_another_kind_are_refused() -> None:
    needs_operators(torch.float32)
    linear = NativeLinear(torch.nn.Parameter(torch.ones(6, 4), requires_grad=False))
    for tokens in (torch.ones(2, 5), torch.ones(2, 4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"give \[\.\.\., 4\] of that dtype"):
            linear(tokens)
    with pytest.raises(ValueError, match="load the model in that dtype"):
        linear.bfloat16()(torch.ones(2, 4, dtype=torch.bfloat16))


def test_layers_refuse_tokens_and_angles_of_another_kind() -> None:
    """They would be read as what they are not, and beyond their ends."""
    needs_operators(torch.bfloat16)
    layer, rotary = layer_and_angles(Random(2), torch.bfloat16)
    fused, hidden = NativeLayer(layer), torch.ones(1, 3, layer.hidden_size, dtype=torch.bfloat16)
    angles = rotary(hidden, torch.arange(3)[None])
    for tokens in (hidden.float(), hidden[..., 1:]):
        with pytest.raises(ValueError, match="of that dtype"):
            fused(tokens, position_embeddings=angles, attention_context=Mix())
    for other in (angles[1].float(), angles[1][..., :2]):
        with pytest.raises(ValueError, match="each of a head's numbers"):
            fused(hidden, position_embeddings=(angles[0], other), attention_context=Mix())


def test_a_product_of_nothing_is_its_bias() -> None:
    needs_operators(torch.float32)
    linear = NativeLinear(torch.ones(6, 0), torch.arange(6.0))
    assert torch.equal(linear(torch.ones(3, 0)), torch.arange(6.0).expand(3, 6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e14, 1e18, 1e30])
def test_gates_of_any_size(dtype: torch.dtype, scale: float) -> None:
    needs_operators(dtype)
    layer, rotary = layer_and_angles(Random(5), dtype)
    layer.mlp.gate_proj.weight.mul_(scale)
    layer.mlp.up_proj.weight.div_(scale)
    wide, fused = copy.deepcopy(layer).double(), NativeLayer(layer)
    hidden = drawn(Random(6), 1, 5, layer.hidden_size).to(dtype)
    cos, sin = rotary(hidden, torch.arange(5)[None])
    got = fused(hidden, position_embeddings=(cos, sin), attention_context=Mix())
    expected = wide(hidden.double(), position_embeddings=(cos.double(), sin.double()), attention_context=Mix())
    assert far(got, expected) < DTYPES[dtype]


def test_threads_that_end_keep_nothing() -> None:
    needs_operators(torch.float32)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=8192, num_attention_heads=8, attn_implementation=ATTENTION_NAME
    )
    fused = NativeLayer(LlamaDecoderLayer(config, 0).requires_grad_(False))
    hidden = torch.zeros(1, 64, 512)
    own = {"position_embeddings": (torch.zeros(1, 64, 64),) * 2, "attention_context": Mix()}

    def grown() -> int:
        """Bytes."""
        for _ in range(30):
            thread = Thread(target=fused, args=(hidden,), kwargs=own)
            thread.start()
            thread.join()
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE

    before = grown()
    assert grown() - before < 30 << 20  # 2.6 MB each


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same(dtype: torch.dtype) -> None:
    needs_operators(dtype)
    numbers = Random(0)
    weight, tokens = drawn(numbers, 640, 320).to(dtype), drawn(numbers, 1, 37, 320).to(dtype)
    assert_same_by_threads(NativeLinear(torch.nn.Parameter(weight, requires_grad=False)), tokens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simulated_graphs_see_them(dtype: torch.dtype) -> None:
    """A replay computes anew from what its input holds then."""
    needs_operators(dtype)
    numbers = Random(1)
    layer, rotary = layer_and_angles(numbers, dtype)
    fused, hidden = NativeLayer(layer), drawn(numbers, 1, 3, layer.hidden_size).to(dtype)
    head = NativeLinear(torch.nn.Parameter(drawn(numbers, 9, layer.hidden_size).to(dtype), requires_grad=False))
    angles = rotary(hidden, torch.arange(3)[None])

    def run() -> torch.Tensor:
        out: torch.Tensor = head(fused(hidden, position_embeddings=angles, attention_context=Mix()))
        return out

    with torch.inference_mode():
        held = [hidden, *angles, *fused.first, *fused.second, head.weight, head.bias]
        graph = GraphSimulator(refuse_unreachable=True).capture(run, held)
        hidden.copy_(drawn(numbers, *hidden.shape))
        expected = run().clone()
        assert torch.equal(graph.replay(), expected)


def test_what_has_no_tile_is_not_served() -> None:
    layer, _ = layer_and_angles(Random(3), torch.float32)
    assert serves(layer)
    layer.mlp.up_proj = torch.nn.Linear(8, 5)
    assert not serves(layer)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Layers are fused in torch's operators then, and the log says why."""
    needs_operators(torch.float32)
    layer, rotary = layer_and_angles(Random(4), torch.float32)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(native, "operators", operators.__wrapped__)
    monkeypatch.setattr(
        "attn_backends.engine.models.fused.cpu.prefers_native", lambda dtype: bool(native.operators(dtype))
    )
    layers = torch.nn.ModuleList([layer])
    with caplog.at_level(logging.WARNING, logger=native.__name__):
        assert fuse_layers(layers, rotary) == 1
    assert isinstance(layers[0], FusedLayer)
    assert "no C compiler" in caplog.text


@pytest.mark.parametrize("size", [10, HUGE_BYTES // 4 + 3])
def test_weights_that_settle_keep_their_values_and_holders(size: int) -> None:
    holders = [torch.nn.Linear(size, 1, bias=False).requires_grad_(False) for _ in range(2)]
    tied = torch.nn.Embedding(1, size)
    tied.weight = holders[0].weight
    expected = torch.cat([holder.weight.flatten() for holder in holders])
    flat = settle([holder.weight for holder in holders])
    assert torch.equal(flat, expected)
    flat.zero_()
    assert not any(bool(held.weight.any()) for held in (*holders, tied))

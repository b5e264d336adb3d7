"""Products of bfloat16 by AMX: its instructions in plain C on any CPU, and its own where there are."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
import torch.nn.functional as F

from attn_backends.engine.models.fused import native
from attn_backends.engine.models.fused.linears import PackedLinear
from attn_backends.engine.models.fused.native import SOURCE, NativeLayer, NativeLinear, Operators
from attn_backends.kernels.c_compiler import load
from tests.helpers.emulated_tiles import emulating, needs_amx
from tests.helpers.native_layers import (
    DTYPES,
    Mix,
    assert_same_by_threads,
    drawn,
    far,
    layer_and_angles,
    needs_operators,
)
from tests.helpers.threads import threads

BF16 = torch.bfloat16
TILE = 32  # numbers of a row that one has


@pytest.fixture(params=["emulated", pytest.param("own", marks=needs_amx)])
def of_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Layers and products that are made now are by such instructions."""
    needs_operators(BF16)
    if request.param == "emulated":
        monkeypatch.setattr(native, "operators", lambda dtype: emulated())
    return str(request.param)


def emulated() -> Operators:
    return Operators(*native._defined("emulated", load(SOURCE, emulated_defines())))


def emulated_defines() -> dict[str, str | int]:
    return {"BFLOAT16": 1, "DTYPE": "emulated"} | emulating()


@pytest.mark.parametrize("seed", range(16))
def test_layers(of_tiles: str, seed: int) -> None:
    """Of any number of tokens: of less than a tile, of one or two, and of more than go through a layer together."""
    numbers = Random(seed)
    kv_heads = numbers.randint(1, 3)
    heads = kv_heads * numbers.randint(1, 4)
    sizes = {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_size": TILE * heads * numbers.randint(1, 3),
        "intermediate_size": TILE * numbers.randint(1, 12),
        # The output's product, and so what follows it, is by tiles where heads together are a multiple of one.
        "head_dim": numbers.choice([16, 18, 32, 48, 64, 80]),
    }  # fmt: skip
    layer, rotary = layer_and_angles(numbers, BF16, **sizes)
    wide, fused = copy.deepcopy(layer).double(), NativeLayer(layer)
    for num_tokens in (numbers.randint(4, 40), numbers.choice([4, 16, 17, 32, 33, 64, 255, 256, 257, 272, 300, 530])):
        hidden = drawn(numbers, 1, num_tokens, layer.hidden_size).to(BF16)
        cos, sin = rotary(hidden, torch.arange(3, 3 + num_tokens)[None])
        got = fused(hidden, position_embeddings=(cos, sin), attention_context=Mix())
        angles = (cos.double(), sin.double())
        expected = wide(hidden.double(), position_embeddings=angles, attention_context=Mix())
        assert far(got, expected) < DTYPES[BF16]


@pytest.mark.parametrize("seed", range(24))
def test_products(of_tiles: str, seed: int) -> None:
    """Of any number of rows from a tile's on, with a bias or without; NaN stays in its row."""
    numbers = Random(seed)
    rows, size = numbers.choice([16, 17, 31, 32, 33, 100, 131, 700]), TILE * numbers.randint(1, 16)
    num_tokens = numbers.choice([4, numbers.randint(4, 40), numbers.randint(200, 600)])
    weight = torch.nn.Parameter((drawn(numbers, rows, size) * size**-0.5).to(BF16), requires_grad=False)
    bias = numbers.choice([None, drawn(numbers, rows).to(BF16)])
    tokens = drawn(numbers, num_tokens, size).to(BF16)
    broken = numbers.randrange(num_tokens)
    tokens[broken, numbers.randrange(size)] = torch.nan
    got = NativeLinear(weight, bias)(tokens)
    expected = F.linear(tokens.double(), weight.double(), None if bias is None else bias.double())
    limit = DTYPES[BF16] * (expected.abs() + F.linear(tokens.double().abs(), weight.double().abs()))
    right = (got.double() - expected).abs() <= limit + 1e-6
    assert got[broken].isnan().all()
    right[broken] = True
    assert right.all()


def test_any_number_of_threads_gives_the_same(of_tiles: str) -> None:
    """Tiles of eight rows where there are few for each thread, and of sixteen, are the same sums."""
    numbers = Random(0)
    weight, tokens = drawn(numbers, 650, 320).to(BF16), drawn(numbers, 1, 37, 320).to(BF16)
    assert_same_by_threads(NativeLinear(torch.nn.Parameter(weight, requires_grad=False)), tokens)


@pytest.mark.parametrize("inner", [32, 96, 256])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_heads_and_gates_of_less_than_a_tile(of_tiles: str, inner: int, num_threads: int) -> None:
    """Halves of heads have eight rows, and a gate few tiles for each thread."""
    layer, rotary = layer_and_angles(
        Random(inner), BF16, num_attention_heads=8, num_key_value_heads=8, head_dim=16, hidden_size=128,
        intermediate_size=inner,
    )  # fmt: skip
    wide, fused, hidden = copy.deepcopy(layer).double(), NativeLayer(layer), drawn(Random(3), 1, 40, 128).to(BF16)
    cos, sin = rotary(hidden, torch.arange(40)[None])
    with threads(num_threads):
        got = fused(hidden, position_embeddings=(cos, sin), attention_context=Mix())
    angles = (cos.double(), sin.double())
    assert far(got, wide(hidden.double(), position_embeddings=angles, attention_context=Mix())) < DTYPES[BF16]


def test_a_threads_tiles_are_shaped_as_before() -> None:
    """A library may have shaped them, and not ask again."""
    needs_operators(BF16)
    library, product = load(SOURCE, emulated_defines()), emulated().product
    tokens, weight = torch.ones(4, 32, dtype=BF16), torch.ones(16, 32, dtype=BF16)
    with threads(1):
        product(tokens, weight, tokens.new_empty(0))
    assert [library.rows_of_tile(tile) for tile in range(8)] == [0] * 8


@needs_amx
def test_instructions_are_those_of_the_cpu() -> None:
    """What the emulation gives is what AMX gives, but for the order of sums."""
    numbers = Random(1)
    weight, tokens = drawn(numbers, 96, 256).to(BF16), drawn(numbers, 40, 256).to(BF16)
    none = torch.empty(0, dtype=BF16)
    by_cpu = needs_operators(BF16).product(tokens, weight, none)
    torch.testing.assert_close(emulated().product(tokens, weight, none), by_cpu, atol=2e-2, rtol=1e-2)


@needs_amx
def test_products_of_libraries_go_on() -> None:
    """A thread's tiles are shaped for a library's kernels too, which may not ask again how."""
    numbers = Random(2)
    weight, tokens = drawn(numbers, 512, 256).to(BF16), drawn(numbers, 64, 256).to(BF16)
    ours, theirs = NativeLinear(torch.nn.Parameter(weight.clone(), requires_grad=False)), PackedLinear(weight)
    expected = theirs(tokens)
    for _ in range(3):
        torch.testing.assert_close(ours(tokens), expected, atol=2e-1, rtol=2e-2)
        assert torch.equal(theirs(tokens), expected)

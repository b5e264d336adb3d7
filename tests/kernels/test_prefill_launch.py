"""Which layers the prefill kernel for Hopper serves: logits as they are, and tiles of so many queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attn_backends.spec import AttentionSpec

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")
listing = pytest.importorskip("attn_backends.kernels.variants").listing
prefill = pytest.importorskip("attn_backends.kernels.prefill.launch")
split_tiles = pytest.importorskip("attn_backends.kernels.prefill.split_tiles")

CPU, BF16, FP8 = torch.device("cpu"), torch.bfloat16, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _on_hopper() -> Iterator[None]:
    with listing(launching.Machine(132, 227 << 10, True, True, True)):
        yield


def is_served(heads: tuple[int, int] = (8, 2), head_dim: int = 128, **changes: Any) -> bool:
    spec = AttentionSpec(*heads, head_dim, **{"dtype": BF16, **changes})
    return bool(prefill.suits_hopper_kernel(spec, CPU))


@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": torch.float16}, {"cache_dtype": FP8}, {"window_left": 9}, {"causal": False}, {"sinks": True},
     {"scale": 1e-9}, {"head_dim": 192, "head_dim_vo": 128}],
    ids=str,
)  # fmt: skip
def test_what_is_served(changes: dict[str, Any]) -> None:
    assert is_served(**changes)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.float32}, {"cache_dtype": torch.float16}, {"cache_dtype": torch.float32}, {"scale": 0.0},
     {"scale": -0.3}, {"logits_soft_cap": 30.0}, {"alibi_slopes": (0.5,) * 8}, {"head_dim": 72},
     {"head_dim": 128, "head_dim_vo": 64}],
    ids=str,
)  # fmt: skip
def test_what_is_not(changes: dict[str, Any]) -> None:
    """The highest logit is taken of products without their scale, which has to be positive then."""
    assert not is_served(**changes)


@pytest.mark.parametrize(("head_dim", "cached", "most"), [(128, BF16, 128), (128, FP8, 128), (256, FP8, 64)], ids=str)
def test_a_tile_holds_a_tokens_queries(head_dim: int, cached: torch.dtype, most: int) -> None:
    assert is_served((most, 1), head_dim, cache_dtype=cached)
    assert not is_served((most + 1, 1), head_dim, cache_dtype=cached)


def test_keys_that_a_query_sees() -> None:
    """All, those of a window with its own, or those of a chunk."""
    keys = np.array([5, 100, 9000], np.int32)
    for changes, seen in (({}, keys), ({"window_left": 99}, [5, 100, 100]), ({"window_left": 0}, [1, 1, 1]),
                          ({"chunk_size": 64}, [5, 64, 64])):  # fmt: skip
        assert prefill.num_visible_keys(AttentionSpec(8, 2, 64, **changes), keys).tolist() == list(seen)


@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_tiles_of_any_rows_are_counted_in_full(tokens: int) -> None:
    """Of rows of one token more than fills tiles there are most; of one row, as many as it has."""
    for count in (1, 2, 7):
        rows = [tokens + 1] * count
        whole = sum(-(-row // tokens) for row in rows)
        assert split_tiles.most_tiles(sum(rows), count, tokens) >= whole
    for length in range(1, 3 * tokens):
        assert split_tiles.most_tiles(length, 1, tokens) == -(-length // tokens)

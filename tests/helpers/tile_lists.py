"""Random prefills whose tiles are listed, and the list that there should be of them."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from attn_backends.spec import AttentionSpec

split_tiles = pytest.importorskip("attn_backends.kernels.prefill.split_tiles")
split_launch = pytest.importorskip("attn_backends.kernels.prefill.split_launch")
launch = pytest.importorskip("attn_backends.kernels.prefill.launch")

BF16 = torch.bfloat16


def draw(seed: int) -> tuple[Any, ...]:
    """A layer, rows, where the prefill begins, a target, and a part of the tiles that are whole."""
    dice = Random(f"list {seed}")
    num_rows = dice.choice((1, 2, 5, 8, 40, 129, 300))
    heads, group = dice.choice((1, 2, 3, 8)), dice.choice((1, 4, 9, 16))
    seen: dict[str, Any] = dice.choice(
        ({}, {"window_left": dice.randrange(3000)}, {"chunk_size": dice.randint(1, 4000)}, {"causal": False},
         {"causal": False, "window_left": dice.randrange(3000)})
    )  # fmt: skip
    spec = AttentionSpec(heads * group, heads, 64, dtype=BF16, **seen)
    query_lens = [dice.randrange(dice.choice((2, 40, 300))) for _ in range(num_rows)]
    longest = dice.choice((20, 5000, 60000))
    seq_lens = [length + dice.randrange(longest) for length in query_lens]
    tile = split_tiles.SplitTile(group, 128, dice.choice((64, 128)))
    target, part = dice.choice((0, heads, 5 * heads, 132, 264)), dice.choice((0.0, 0.0, dice.random(), 1.0))
    return spec, tile, query_lens, seq_lens, dice.randrange(num_rows), target, part


def rest_of(load: Any, num_whole: int) -> NDArray[np.int64]:
    """[rows]: tiles behind the first ones of the longest rows, of rows as long the first's."""
    order = np.argsort(-load.blocks, kind="stable")
    whole = np.zeros_like(load.tiles)
    for row in order:
        whole[row] = min(load.tiles[row], num_whole - whole.sum())
    return load.tiles - whole

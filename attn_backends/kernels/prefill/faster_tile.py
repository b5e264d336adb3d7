"""Which tile of the prefill kernel for Hopper takes less time for some rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.launch import num_multiprocessors
from attn_backends.kernels.prefill.launch import num_visible_keys
from attn_backends.kernels.prefill.splits import TileLoad, whole_time
from attn_backends.kernels.prefill.tiles import HopperTile, count_tiles, tiles_of
from attn_backends.spec import AttentionSpec

# Blocks that tiles read in the mean, up to which those of the second one of `hopper_tiles` are faster: of more tiles
# than there are multiprocessors, and of fewer. By the widest head dim, as measured at tuning seeds 150 to
# 157, and of MLA's heads with benchmarks/attention/mla_prefill.py, where only half the size leaves room for the next
# queries.
_MOST_BLOCKS = {64: (3, 3), 128: (5, 7)}
_MOST_OF_MLA = 6
# What a block takes with three groups of warps, to one with two; what a tile takes beside its blocks, in blocks; what
# two groups take more where they split keys, so that all programs are as long busy; and waves of tiles from which on
# three come near it without. As measured at tuning seeds 200 and 201.
_THREE_GROUPS, _BESIDE, _SPLITS, _LEAST_WAVES = 1.38, {2: 3.0, 3: 5.0}, 5.0, 4
_LEAST_GAIN = 0.01


def faster_hopper_tile(
    spec: AttentionSpec, query_lens: IntArray, seq_lens: IntArray, device: torch.device
) -> HopperTile | None:
    """The one of `hopper_tiles` with which rows whose keys are not split take less time than with the usual one, as the
    keys that tiles see in the mean say; None: there is none.

    Args:
        query_lens, seq_lens: [rows], or upper bounds of the latter.
    """
    num_sms = num_multiprocessors(device)
    usual, *others = tiles_of(spec)
    if usual.raw_stages:  # whose times say which
        return None
    load = mean_load(spec, usual, query_lens, seq_lens)
    num_tiles = int(load.tiles.sum())
    at_once = num_tiles * spec.num_kv_heads <= num_sms
    most_blocks = next((most[at_once] for head_dim, most in _MOST_BLOCKS.items() if spec.head_dim <= head_dim), 0)
    for tile in others:
        if tile.groups < 3:
            most_blocks = _MOST_OF_MLA if tile.groups == 2 else most_blocks
            if int(load.tiles @ load.blocks) <= most_blocks * num_tiles:
                return tile
        elif not spec.is_local:  # where each tile has as many blocks at its ends
            by_two = float(load.tiles @ (load.blocks + _BESIDE[2])) * spec.num_kv_heads / num_sms + _SPLITS
            of_three = mean_load(spec, tile, query_lens, seq_lens)
            by_three = _THREE_GROUPS * whole_time(of_three, spec.num_kv_heads, num_sms, _BESIDE[3])
            has_waves = int(of_three.tiles.sum()) * spec.num_kv_heads >= _LEAST_WAVES * num_sms
            if has_waves and by_three < (1 - _LEAST_GAIN) * by_two:
                return tile
    return None


def mean_load(spec: AttentionSpec, tile: HopperTile, query_lens: IntArray, seq_lens: IntArray) -> TileLoad:
    """Tiles, and the blocks that one of a row's reads in the mean."""
    seen = mean_keys(spec, tile.rows // spec.group_size, query_lens, seq_lens)
    return TileLoad(count_tiles(query_lens, spec.group_size, tile.rows), -(-seen // tile.keys))


def mean_keys(spec: AttentionSpec, tokens: int, query_lens: IntArray, seq_lens: IntArray) -> NDArray[np.int64]:
    """Keys that a tile of so many query tokens sees in the mean of a row's tiles, [rows]."""
    later = np.maximum(query_lens - tokens, 0) // 2 if spec.causal else 0
    return seen_by_tiles(spec, seq_lens - later).astype(np.int64)


def seen_by_tiles(spec: AttentionSpec, keys: IntArray) -> IntArray:
    """How many of so many keys some query sees: all where a window hides only those before it."""
    hides_both = spec.causal or spec.chunk_size is not None
    return num_visible_keys(spec, keys) if hides_both else keys

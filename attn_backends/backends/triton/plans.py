"""How a step's prefills are served: by which tile, how keys are split, and whether decodes are taken along.

Times are reckoned in blocks of the usual tile that a program reads, see `kernels.prefill.split_tiles`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attn_backends.backends.triton.rules import (
    decode_time,
    hides_keys_before,
    reads_alike,
    splits_of_a_wave,
    timed_splits,
)
from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.launch import num_multiprocessors
from attn_backends.kernels.prefill.faster_tile import mean_load
from attn_backends.kernels.prefill.split_tiles import SplitTile, hopper_tile
from attn_backends.kernels.prefill.splits import PrefillSplits, TileLoad, busy_time, serial_time, time_of
from attn_backends.kernels.prefill.tiles import HopperTile, all_tiles, half_tile
from attn_backends.kernels.prefill.waves import blocks_between, in_waves_time
from attn_backends.spec import AttentionSpec


class TilePlan(NamedTuple):
    """How a kernel serves prefills: of the one for Hopper by which tile, and how keys are split."""

    tile: HopperTile | None  # of the kernel for Hopper; None: the usual one, or another kernel serves
    splits: PrefillSplits | None  # None: rows are whole, and come as they are
    taken: float | None = None  # what that takes, in blocks of the usual tile, decodes included; None: it was not asked


_LEAST_SAVED_BY_HALF = 0.05  # part of the time, below which tiles of half the size do not serve
_LEAST_SAVED_TOGETHER = 0.1  # the same, below which decodes are not taken along
# Times the time in which decode's kernel reads decodes' keys, that prefill's takes; of 8 bits it makes 16.
_SLOWER_READ, _SLOWER_READ_OF_8_BITS = 1.3, 2.0
_SHORT = 32  # blocks of a tile in the mean, up to which a list saves what it takes to look tiles up


def prefill_plan(
    spec: AttentionSpec, tile: SplitTile, other: HopperTile | None, query_lens: IntArray, seq_lens: IntArray,
    num_decodes: int, device: torch.device, for_graph: bool = False, is_paged: bool = True,
) -> TilePlan:  # fmt: skip
    """How the rows behind the decodes are served in the least time, but for those whose keys are made 16 bits. The
    kernel for Hopper has tiles of half the size.

    Args:
        tile: the usual one of the kernel that serves, see `split_tile`.
        other: the one that `faster_hopper_tile` has for whole rows.
        query_lens, seq_lens: [rows], or upper bounds of the latter; the first `num_decodes` are decodes.
    """
    given = query_lens, seq_lens, num_decodes, device
    usual = TilePlan(None, *timed_splits(spec, tile, *given, for_graph))
    half = half_tile(spec) if tile.beside else None
    if half is not None:
        by_half = TilePlan(half, *timed_splits(spec, hopper_tile(spec, half), *given, for_graph))
        is_few = other == half and not usual.splits
        if is_few or _is_faster_by_half(spec, by_half, usual, *given):
            if by_half.splits:
                return by_half
            splits = None if is_few or for_graph else splits_of_a_wave(spec, hopper_tile(spec, half), *given)
            return TilePlan(half, splits) if splits else _in_order(spec, half, *given)
    if usual.splits or for_graph:
        return usual
    splits = None if other is not None else splits_of_a_wave(spec, tile, *given)
    if splits or other is not None or num_decodes or not (is_paged and tile.beside):
        return TilePlan(None if splits else other, splits)
    return _in_order(spec, None, *given, _SHORT)


def _in_order(
    spec: AttentionSpec, tile: HopperTile | None, query_lens: IntArray, seq_lens: IntArray, num_decodes: int,
    device: torch.device, most_blocks: float = math.inf,
) -> TilePlan:  # fmt: skip
    """Whole tiles, of a list where that reads keys no more often, and tiles have no more blocks in the mean: programs
    then look up none."""
    listed = hopper_tile(spec, tile)
    load = mean_load(spec, tile or all_tiles(spec)[0], query_lens[num_decodes:], seq_lens[num_decodes:])
    num_programs = listed.num_programs(num_multiprocessors(device))
    is_short = int(load.tiles @ load.blocks) <= most_blocks * int(load.tiles.sum())
    are_alike = reads_alike(spec, load, int(seq_lens.max(initial=0)), num_programs)
    return TilePlan(tile, PrefillSplits(0, listed) if is_short and are_alike else None)


def _is_faster_by_half(
    spec: AttentionSpec, by_half: TilePlan, usual: TilePlan, query_lens: IntArray, seq_lens: IntArray,
    num_decodes: int, device: torch.device,
) -> bool:  # fmt: skip
    """Whether tiles of half the size take less time."""
    if by_half.splits or usual.splits:
        given = query_lens, seq_lens, num_decodes, device
    else:  # whole tiles, beside which decodes run
        given = query_lens[num_decodes:], seq_lens[num_decodes:], 0, device
    return _taken(spec, by_half, *given) < (1 - _LEAST_SAVED_BY_HALF) * _taken(spec, usual, *given)


def _taken(
    spec: AttentionSpec, plan: TilePlan, query_lens: IntArray, seq_lens: IntArray, num_decodes: int,
    device: torch.device,
) -> float:  # fmt: skip
    """What the rows behind the decodes, and these, take, in blocks of the usual tile that a program reads."""
    if plan.taken is not None:
        return plan.taken
    tile = hopper_tile(spec, plan.tile)
    num_programs = tile.num_programs(num_multiprocessors(device))
    decodes = decode_time(spec, tile, seq_lens[:num_decodes], device)
    lens = query_lens[num_decodes:], seq_lens[num_decodes:]
    longest = TileLoad.of(spec, tile, *lens)
    if plan.splits and plan.splits.is_of_all:
        return time_of(longest, spec.num_kv_heads, num_programs, plan.splits.target, tile) + serial_time(decodes)
    load = mean_load(spec, plan.tile or all_tiles(spec)[0], *lens)
    of_a_block = tile.block_time(int(load.tiles.sum()) * spec.num_kv_heads, num_programs)
    timed = tile._replace(of_a_block=of_a_block)
    step = 0.0 if hides_keys_before(spec, seq_lens) else blocks_between(spec, tile)
    whole = in_waves_time(longest, spec.num_kv_heads, num_programs, timed, step)
    return max(whole, busy_time(load, spec.num_kv_heads, num_programs, tile) + decodes)


def split_plan(spec: AttentionSpec, query_lens: IntArray, seq_lens: IntArray, device: torch.device) -> TilePlan:
    """How the kernel for Hopper serves all rows with their keys split, by the tile that takes less time; without splits
    where that is none.

    Args:
        query_lens, seq_lens: [rows], or upper bounds of the latter.
    """
    given = query_lens, seq_lens, 0, device
    tiles = [None, half] if (half := half_tile(spec)) else [None]
    found = [TilePlan(tile, *timed_splits(spec, hopper_tile(spec, tile), *given)) for tile in tiles]
    split = [plan for plan in found if plan.splits]
    return min(split, key=lambda plan: _taken(spec, plan, *given), default=TilePlan(None, None))


def are_faster_together(
    spec: AttentionSpec, alone: TilePlan, together: TilePlan, query_lens: IntArray, seq_lens: IntArray,
    num_decodes: int, device: torch.device,
) -> bool:  # fmt: skip
    """Whether the kernel for Hopper serves all rows, with their keys split, in less time than prefills alone, with the
    decodes beside them or, where keys are split, behind.

    Args:
        alone, together: of the prefills alone, and of all rows, see `split_plan`.
        query_lens, seq_lens: [rows], or upper bounds of the latter; the first `num_decodes` are decodes.
    """
    if together.splits is None:
        return False
    of_alone = _taken(spec, alone, query_lens, seq_lens, num_decodes, device)
    of_all = _taken(spec, together, query_lens, seq_lens, 0, device)
    tile = hopper_tile(spec)
    slower = _SLOWER_READ if spec.cache_dtype is spec.dtype else _SLOWER_READ_OF_8_BITS
    read = slower * decode_time(spec, tile, seq_lens, device) + tile.of_the_join
    return max(of_all, read) < (1 - _LEAST_SAVED_TOGETHER) * of_alone

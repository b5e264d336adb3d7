"""How TRITON's decodes are laid out: tiles of queries, work items that fill the GPU, and rows that are attended for at
once."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import NamedTuple

import torch

from attn_backends.backends.triton.kernels.decode import HALF_ROWS
from attn_backends.backends.triton.kernels.split_joins import JOIN_WORDS
from attn_backends.backends.triton.tuning import DecodeTile
from attn_backends.kernels.cut_list import CutList, Filling, SplitSizes, max_split_items
from attn_backends.kernels.launch import power_of_two
from attn_backends.kernels.prefill.launch import visible_range
from attn_backends.kernels.split_kv import MAX_SPLITS
from attn_backends.kernels.tiles import block_dims
from attn_backends.spec import AttentionSpec

_SMALL_TILE_ROWS, _TILE_ROWS = 16, 64  # queries of a tile; more queries of a row take several
_MOST_IN_SMALL_TILES = 48  # queries of a row: so often are its keys read again, from the L2, in less time
_SHORT_NUMBERS = 128  # of keys, and as many of values, that a thread holds for a row that is attended for at once
_LONGEST_SHORT = 64  # keys of such a row at most, or twice as many where pairs are few
# Warps of a program at most. Four multiply by Hopper's matrix units, and an H200 gave wrong outputs of 16 queries so:
# in Triton 3.6's code the fence behind which those read weights in shared memory comes after the warps have met.
_SHORT_WARPS = 2
_SHORT_PAIRS = 6  # pairs of a row and a KV head, for each multiprocessor, that are few
_LISTED_PAGE = 16  # slots, of which pages are multiples whose ids come with work items
_WHOLE_KEYS = 48  # of a row, up to which it is no parts where those are short
_RESIDENT_WARPS = 8  # of a multiprocessor, whatever the tile: a thread of these kernels takes nearly 256 registers
# Blocks from which on a cut is long, by bytes of a cached number: of 8 bits programs compute more than they wait.
_LONG_CUTS = {1: 16, 2: 96, 4: 96}
_ROW_KEYS, _MUCH_ALIKE = 32, 32  # see `Filling`, as measured
_PART_KEYS = 16  # of a block: a program of one warp takes longer for a few of them than parts take to be joined


class SplitPlan(NamedTuple):
    """How a decode row's queries, token times head of a KV head, lie in tiles."""

    tiles: int
    block_m: int  # of a tile
    used_m: int  # of them that are used at most, as a power of two

    @staticmethod
    def of(spec: AttentionSpec, query_len: int) -> SplitPlan:
        queries = query_len * spec.group_size
        rows = _SMALL_TILE_ROWS if queries <= _MOST_IN_SMALL_TILES else _TILE_ROWS
        return SplitPlan(-(-queries // rows), rows, min(rows, power_of_two(queries)))

    def num_programs(self, spec: AttentionSpec, tile: DecodeTile, num_sms: int) -> int:
        """Number of programs that a GPU holds at once, for every KV head and tile."""
        return self._filling(spec, _resident(tile), num_sms)

    def filling(
        self, spec: AttentionSpec, tile: DecodeTile, num_sms: int, part_keys: int, most_short: int
    ) -> Filling:  # fmt: skip
        """So many programs as the tile aims at; of several tiles of queries, which read the same keys, all that fit.

        Args:
            part_keys: of a part of a row that a program attends for at once, at most; 0: it does for none.
            most_short: the same of a whole row.
        """
        programs = tile.programs if self.tiles == 1 else _resident(tile)
        return Filling(
            few_cuts=self._filling(spec, programs, num_sms), long_cut=_LONG_CUTS[spec.cache_dtype.itemsize],
            heads=spec.num_kv_heads * self.tiles, num_sms=num_sms, resident=_resident(tile), row_keys=_ROW_KEYS,
            much_alike=_MUCH_ALIKE,
            part_keys=(part_keys or _PART_KEYS) if self.block_m == _SMALL_TILE_ROWS else 0,
            whole_keys=max(most_short, _WHOLE_KEYS), halves=2 if part_keys and self.used_m > HALF_ROWS.value else 1,
        )  # fmt: skip

    def num_partial_slots(self, spec: AttentionSpec, tile: DecodeTile, num_sms: int) -> int:
        """Number of work items that can be splits of rows."""
        return max_split_items(self.num_programs(spec, tile, num_sms))

    def num_counters(self, spec: AttentionSpec, tile: DecodeTile, num_sms: int) -> int:
        """What programs count in, where the splits of a row meet."""
        return self.num_partial_slots(spec, tile, num_sms) * spec.num_kv_heads * self.tiles * int(JOIN_WORDS.value)

    def _filling(self, spec: AttentionSpec, programs: int, num_sms: int) -> int:
        """Number of cuts with which each multiprocessor has so many programs."""
        return min(max(1, num_sms * programs // (spec.num_kv_heads * self.tiles)), int(MAX_SPLITS.value) // 2)


def _resident(tile: DecodeTile) -> int:
    """Number of programs that a multiprocessor holds at a time."""
    return max(tile.programs, _RESIDENT_WARPS // tile.warps)


class Schedule:
    """How decode rows are split into work items: the list on the device, and what follows from shapes alone.

    Args:
        num_rows: of the batch, padding included.
        query_len: most query tokens of a row; longer ones are served by another launch.
        num_sms: multiprocessors, which work items are to fill.
        page_size: slots of a page of the cache.
        counters: [num_counters] i32 or more, of the workspace that its launches use.
    """

    def __init__(
        self, spec: AttentionSpec, tile: DecodeTile, num_rows: int, query_len: int, num_sms: int, page_size: int,
        counters: torch.Tensor,
    ) -> None:  # fmt: skip
        self.tile = tile
        self.plan = SplitPlan.of(spec, query_len)
        max_cuts = self.plan.num_programs(spec, tile, num_sms)
        min_blocks = max(1, tile.min_keys // tile.keys)
        _, window_left, chunk = visible_range(spec)
        sizes = SplitSizes(num_rows, max_cuts, window_left, chunk, tile.keys, min_blocks)
        are_few = num_rows * spec.num_kv_heads <= _SHORT_PAIRS * num_sms
        self.has_one_loop = has_one_loop(spec, self.plan)
        self.short_blocks = short_blocks(spec, tile, self.plan)
        self.most_short = self.short_blocks.of_few if are_few else self.short_blocks.usual  # keys of a whole row
        counted = counters[: self.plan.num_counters(spec, tile, num_sms)]
        filling = self.plan.filling(spec, tile, num_sms, self.short_blocks.part, self.most_short)
        listed = page_size if lists_pages(self.short_blocks, page_size) else 0
        self.work_list = CutList(sizes, filling, counted, query_len, listed)

    def anew(self) -> Schedule:
        """The same for another step, with a list of its own."""
        made = copy(self)
        made.work_list = self.work_list.anew()
        return made


def has_one_loop(spec: AttentionSpec, plan: SplitPlan) -> bool:
    """Whether one loop takes all blocks, with masks, and not one without them those that all queries see whole, though
    no window asks for it: for few queries of 16 bits, whose programs wait for longer than they compute, and at a second
    loop would wait once more, and for its code."""
    return plan.block_m == _SMALL_TILE_ROWS and spec.cache_dtype.itemsize == 2


def lists_pages(short: ShortBlocks, page_size: int) -> bool:
    """Whether page ids come with work items, for keys that are attended for at once."""
    return short.usual > 0 and page_size % _LISTED_PAGE == 0


class ShortBlocks(NamedTuple):
    """Keys that a program attends for at once, at most; 0: it does for none."""

    usual: int  # of a row
    of_few: int  # of a row, where pairs of a row and a KV head are few
    part: int  # of one of a row's splits


@lru_cache(maxsize=256)
def short_blocks(spec: AttentionSpec, tile: DecodeTile, plan: SplitPlan) -> ShortBlocks:
    """The blocks of a tile. Splits over 16 bits have the smaller one: by the larger one 64 keys of 128 columns took no
    less time than by a loop, on an H200."""
    has_function = plan.tiles == 1 and plan.block_m == _SMALL_TILE_ROWS and spec.alibi_slopes is None
    is_wide = max(spec.dtype.itemsize, spec.cache_dtype.itemsize) > 2  # a thread has registers for half as many
    if not has_function or is_wide or tile.warps > _SHORT_WARPS:
        return ShortBlocks(0, 0, 0)
    keys = min(_SHORT_NUMBERS * 32 * tile.warps // max(block_dims(spec)), _LONGEST_SHORT)
    if keys < _SMALL_TILE_ROWS:
        return ShortBlocks(0, 0, 0)
    of_part = 2 * keys if spec.cache_dtype.itemsize == 1 else keys
    return ShortBlocks(keys, 2 * keys, min(of_part, _LONGEST_SHORT))

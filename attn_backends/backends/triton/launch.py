"""Launches of TRITON's kernels: grids, constants, and where Triton interprets them, one torch operator each.

Those of prefill alone, which other backends have too, are in `attn_backends.kernels.prefill.launch`.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import NamedTuple

import torch

from attn_backends.backends.triton.kernels.arguments import (
    CacheStrides,
    DecodeConstants,
    DecodeTensors,
    DecodeVarying,
    UpcastConstants,
    UpcastFrom,
    UpcastTensors,
    UpcastVarying,
)
from attn_backends.backends.triton.kernels.decode import JOIN_WORDS, decode_kernel
from attn_backends.backends.triton.kernels.upcast import upcast_kernel
from attn_backends.backends.triton.tuning import DecodeTile, upcast_heads
from attn_backends.kernels.cut_list import CutList, Filling, SplitSizes, max_split_items
from attn_backends.kernels.launch import launch, power_of_two, start_kernel
from attn_backends.kernels.operators import operator
from attn_backends.kernels.pdl import Pdl
from attn_backends.kernels.prefill.arguments import BlockDims, Flags, Scales, VisibleRange
from attn_backends.kernels.prefill.launch import PrefillKernels, Rows, TileSizes, is_alike, strides_of, visible_range
from attn_backends.kernels.prefill.tiles import PrefillTile
from attn_backends.kernels.split_kv import MAX_SPLITS
from attn_backends.kernels.tiles import block_dims
from attn_backends.spec import AttentionSpec

_SMALL_TILE_ROWS, _TILE_ROWS = 16, 64  # of decode: queries of a tile; more queries of a row take several
_MOST_IN_SMALL_TILES = 48  # queries of a row: so often are its keys read again, from the L2, in less time
_SHORT_NUMBERS = 128  # of keys, and as many of values, that a thread holds for a row that is attended for at once
_LONGEST_SHORT = 64  # keys of such a row at most: some are held in memory then, so that it takes few pairs
_SHORT_PAIRS = 2  # pairs of a row and a KV head, for each multiprocessor, that are few
_WHOLE_KEYS = 48  # of a row, up to which it is no parts where those are short
_SHORT_BLOCK = 16  # keys: one page's, so that three such blocks are under way where a mask is; of longer ones two
_RESIDENT_WARPS = 8  # of a multiprocessor, whatever the tile: a thread of these kernels takes nearly 256 registers
# Blocks from which on a cut is long, by bytes of a cached number: of 8 bits programs compute more than they wait.
_LONG_CUTS = {1: 16, 2: 96, 4: 96}
_ROW_KEYS, _MUCH_ALIKE = 32, 32  # see `Filling`, as measured
_PART_KEYS = 16  # of a block: a program of one warp takes longer for a few of them than parts take to be joined
_REGISTERS = 65536  # of a multiprocessor
_COMBINE_REGISTERS = (
    128  # of a thread, for the splits that it combines at a time; no more than half of what it can have
)
_COMBINED_ROWS = 64  # queries of all splits that one program combines; more are for all that have a split
_JOIN_REGISTERS = 64  # of a thread, for the splits of one query that it combines at a time
_WIDE, _NARROW = 128, 32  # columns of a query that a program combines at a time, of few splits and of many
_UPCAST_BLOCK = 64  # of a program


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

    def filling(self, spec: AttentionSpec, tile: DecodeTile, num_sms: int, most_short: int) -> Filling:
        """So many programs as the tile aims at; of several tiles of queries, which read the same keys, all that fit."""
        programs = tile.programs if self.tiles == 1 else _resident(tile)
        return Filling(
            few_cuts=self._filling(spec, programs, num_sms), long_cut=_LONG_CUTS[spec.cache_dtype.itemsize],
            heads=spec.num_kv_heads * self.tiles, num_sms=num_sms, resident=_resident(tile), row_keys=_ROW_KEYS,
            much_alike=_MUCH_ALIKE, part_keys=_PART_KEYS if self.block_m == _SMALL_TILE_ROWS else 0,
            whole_keys=max(most_short, _WHOLE_KEYS),
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
        counters: [num_counters] i32 or more, of the workspace that its launches use.
    """

    def __init__(
        self, spec: AttentionSpec, tile: DecodeTile, num_rows: int, query_len: int, num_sms: int,
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
        self.most_short = self.short_blocks[are_few]  # keys of a row that is attended for at once
        counted = counters[: self.plan.num_counters(spec, tile, num_sms)]
        self.work_list = CutList(sizes, self.plan.filling(spec, tile, num_sms, self.most_short), counted, query_len)

    def anew(self) -> Schedule:
        """The same for another step, with a list of its own."""
        made = copy(self)
        made.work_list = self.work_list.anew()
        return made


class Kernels(PrefillKernels):
    """The launches of one layer: all that does not change from step to step is worked out once.

    Args:
        prefill, prompt: tiles for keys in pages, and for keys as they came.
        by_hopper: whether the kernel for Hopper, which has a tile of its own, may serve the former, and the latter.
        slopes, sinks: [num_qo_heads] f32 on the device, where the layer has them.
        k_scale, v_scale: of the cache.
    """

    def __init__(
        self, spec: AttentionSpec, prefill: PrefillTile, prompt: PrefillTile, by_hopper: tuple[bool, bool],
        slopes: torch.Tensor | None, sinks: torch.Tensor | None, k_scale: float, v_scale: float, device: torch.device,
    ) -> None:  # fmt: skip
        dims = BlockDims(spec.head_dim, spec.head_dim_vo, *block_dims(spec))
        by_pages = dict(zip((True, False), by_hopper, strict=True))
        tiles: dict[bool, TileSizes] = {True: prefill, False: prompt}
        super().__init__(spec, dims, tiles, by_pages, slopes, sinks, k_scale, v_scale, device)

    @property
    def pdl(self) -> Pdl:
        """How decode starts, whatever kernel is in front of it."""
        return Pdl.WAIT_AT_ONCE if self._supports_pdl else Pdl.OFF

    def supports_pdl(self, num_written: int) -> bool:
        """Whether decode can start before the launch in front of it, which writes so many tokens, has ended.

        That has a program a token. With more than there are multiprocessors some are fuller than others when it ends,
        and decode's programs, which fill the GPU evenly, would not.
        """
        return self._supports_pdl and num_written <= self._num_sms

    def decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor | None, page_table: torch.Tensor, schedule: Schedule,
        workspace: tuple[torch.Tensor, torch.Tensor, torch.Tensor], pdl: Pdl,
    ) -> None:  # fmt: skip
        """Launch the decode of rows whose keys are split.

        Args:
            workspace: `partial_acc`, `partial_ml` and `counters`, where the splits of a row meet.
            pdl: `WAIT_FIRST` where the launch in front writes the new keys and lets this one start, `WAIT_LAST` where
                it is `prefill` and does; else as `self.pdl` says.
        """
        tile, plan = schedule.tile, schedule.plan
        constants = _decode_constants(
            self._logits, is_alike(key, value), _can_be_pairs(value), key.shape[1], self.spec.num_kv_heads,
            self.spec.group_size, plan, tile, self._dims, self._is_local, self.spec.dtype is torch.float32,
            schedule.has_one_loop, schedule.short_blocks, pdl,
        )  # fmt: skip
        listed = schedule.work_list
        grid = listed.num_programs * self.spec.num_kv_heads * plan.tiles
        varying = DecodeVarying(page_table.stride(0), schedule.most_short)
        _decode(query, key, value, output, lse, page_table, listed.work_items, listed.more_items, *workspace,
                *self._extras, varying, self._scales[True], self._visible, self._has_sinks, constants, grid,
                tile.warps)  # fmt: skip

    def prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor | None, rows: Rows, tiles: torch.Tensor, upcast_kv: torch.Tensor, share: float | None,
    ) -> Pdl:  # fmt: skip
        """Launch the prefill of rows that are not split.

        `tiles` is where programs count what they take. Keys that are to be made 16 bits are so in `upcast_kv`
        [num_bytes] u8, of as many KV heads at a time as it has room for.

        Returns when the next launch can start, if that is `decode` of other rows: `share` is the part of the GPU that
        is enough beside it. None: it is not.
        """
        spec, group = self.spec, self.spec.group_size
        count = upcast_heads(spec, rows.num_upcast, len(upcast_kv)) if rows.num_upcast else 0
        if not count:
            return self.attend(query, key, value, output, lse, rows, tiles, 0, rows.page_table is not None, share)
        starts = torch.empty_like(rows.seq_lens)
        dense = rows._replace(page_table=None, key_start_loc=starts)
        for first in range(0, spec.num_kv_heads, count):
            heads = min(count, spec.num_kv_heads - first)
            sizes = [rows.num_upcast * heads * dim for dim in self._dims[:2]]
            flat = upcast_kv.view(query.dtype)[: sum(sizes)].split(sizes)
            keys, values = (part.view(rows.num_upcast, heads, -1) for part in flat)
            begin = UpcastFrom(rows.first_row, first)
            _upcast(key, value, keys, values, starts, rows.page_table, rows.seq_lens, begin, self._dims)
            part = slice(first * group, (first + heads) * group)
            head_lse = None if lse is None else lse[:, part]
            self.attend(query[:, part], keys, values, output[:, part], head_lse, dense, tiles, first, True, None)
        return Pdl.OFF


def has_one_loop(spec: AttentionSpec, plan: SplitPlan) -> bool:
    """Whether one loop takes all blocks, with masks, and not one without them those that all queries see whole, though
    no window asks for it: for few queries of 16 bits, whose programs wait for longer than they compute, and at a second
    loop would wait once more, and for its code."""
    return plan.block_m == _SMALL_TILE_ROWS and spec.cache_dtype.itemsize == 2


@lru_cache(maxsize=256)
def short_blocks(spec: AttentionSpec, tile: DecodeTile, plan: SplitPlan) -> tuple[int, int]:
    """Keys of a row that a program attends for at once, at most, and where pairs of a row and a KV head are few; 0: it
    does for none."""
    has_function = plan.tiles == 1 and plan.block_m == _SMALL_TILE_ROWS and spec.alibi_slopes is None
    if not has_function or spec.dtype.itemsize > 2 or spec.cache_dtype.itemsize != 2:
        return 0, 0
    keys = min(_SHORT_NUMBERS * 32 * tile.warps // max(block_dims(spec)), _LONGEST_SHORT)
    return (keys, min(2 * keys, _LONGEST_SHORT)) if keys >= _SMALL_TILE_ROWS else (0, 0)


@lru_cache(maxsize=256)  # layers and steps are alike
def _decode_constants(
    logits: tuple[int, int, int], alike: int, pairs: int, page_size: int, num_kv_heads: int,
    group_size: int, plan: SplitPlan, tile: DecodeTile, dims: BlockDims, is_local: bool, exact: bool,
    one_loop: bool, short: tuple[int, int], pdl: Pdl,
) -> DecodeConstants:  # fmt: skip
    threads = 32 * tile.warps
    registers = min(_COMBINE_REGISTERS, _REGISTERS // (tile.programs * threads) // 2) * threads
    block_splits = 1 << max(1, registers // (plan.used_m * dims[-1])).bit_length() - 1  # a power of two
    joined = min(tile.joined, max(2, _COMBINED_ROWS // plan.used_m))
    one_loop |= is_local
    masked_stages = tile.stages if one_loop else min(tile.stages, 3 if tile.keys <= _SHORT_BLOCK else 2)
    return DecodeConstants(
        *logits, alike, pairs, PAGE_SIZE=page_size, KV_HEADS=num_kv_heads, GROUP=group_size,
        TILES=plan.tiles, BLOCK_M=plan.block_m, BLOCK_N=tile.keys, DIM=dims.DIM, DIM_VO=dims.DIM_VO,
        BLOCK_DIM=dims.BLOCK_DIM, BLOCK_DIM_VO=dims.BLOCK_DIM_VO, LOCAL=int(is_local), MASKED=int(one_loop),
        STAGES=tile.stages, MASKED_STAGES=masked_stages, EXACT=int(exact),
        USED_M=plan.used_m, JOINED=joined, BLOCK_SPLITS=min(block_splits, joined),
        JOIN_SIZE=_JOIN_REGISTERS * threads, WIDE=min(dims[-1], _WIDE), NARROW=min(dims[-1], _NARROW), THREADS=threads,
        SHORT=short[0], LONGER=short[1], PDL=int(pdl),
    )  # fmt: skip


def _can_be_pairs(value: torch.Tensor) -> int:
    """Whether values are of 8 bits, and can be read two by two."""
    return int(value.itemsize == 1 and not any(stride % 2 for stride in (*value.stride()[:-1], value.data_ptr())))


@operator(("output", "lse", "partial_acc", "partial_ml", "counters"))
def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor, work_items: torch.Tensor, more_items: torch.Tensor, partial_acc: torch.Tensor,
    partial_ml: torch.Tensor, counters: torch.Tensor, slopes: torch.Tensor, sinks: torch.Tensor, varying: DecodeVarying,
    scales: Scales, visible: VisibleRange, has_sinks: int, constants: DecodeConstants, grid: int, warps: int,
) -> None:  # fmt: skip
    tensors = DecodeTensors(query, key, value, output, partial_ml if lse is None else lse, page_table, work_items,
                            more_items, partial_acc, partial_ml, counters, slopes, sinks)  # fmt: skip
    groups = (scales, visible, Flags(has_sinks, int(lse is not None)), strides_of(query, key, value, output, lse),
              constants)  # fmt: skip
    launch(decode_kernel, grid, tensors, varying, groups, warps, use_pdl=constants.PDL > 0)


@operator(("keys", "values", "starts"))
def _upcast(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor,
    page_table: torch.Tensor, seq_lens: torch.Tensor, begin: UpcastFrom, dims: BlockDims,
) -> None:  # fmt: skip
    num_rows, (num_keys, heads, _) = len(seq_lens) - begin.first_row, keys.shape
    start_kernel(
        upcast_kernel, ((num_keys // _UPCAST_BLOCK + num_rows) * heads,),
        *UpcastTensors(key, value, keys, values, starts, page_table, seq_lens),
        *UpcastVarying(begin.first_row, num_rows, page_table.stride(0), begin.first_head),
        *CacheStrides(*key.stride()[:3], *value.stride()[:3]),
        *UpcastConstants(power_of_two(num_rows), key.shape[1], heads, _UPCAST_BLOCK, *dims),
        num_warps=4,
    )  # fmt: skip

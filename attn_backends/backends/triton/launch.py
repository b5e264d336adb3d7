"""Launches of TRITON's kernels: grids, constants, and where Triton interprets them, one torch operator each.

As an operator a launch on a CPU is seen by what records torch operations, such as the simulator of CUDA graphs.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_backends.backends.triton.kernels.arguments import (
    BlockDims,
    CacheStrides,
    DecodeConstants,
    DecodeTensors,
    Descriptors,
    Flags,
    HopperConstants,
    HopperShape,
    HopperSteps,
    HopperStrides,
    HopperTensors,
    HopperVarying,
    PrefillConstants,
    PrefillRows,
    PrefillTensors,
    PrefillVarying,
    Scales,
    Strides,
    TableRow,
    UncappedScales,
    UpcastConstants,
    UpcastFrom,
    UpcastTensors,
    UpcastVarying,
    VisibleRange,
    Window,
)
from attn_backends.backends.triton.kernels.decode import decode_kernel
from attn_backends.backends.triton.kernels.prefill import prefill_kernel
from attn_backends.backends.triton.kernels.upcast import upcast_kernel
from attn_backends.backends.triton.row_layout import RowLayout, has_aligned_rows, kv_descriptors, row_layouts
from attn_backends.backends.triton.tuning import DecodeTile, PrefillTile, block_dims, upcast_heads
from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.launch import (
    Pdl,
    has_hopper_kernels,
    has_tensor_engine,
    launch,
    num_multiprocessors,
    operator,
    power_of_two,
    start_kernel,
    supports_pdl,
)
from attn_backends.kernels.split_kv import FAR, HOPPER_PAGE, MAX_SPLITS, SplitSizes, WorkList, padded
from attn_backends.spec import AttentionSpec

_MAX_TILE_ROWS = 64  # of decode: more queries of a row take several tiles
_REGISTERS = 65536  # of a multiprocessor
_COMBINE_REGISTERS = (
    128  # of a thread, for the splits that it combines at a time; no more than half of what it can have
)
HOPPER_ROWS = 128  # queries of a program of the kernel for Hopper
_HOPPER_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
_UPCAST_BLOCK = 64  # of a program
_L2_BYTES = 32 << 20  # that the keys and values of a section of heads may take


def visible_range(spec: AttentionSpec) -> VisibleRange:
    window_left = FAR.value if spec.window_left < 0 else spec.window_left
    return VisibleRange(0 if spec.causal else FAR.value, window_left, spec.chunk_size or FAR.value)


def num_visible_keys(spec: AttentionSpec, keys: IntArray) -> IntArray:
    """How many of so many keys up to a query's own it sees at most."""
    reach = spec.window_left + 1 if spec.window_left >= 0 else spec.chunk_size
    return keys if reach is None else np.minimum(keys, reach)


def num_hopper_tiles(spec: AttentionSpec, query_lens: IntArray) -> IntArray:
    """Number of tiles of each row, by the prefill kernel for Hopper, for one KV head."""
    return -(-query_lens // max(1, HOPPER_ROWS // spec.group_size))


def suits_hopper_kernel(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether the prefill kernel that is written for Hopper can serve a layer: logits as they are, in 16 bits."""
    return (
        has_hopper_kernels(device)
        and (spec.head_dim, spec.head_dim_vo) in _HOPPER_DIMS
        and spec.cache_dtype is spec.dtype is not torch.float32
        and spec.logits_soft_cap is None
        and spec.alibi_slopes is None
        and spec.scale > 0
        and spec.group_size <= HOPPER_ROWS
    )


def num_prefill_tiles(num_tokens: int, num_rows: int, tile_tokens: int) -> int:
    """Most that so many rows of so many query tokens in all can have (see `tile.rows_of`); of one row, what it has."""
    return (num_tokens + num_rows * (tile_tokens - 1)) // tile_tokens


class SplitPlan(NamedTuple):
    """How a decode row's queries, token times head of a KV head, lie in tiles."""

    tiles: int
    block_m: int  # of a tile
    used_m: int  # of them that are used at most, as a power of two

    @staticmethod
    def of(spec: AttentionSpec, query_len: int) -> SplitPlan:
        queries = query_len * spec.group_size
        rows = min(padded(queries), _MAX_TILE_ROWS)
        return SplitPlan(-(-queries // rows), rows, min(rows, power_of_two(queries)))

    def target(self, spec: AttentionSpec, tile: DecodeTile, num_sms: int) -> int:
        """Number of work items that fill a GPU: each is a program for every KV head and tile."""
        filling = max(1, num_sms * tile.programs // (spec.num_kv_heads * self.tiles))
        return min(filling, int(MAX_SPLITS.value) // 2)

    def num_partial_slots(self, spec: AttentionSpec, tile: DecodeTile, num_sms: int) -> int:
        """Number of work items that can be splits of rows (see `split_kv.schedule_kernel`)."""
        return -(-4 * self.target(spec, tile, num_sms) // 3)


class Rows(NamedTuple):
    """Rows that are not split. All tensors are on the device."""

    page_table: torch.Tensor | None  # [rows, max_pages] i32; None: keys lie by `key_start_loc`
    seq_lens: torch.Tensor  # [rows] i32
    query_start_loc: torch.Tensor  # [rows + 1] i32
    key_start_loc: torch.Tensor  # [rows] i32, or more
    first_row: int  # those before it are left alone
    num_tokens: int  # of all rows from there on
    num_upcast: int  # keys that they see and that are to be made 16 bits, or an upper bound of it
    max_seq_len: int  # or an upper bound of it


class Schedule:
    """How decode rows are split into work items: the list on the device, and what follows from shapes alone.

    Args:
        num_rows: of the batch, padding included.
        query_len: most query tokens of a row.
        num_sms: multiprocessors, which work items are to fill.
        counters: [num_rows * num_kv_heads * tiles] i32 or more, of the workspace that its launches use.
    """

    def __init__(
        self, spec: AttentionSpec, tile: DecodeTile, num_rows: int, query_len: int, num_sms: int,
        counters: torch.Tensor,
    ) -> None:  # fmt: skip
        self.tile = tile
        self.plan = SplitPlan.of(spec, query_len)
        target = self.plan.target(spec, tile, num_sms)
        work_items = counters.new_empty(num_rows + target, 8)
        min_blocks = max(1, tile.min_keys // tile.keys)
        _, window_left, chunk = visible_range(spec)
        sizes = SplitSizes(num_rows, target, window_left, chunk, tile.keys, min_blocks)
        self.work_list = WorkList(work_items, sizes, counters[: num_rows * spec.num_kv_heads * self.plan.tiles])


class Kernels:
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
        self.spec = spec
        self._prefill_tiles = {True: prefill, False: prompt}
        self._by_hopper = dict(zip((True, False), by_hopper, strict=True))
        nothing = torch.zeros(1, dtype=torch.float32, device=device)
        self._num_sms = num_multiprocessors(device)
        self._extras = (nothing if slopes is None else slopes, nothing if sinks is None else sinks)
        self._scales = {True: (k_scale, v_scale), False: (1.0, 1.0)}  # of the cache; of keys as they came
        self._visible, self._has_sinks = visible_range(spec), int(spec.sinks)
        self._supports_pdl, self._has_tensor_engine = supports_pdl(device), has_tensor_engine(device)
        self._is_local = spec.window_left >= 0 or spec.chunk_size is not None
        scale_first = spec.logits_soft_cap is not None or spec.alibi_slopes is not None or spec.scale <= 0
        self._logits = (int(spec.logits_soft_cap is not None), int(spec.alibi_slopes is not None), int(scale_first))
        self._dims = BlockDims(spec.head_dim, spec.head_dim_vo, *block_dims(spec))

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
                it is `prefill` and does; else `OFF`.
        """
        tile, plan = schedule.tile, schedule.plan
        threads = 32 * tile.warps
        registers = min(_COMBINE_REGISTERS, _REGISTERS // (tile.programs * threads) // 2) * threads
        block_splits = 1 << max(1, registers // (plan.used_m * self._dims[-1])).bit_length() - 1  # a power of two
        constants = DecodeConstants(
            *self._logits, _alike(key, value), _can_be_pairs(value), PAGE_SIZE=key.shape[1],
            KV_HEADS=self.spec.num_kv_heads, GROUP=self.spec.group_size, TILES=plan.tiles, BLOCK_M=plan.block_m,
            BLOCK_N=tile.keys, DIM=self._dims.DIM, DIM_VO=self._dims.DIM_VO, BLOCK_DIM=self._dims.BLOCK_DIM,
            BLOCK_DIM_VO=self._dims.BLOCK_DIM_VO, STAGES=tile.stages,
            MASKED_STAGES=tile.stages if self._is_local else 1, EXACT=int(query.dtype is torch.float32),
            USED_M=plan.used_m, BLOCK_SPLITS=block_splits, PDL=int(pdl),
        )  # fmt: skip
        grid = schedule.work_list.work_items.shape[0] * self.spec.num_kv_heads * plan.tiles
        _decode(query, key, value, output, lse, page_table, schedule.work_list.work_items, *workspace, *self._extras,
                self._scales_of(True), self._visible, self._has_sinks, constants, grid, tile.warps)  # fmt: skip

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
        count = upcast_heads(spec, rows.num_upcast, len(upcast_kv))
        if not count:
            return self._attend(query, key, value, output, lse, rows, tiles, 0, rows.page_table is not None, share)
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
            self._attend(query[:, part], keys, values, output[:, part], head_lse, dense, tiles, first, True, None)
        return Pdl.OFF

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor | None, rows: Rows, tiles: torch.Tensor, first_head: int, is_cached: bool,
        share: float | None,
    ) -> Pdl:  # fmt: skip
        """KV heads from `first_head` on, as many as the keys have. Keys from the cache are scaled."""
        spec, is_paged, num_kv_heads = self.spec, rows.page_table is not None, key.shape[-2]
        tile = self._prefill_tiles[is_paged]
        page_size = key.shape[1] if is_paged else 0
        on_hopper = self._by_hopper[is_paged] and page_size % HOPPER_PAGE == 0 and has_aligned_rows(query)
        in_blocks = self._dims[:2] == self._dims[2:] and page_size % tile.keys == 0
        layouts = None
        if (on_hopper or in_blocks) and query.dtype is key.dtype and self._has_tensor_engine:
            layouts = row_layouts(key, value)
        on_hopper, in_blocks = on_hopper and layouts is not None, in_blocks and layouts is not None
        tile_tokens = max(1, (HOPPER_ROWS if on_hopper else tile.rows) // spec.group_size)
        head_bytes = max(1, rows.max_seq_len) * (spec.head_dim + spec.head_dim_vo) * key.itemsize
        section = min(max(1, _L2_BYTES // head_bytes), num_kv_heads)
        num_rows = rows.seq_lens.shape[0] - rows.first_row
        num_tiles = num_prefill_tiles(rows.num_tokens, num_rows, tile_tokens)
        tiled = PrefillRows(rows.first_row, num_rows, num_tiles, section)
        slopes, sinks = self._extras
        sinks = sinks[first_head * spec.group_size :] if spec.sinks else sinks
        tensors = (query, key, value, output, lse, *rows[:4])
        scales, visible, has_sinks = self._scales_of(is_cached), self._visible, self._has_sinks
        if on_hopper and layouts is not None:
            next_pdl, num_programs = Pdl.OFF, self._num_sms
            if share is not None and self._supports_pdl:
                next_pdl, num_programs = Pdl.WAIT_LAST, math.ceil(share * num_programs)
            shape = HopperShape(
                page_size, num_kv_heads, spec.group_size, tile_tokens, spec.head_dim, spec.head_dim_vo,
                launch_dependents=int(next_pdl is Pdl.WAIT_LAST),
            )  # fmt: skip
            _prefill_on_hopper(*tensors, sinks, tiles, layouts, scales, visible, has_sinks, tiled, shape,
                               num_programs)  # fmt: skip
            return next_pdl
        constants = PrefillConstants(
            *self._logits, _alike(key, value), PAGE_SIZE=page_size, KV_HEADS=num_kv_heads, GROUP=spec.group_size,
            BLOCK_Q=tile_tokens, BLOCK_M=padded(tile_tokens * spec.group_size), BLOCK_N=tile.keys, DIM=self._dims.DIM,
            DIM_VO=self._dims.DIM_VO, BLOCK_DIM=self._dims.BLOCK_DIM, BLOCK_DIM_VO=self._dims.BLOCK_DIM_VO,
            STAGES=tile.stages, LOCAL=int(self._is_local), EXACT=int(query.dtype is torch.float32),
        )  # fmt: skip
        _prefill(*tensors, slopes, sinks, scales, visible, has_sinks, tiled, constants,
                 tile.keys if in_blocks else 0, tile.warps)  # fmt: skip
        return Pdl.OFF

    def _scales_of(self, cached: bool) -> Scales:
        k_scale, v_scale = self._scales[cached]
        cap = self.spec.logits_soft_cap
        return Scales(self.spec.scale * k_scale * (math.log2(math.e) if cap is None else 1.0), v_scale, cap or 0.0)


def _alike(key: torch.Tensor, value: torch.Tensor) -> int:
    """Whether keys and values lie alike: where they are is then worked out once for both."""
    return int(key.stride() == value.stride())


def _can_be_pairs(value: torch.Tensor) -> int:
    """Whether values are of 8 bits, and can be read two by two."""
    return int(value.itemsize == 1 and not any(stride % 2 for stride in (*value.stride()[:-1], value.data_ptr())))


def _strides(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None
) -> Strides:
    """The strides of both portable kernels. Keys without pages are [tokens, heads, dim]."""
    page = (key.stride(0), value.stride(0)) if key.dim() == 4 else (0, 0)
    cached = (page[0], *key.stride()[-3:-1], page[1], *value.stride()[-3:-1])
    return Strides._make((*query.stride()[:2], *cached, *output.stride()[:2], 0 if lse is None else lse.stride(0)))


@operator(("output", "lse", "partial_acc", "partial_ml", "counters"))
def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor, work_items: torch.Tensor, partial_acc: torch.Tensor, partial_ml: torch.Tensor,
    counters: torch.Tensor, slopes: torch.Tensor, sinks: torch.Tensor, scales: Scales, visible: VisibleRange,
    has_sinks: int, constants: DecodeConstants, grid: int, warps: int,
) -> None:  # fmt: skip
    tensors = DecodeTensors(query, key, value, output, partial_ml if lse is None else lse, page_table, work_items,
                            partial_acc, partial_ml, counters, slopes, sinks)  # fmt: skip
    groups = (scales, visible, Flags(has_sinks, int(lse is not None)), _strides(query, key, value, output, lse),
              constants)  # fmt: skip
    launch(decode_kernel, grid, tensors, TableRow(page_table.stride(0)), groups, warps, use_pdl=constants.PDL > 0)


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


@operator(("output", "lse"))
def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor | None, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor, slopes: torch.Tensor, sinks: torch.Tensor, scales: Scales, visible: VisibleRange,
    has_sinks: int, tiled: PrefillRows, constants: PrefillConstants, block_keys: int, warps: int,
) -> None:  # fmt: skip
    descriptors = Descriptors(*kv_descriptors(key, value, block_keys)) if block_keys else Descriptors(None, None)
    table, stride = (seq_lens, 0) if page_table is None else (page_table, page_table.stride(0))
    tensors = PrefillTensors(query, key, value, output, sinks if lse is None else lse, table, seq_lens,
                             query_start_loc, key_start_loc, slopes, sinks)  # fmt: skip
    groups = (scales, visible, Flags(has_sinks, int(lse is not None)), _strides(query, key, value, output, lse),
              constants)  # fmt: skip
    launch(prefill_kernel, tiled.num_tiles * constants.KV_HEADS, tensors, PrefillVarying(*tiled, stride), groups,
           warps, descriptors=descriptors)  # fmt: skip


@cache
def _for_hopper() -> tuple[Any, Any]:
    from attn_backends.backends.triton.kernels import prefill_hopper
    from attn_backends.kernels import hopper  # not every Triton has what these import

    return hopper, prefill_hopper


def _prefill_on_hopper(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor | None, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor, sinks: torch.Tensor, tiles: torch.Tensor, layouts: tuple[RowLayout, RowLayout],
    scales: Scales, visible: VisibleRange, has_sinks: int, tiled: PrefillRows, shape: HopperShape, num_programs: int,
) -> None:  # fmt: skip
    hopper, prefill_hopper = _for_hopper()
    first_row, num_rows, num_tiles, section = tiled
    keys = prefill_hopper.block_n(shape.head_dim)
    window_right, window_left, chunk = visible
    has_whole_blocks = keys <= min(window_left, chunk) < FAR.value  # within a window, or a chunk
    rows = hopper.tma_rows(shape.page_size, keys)
    key_layout, value_layout = layouts
    descriptors = Descriptors(
        hopper.tma_descriptor(*key_layout.layout, key, rows),
        hopper.tma_descriptor(*value_layout.layout, value, rows),
    )
    *page_rows, head_rows = key_layout.steps
    num_batches = -(-keys // rows // prefill_hopper.BATCH.value)
    table, stride = (seq_lens, 0) if page_table is None else (page_table, page_table.stride(0))
    tensors = HopperTensors(query, output, sinks if lse is None else lse, table, seq_lens, query_start_loc,
                            key_start_loc, sinks, tiles)  # fmt: skip
    groups = (
        UncappedScales(*scales[:2]),
        Window(window_right, window_left),
        Flags(has_sinks, int(lse is not None)),
        HopperSteps._make((*(page_rows or [0]), head_rows, num_batches, key_layout.column, value_layout.column)),
        HopperStrides._make((*query.stride()[:2], *output.stride()[:2], 0 if lse is None else lse.stride(0))),
        HopperConstants(
            CHUNK=chunk, LOCAL=int(has_whole_blocks), PAGE_SIZE=shape.page_size, TMA_ROWS=rows,
            KV_HEADS=shape.num_kv_heads, GROUP=shape.group_size, BLOCK_Q=shape.tile_tokens, BLOCK_N=keys,
            DIM=shape.head_dim, DIM_VO=shape.head_dim_vo, Q_STAGES=prefill_hopper.q_stages(shape.head_dim),
            LAUNCH_DEPENDENTS=shape.launch_dependents,
        ),
    )  # fmt: skip
    launch(prefill_hopper.prefill_hopper_kernel, min(num_tiles * shape.num_kv_heads, num_programs), tensors,
           HopperVarying(first_row, num_rows, section, stride), groups, prefill_hopper.GROUP_WARPS,
           descriptors=descriptors)  # fmt: skip

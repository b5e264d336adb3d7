"""Launches of the prefill kernels, over keys in pages or one behind the other: grids, constants, and where Triton
interprets them, one torch operator each.

As an operator a launch on a CPU is seen by what records torch operations, such as the simulator of CUDA graphs.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.launch import (
    has_hopper_kernels,
    has_tensor_engine,
    launch,
    num_multiprocessors,
    supports_pdl,
)
from attn_backends.kernels.operators import operator
from attn_backends.kernels.pdl import Pdl
from attn_backends.kernels.prefill.arguments import (
    BlockDims,
    Descriptors,
    Flags,
    HopperShape,
    PrefillConstants,
    PrefillRows,
    PrefillTensors,
    PrefillVarying,
    Scales,
    Strides,
    VisibleRange,
)
from attn_backends.kernels.prefill.hopper_launch import prefill_on_hopper
from attn_backends.kernels.prefill.portable_kernel import prefill_kernel
from attn_backends.kernels.prefill.row_layout import RowLayout, has_aligned_rows, kv_descriptors, row_layouts
from attn_backends.kernels.prefill.split_launch import TileList, join_splits
from attn_backends.kernels.prefill.split_tiles import SplitTile, hopper_tile, most_tiles
from attn_backends.kernels.prefill.tiles import (
    HopperTile,
    ShortTile,
    all_tiles,
    count_tiles,
    hopper_tiles,
    section_heads,
)
from attn_backends.kernels.split_kv import FAR, HOPPER_PAGE
from attn_backends.spec import FP8_DTYPES, AttentionSpec

HOPPER_ROWS = 128  # queries of a tile of the kernel for Hopper, but for narrow heads with many, and wide ones of 8 bits
HOPPER_DIMS = (
    (64, 64), (80, 80), (96, 64), (96, 96), (112, 112), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256),
)  # fmt: skip
_Tensors = tuple[  # query, key, value, output, lse, page_table, seq_lens, query_start_loc, key_start_loc, sinks, tiles
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor,
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
]  # fmt: skip


class TileSizes(Protocol):
    """A tile of the portable kernel."""

    @property
    def rows(self) -> int: ...  # query tokens times the query heads of a KV head, a power of two
    @property
    def keys(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...


def visible_range(spec: AttentionSpec) -> VisibleRange:
    window_left = FAR.value if spec.window_left < 0 else spec.window_left
    return VisibleRange(0 if spec.causal else FAR.value, window_left, spec.chunk_size or FAR.value)


def num_visible_keys(spec: AttentionSpec, keys: IntArray) -> IntArray:
    """How many of so many keys up to a query's own it sees at most."""
    reach = spec.window_left + 1 if spec.window_left >= 0 else spec.chunk_size
    return keys if reach is None else np.minimum(keys, min(reach, FAR.value))  # which 32 bits hold


def num_hopper_tiles(spec: AttentionSpec, query_lens: IntArray) -> NDArray[np.int64]:
    """Number of tiles of each row, by the prefill kernel for Hopper, for one KV head."""
    return count_tiles(query_lens, spec.group_size, HOPPER_ROWS)


def suits_hopper_kernel(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether the prefill kernel that is written for Hopper can serve a layer: logits as they are, in 16 bits, of keys
    in 16 or 8."""
    return (
        has_hopper_kernels(device)
        and (spec.head_dim, spec.head_dim_vo) in HOPPER_DIMS
        and spec.dtype is not torch.float32
        and (spec.cache_dtype is spec.dtype or spec.cache_dtype in FP8_DTYPES)
        and spec.logits_soft_cap is None
        and spec.alibi_slopes is None
        and spec.scale > 0
        and spec.group_size <= all_tiles(spec)[0].rows
    )


def portable_tile(spec: AttentionSpec, tile: TileSizes) -> SplitTile:
    """What the portable prefill kernel reads at a time, by its tile."""
    return SplitTile(spec.group_size, tile.rows, tile.keys)


class Rows(NamedTuple):
    """Rows of a prefill. All tensors are on the device."""

    page_table: torch.Tensor | None  # [rows, max_pages] i32; None: keys lie by `key_start_loc`
    seq_lens: torch.Tensor  # [rows] i32
    query_start_loc: torch.Tensor  # [rows + 1] i32
    key_start_loc: torch.Tensor  # [rows] i32, or more
    first_row: int  # those before it are left alone
    num_tokens: int  # of all rows from there on
    num_upcast: int  # keys that they see and that are to be made 16 bits, or an upper bound of it
    max_seq_len: int  # or an upper bound of it
    splits: TileList | None = None  # the tiles of rows from `first_row` on; None: they are whole, and rows as given
    short_tile: ShortTile | None = None  # of the portable kernel, which serves in place of the one for Hopper
    hopper_tile: HopperTile | None = None  # of the one for Hopper, without splits; None: the usual one, whose lists are


class PrefillKernels:
    """The prefill launches of one layer: all that does not change from step to step is worked out once.

    Args:
        dims: of a block of keys and of values.
        tiles: the portable kernel's, by whether keys are in pages.
        by_hopper: whether the kernel for Hopper, which has a tile of its own, may serve, likewise.
        slopes, sinks: [num_qo_heads] f32 on the device, where the layer has them.
        k_scale, v_scale: of the cache.
    """

    def __init__(
        self, spec: AttentionSpec, dims: BlockDims, tiles: dict[bool, TileSizes], by_hopper: dict[bool, bool],
        slopes: torch.Tensor | None, sinks: torch.Tensor | None, k_scale: float, v_scale: float, device: torch.device,
    ) -> None:  # fmt: skip
        self.spec = spec
        self._tiles, self._by_hopper = tiles, by_hopper
        nothing = torch.zeros(1, dtype=torch.float32, device=device)  # in the place of what the layer has not
        self.of_layer = slopes, sinks, nothing
        self._num_sms = num_multiprocessors(device)
        self._extras = (nothing if slopes is None else slopes, nothing if sinks is None else sinks)
        self._scales = {True: _scales_of(spec, k_scale, v_scale), False: _scales_of(spec, 1.0, 1.0)}  # by is_cached
        self._visible, self._has_sinks = visible_range(spec), int(spec.sinks)
        self._supports_pdl, self._has_tensor_engine = supports_pdl(device), has_tensor_engine(device)
        self._is_local = spec.is_local
        scale_first = spec.logits_soft_cap is not None or spec.alibi_slopes is not None or spec.scale <= 0
        self._logits = (int(spec.logits_soft_cap is not None), int(spec.alibi_slopes is not None), int(scale_first))
        self._dims = dims

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor | None, rows: Rows, tiles: torch.Tensor, first_head: int, is_cached: bool,
        share: float | None,
    ) -> Pdl:  # fmt: skip
        """Attend with the KV heads from `first_head` on, as many as the keys have. Keys from the cache are scaled.

        `tiles` [2] i32, zeros, is where programs count what they take. Returns when the next launch can start, if that
        is a decode of other rows: `share` is the part of the GPU that is enough beside it. None: it is not. Where keys
        are split they take all of it.
        """
        spec, is_paged, num_kv_heads = self.spec, rows.page_table is not None, key.shape[-2]
        tile, of_hopper = self._served_by(is_paged, rows, key.itemsize == 1)
        page_size = key.shape[1] if is_paged else 0
        on_hopper = of_hopper is not None and page_size % HOPPER_PAGE == 0 and has_aligned_rows(query)
        is_one_block = isinstance(tile, ShortTile) and tile.is_one_block
        in_blocks = query.dtype is key.dtype and self._dims[:2] == self._dims[2:] and page_size % tile.keys == 0
        layouts = None
        in_blocks = in_blocks and not is_one_block
        if (on_hopper or in_blocks) and self._has_tensor_engine:
            layouts = row_layouts(key, value)
        on_hopper, in_blocks = on_hopper and layouts is not None, in_blocks and layouts is not None
        num_rows, served_by = rows.seq_lens.shape[0] - rows.first_row, of_hopper if on_hopper and of_hopper else tile
        num_tiles = most_tiles(rows.num_tokens * spec.group_size, num_rows, served_by.rows)
        section = section_heads(spec, rows.max_seq_len, key.itemsize, num_kv_heads)
        tiled = PrefillRows(rows.first_row, num_rows, num_tiles, section)
        slopes, sinks = self._extras
        sinks = sinks[first_head * spec.group_size :] if spec.sinks else sinks
        tensors = (query, key, value, output, lse, *rows[:4])
        scales, visible, has_sinks = self._scales[is_cached], self._visible, self._has_sinks
        if on_hopper and of_hopper and layouts is not None:
            shape = HopperShape(
                of_hopper, page_size, num_kv_heads, spec.group_size, spec.head_dim, spec.head_dim_vo,
                use_pdl=int(self._supports_pdl), launch_dependents=0,
            )  # fmt: skip
            return self._attend_on_hopper((*tensors, sinks, tiles), layouts, scales, tiled, shape, rows.splits, share)
        splits = None if rows.splits is None else _listed_for(portable_tile(spec, tile), num_kv_heads, rows.splits)
        lists = (None, None, None) if splits is None else (splits.work_items, splits.partial_acc, splits.partial_ml)
        constants = self._constants(key, value, page_size, tile, splits, is_one_block)
        _prefill(*tensors, slopes, sinks, *lists, scales, visible, has_sinks, tiled, constants,
                 tile.keys if in_blocks else 0, tile.warps)  # fmt: skip
        if splits is not None:
            self._join((*tensors, sinks, tiles), scales, num_kv_heads, splits, use_pdl=self._supports_pdl)
        return Pdl.OFF

    def _served_by(self, is_paged: bool, rows: Rows, is_8_bit: bool) -> tuple[TileSizes, HopperTile | None]:
        """The portable kernel's tile, and that of the kernel for Hopper, if it may serve."""
        if not self._by_hopper[is_paged]:
            return self._tiles[is_paged], None
        if rows.short_tile is not None:
            return rows.short_tile, None
        usual = hopper_tiles(self.spec.head_dim, self.spec.head_dim_vo, is_8_bit)[0]
        return self._tiles[is_paged], rows.hopper_tile or usual

    def _attend_on_hopper(
        self, tensors: _Tensors, layouts: tuple[RowLayout, RowLayout], scales: Scales, tiled: PrefillRows,
        shape: HopperShape, splits: TileList | None, share: float | None,
    ) -> Pdl:  # fmt: skip
        """Launch, and join what was split; `tensors` are as `prefill_on_hopper` takes them."""
        next_pdl, num_programs = Pdl.OFF, shape.tile.beside * self._num_sms
        splits = None if splits is None else _listed_for(hopper_tile(self.spec, shape.tile), shape.num_kv_heads, splits)
        is_whole = splits is None or not splits.max_split_items
        if is_whole and share is not None and self._supports_pdl:
            next_pdl, num_programs = Pdl.WAIT_LAST, math.ceil(share * num_programs)
        lets_next = next_pdl is Pdl.WAIT_LAST or (splits is not None and self._supports_pdl)
        shape = shape._replace(launch_dependents=1) if lets_next else shape
        prefill_on_hopper(*tensors, layouts, scales, self._visible, self._has_sinks, tiled, splits, shape, num_programs)
        if splits is not None:
            self._join(tensors, scales, shape.num_kv_heads, splits, lets_next)
        return next_pdl

    def _join(self, tensors: _Tensors, scales: Scales, num_kv_heads: int, splits: TileList, use_pdl: bool) -> None:
        _query, _key, _value, output, lse, _table, _lens, _starts, _key_starts, sinks, _tiles = tensors
        dims = self._dims.DIM_VO, self._dims.BLOCK_DIM_VO
        join_splits(output, lse, sinks, splits, num_kv_heads, self.spec.group_size, dims, scales.value_scale,
                    self._has_sinks, use_pdl)  # fmt: skip

    def _constants(
        self, key: torch.Tensor, value: torch.Tensor, page_size: int, tile: TileSizes, splits: TileList | None,
        is_one_block: bool,
    ) -> PrefillConstants:  # fmt: skip
        spec, (_, window_left, chunk) = self.spec, self._visible  # as long as a block they hide nothing of it
        is_local = self._is_local and (not is_one_block or min(window_left + 1, chunk) < tile.keys)
        return PrefillConstants(
            *self._logits, is_alike(key, value), PAGE_SIZE=page_size, KV_HEADS=key.shape[-2], GROUP=spec.group_size,
            BLOCK_M=tile.rows, BLOCK_N=tile.keys, DIM=self._dims.DIM, DIM_VO=self._dims.DIM_VO,
            BLOCK_DIM=self._dims.BLOCK_DIM, BLOCK_DIM_VO=self._dims.BLOCK_DIM_VO,
            STAGES=tile.stages, LOCAL=int(is_local), EXACT=int(spec.dtype is torch.float32),
            SPLIT=int(splits is not None), ONE_BLOCK=int(is_one_block), USE_PDL=int(self._supports_pdl),
        )  # fmt: skip


def _scales_of(spec: AttentionSpec, k_scale: float, v_scale: float) -> Scales:
    cap = spec.logits_soft_cap
    return Scales(spec.scale * k_scale * (math.log2(math.e) if cap is None else 1.0), v_scale, cap or 0.0)


def _listed_for(tile: SplitTile, num_kv_heads: int, splits: TileList) -> TileList | None:
    """A list of such tiles; one that was made for another kernel's, or for fewer KV heads, is none, unless a launch
    without it has other rows (ValueError)."""
    if splits.tile != tile and splits.is_mixed:
        raise ValueError("queries, keys and values do not lie in multiples of 16 bytes, as the kernel for Hopper reads "
                         "them, for which graphs of mixed batches list tiles: align them, or run eager")  # fmt: skip
    return splits if splits.tile == tile and splits.num_kv_heads >= num_kv_heads else None


def is_alike(key: torch.Tensor, value: torch.Tensor) -> int:
    """Whether keys and values lie alike: where they are is then worked out once for both."""
    return int(key.stride() == value.stride())


def strides_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None
) -> Strides:
    """The strides of both portable kernels. Keys without pages are [tokens, heads, dim]."""
    page = (key.stride(0), value.stride(0)) if key.dim() == 4 else (0, 0)
    cached = (page[0], *key.stride()[-3:-1], page[1], *value.stride()[-3:-1])
    return Strides._make((*query.stride()[:2], *cached, *output.stride()[:2], 0 if lse is None else lse.stride(0)))


@operator(("output", "lse", "partial_acc", "partial_ml"))
def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor | None, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor, slopes: torch.Tensor, sinks: torch.Tensor, work_items: torch.Tensor | None,
    partial_acc: torch.Tensor | None, partial_ml: torch.Tensor | None, scales: Scales, visible: VisibleRange,
    has_sinks: int, tiled: PrefillRows, constants: PrefillConstants, block_keys: int, warps: int,
) -> None:  # fmt: skip
    descriptors = Descriptors(*kv_descriptors(key, value, block_keys)) if block_keys else Descriptors(None, None)
    table, of_table = seq_lens, (0, 0)
    if page_table is not None:
        table, of_table = page_table, (page_table.stride(0), page_table.shape[1])
    num_programs = (tiled.num_tiles if work_items is None else len(work_items)) * constants.KV_HEADS
    tensors = PrefillTensors(
        query, key, value, output, sinks if lse is None else lse, table, seq_lens, query_start_loc, key_start_loc,
        slopes, sinks, seq_lens if work_items is None else work_items, sinks if partial_acc is None else partial_acc,
        sinks if partial_ml is None else partial_ml,
    )  # fmt: skip
    groups = (scales, visible, Flags(has_sinks, int(lse is not None)), strides_of(query, key, value, output, lse),
              constants)  # fmt: skip
    launch(prefill_kernel, num_programs, tensors, PrefillVarying(*tiled, *of_table), groups,
           warps, descriptors=descriptors, use_pdl=constants.USE_PDL > 0)  # fmt: skip

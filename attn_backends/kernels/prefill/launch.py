"""Launches of the prefill kernels, over keys in pages or one behind the other: grids, constants, and where Triton
interprets them, one torch operator each.

As an operator a launch on a CPU is seen by what records torch operations, such as the simulator of CUDA graphs.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.launch import (
    Fixed,
    Pdl,
    fixed_numbers,
    has_hopper_kernels,
    has_tensor_engine,
    launch,
    num_multiprocessors,
    operator,
    supports_pdl,
)
from attn_backends.kernels.prefill.arguments import (
    BlockDims,
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
    UncappedScales,
    VisibleRange,
    Window,
)
from attn_backends.kernels.prefill.portable_kernel import prefill_kernel
from attn_backends.kernels.prefill.row_layout import RowLayout, has_aligned_rows, kv_descriptors, row_layouts
from attn_backends.kernels.split_kv import FAR, HOPPER_PAGE
from attn_backends.kernels.tiles import padded
from attn_backends.spec import AttentionSpec

HOPPER_ROWS = 128  # queries of a program of the kernel for Hopper
HOPPER_DIMS = (
    (64, 64), (80, 80), (96, 64), (96, 96), (112, 112), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256),
)  # fmt: skip
_L2_BYTES = 32 << 20  # that the keys and values of a section of heads may take


class TileSizes(Protocol):
    """A tile of the portable kernel."""

    @property
    def rows(self) -> int: ...  # query tokens times the query heads of a KV head
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
    return keys if reach is None else np.minimum(keys, reach)


def num_hopper_tiles(spec: AttentionSpec, query_lens: IntArray) -> IntArray:
    """Number of tiles of each row, by the prefill kernel for Hopper, for one KV head."""
    return -(-query_lens // max(1, HOPPER_ROWS // spec.group_size))


def suits_hopper_kernel(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether the prefill kernel that is written for Hopper can serve a layer: logits as they are, in 16 bits."""
    return (
        has_hopper_kernels(device)
        and (spec.head_dim, spec.head_dim_vo) in HOPPER_DIMS
        and spec.cache_dtype is spec.dtype is not torch.float32
        and spec.logits_soft_cap is None
        and spec.alibi_slopes is None
        and spec.scale > 0
        and spec.group_size <= HOPPER_ROWS
    )


def num_prefill_tiles(num_tokens: int, num_rows: int, tile_tokens: int) -> int:
    """Most that so many rows of so many query tokens in all can have (see `rows_of`); of one row, what it has."""
    return (num_tokens + num_rows * (tile_tokens - 1)) // tile_tokens


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
        nothing = torch.zeros(1, dtype=torch.float32, device=device)
        self._num_sms = num_multiprocessors(device)
        self._extras = (nothing if slopes is None else slopes, nothing if sinks is None else sinks)
        self._scales = {True: (k_scale, v_scale), False: (1.0, 1.0)}  # of the cache; of keys as they came
        self._visible, self._has_sinks = visible_range(spec), int(spec.sinks)
        self._supports_pdl, self._has_tensor_engine = supports_pdl(device), has_tensor_engine(device)
        self._is_local = spec.window_left >= 0 or spec.chunk_size is not None
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
        is a decode of other rows: `share` is the part of the GPU that is enough beside it. None: it is not.
        """
        spec, is_paged, num_kv_heads = self.spec, rows.page_table is not None, key.shape[-2]
        tile = self._tiles[is_paged]
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
        constants = self._constants(key, value, page_size, tile, tile_tokens)
        _prefill(*tensors, slopes, sinks, scales, visible, has_sinks, tiled, constants,
                 tile.keys if in_blocks else 0, tile.warps)  # fmt: skip
        return Pdl.OFF

    def _constants(
        self, key: torch.Tensor, value: torch.Tensor, page_size: int, tile: TileSizes, tile_tokens: int
    ) -> PrefillConstants:
        spec = self.spec
        return PrefillConstants(
            *self._logits, is_alike(key, value), PAGE_SIZE=page_size, KV_HEADS=key.shape[-2], GROUP=spec.group_size,
            BLOCK_Q=tile_tokens, BLOCK_M=padded(tile_tokens * spec.group_size), BLOCK_N=tile.keys, DIM=self._dims.DIM,
            DIM_VO=self._dims.DIM_VO, BLOCK_DIM=self._dims.BLOCK_DIM, BLOCK_DIM_VO=self._dims.BLOCK_DIM_VO,
            STAGES=tile.stages, LOCAL=int(self._is_local), EXACT=int(spec.dtype is torch.float32),
        )  # fmt: skip

    def _scales_of(self, cached: bool) -> Scales:
        k_scale, v_scale = self._scales[cached]
        cap = self.spec.logits_soft_cap
        return Scales(self.spec.scale * k_scale * (math.log2(math.e) if cap is None else 1.0), v_scale, cap or 0.0)


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
    groups = (scales, visible, Flags(has_sinks, int(lse is not None)), strides_of(query, key, value, output, lse),
              constants)  # fmt: skip
    launch(prefill_kernel, tiled.num_tiles * constants.KV_HEADS, tensors, PrefillVarying(*tiled, stride), groups,
           warps, descriptors=descriptors)  # fmt: skip


@cache
def _for_hopper() -> tuple[Any, Any]:
    from attn_backends.kernels import hopper
    from attn_backends.kernels.prefill import hopper_kernel  # not every Triton has what these import

    return hopper, hopper_kernel


def _prefill_on_hopper(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor | None, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor, sinks: torch.Tensor, tiles: torch.Tensor, layouts: tuple[RowLayout, RowLayout],
    scales: Scales, visible: VisibleRange, has_sinks: int, tiled: PrefillRows, shape: HopperShape, num_programs: int,
) -> None:  # fmt: skip
    hopper, hopper_kernel = _for_hopper()
    lse_stride = None if lse is None else lse.stride(0)
    strides, dims = (*query.stride()[:2], *output.stride()[:2]), (key.shape[-1], value.shape[-1])
    found = _hopper_numbers(layouts, dims, scales, visible, has_sinks, strides, lse_stride, shape)
    numbers, (keys, values), rows = found
    descriptors = Descriptors(hopper.tma_descriptor(keys.shape, keys.strides, key, rows),
                              hopper.tma_descriptor(values.shape, values.strides, value, rows))  # fmt: skip
    first_row, num_rows, num_tiles, section = tiled
    table, stride = (seq_lens, 0) if page_table is None else (page_table, page_table.stride(0))
    tensors = HopperTensors(query, output, sinks if lse is None else lse, table, seq_lens, query_start_loc,
                            key_start_loc, sinks, tiles)  # fmt: skip
    launch(hopper_kernel.prefill_hopper_kernel, min(num_tiles * shape.num_kv_heads, num_programs), tensors,
           HopperVarying(first_row, num_rows, section, stride), numbers, hopper_kernel.GROUP_WARPS,
           descriptors=descriptors)  # fmt: skip


@lru_cache(maxsize=256)  # layers and steps are alike
def _hopper_numbers(
    layouts: tuple[RowLayout, RowLayout], dims: tuple[int, int], scales: Scales, visible: VisibleRange, has_sinks: int,
    strides: tuple[int, ...], lse_stride: int | None, shape: HopperShape,
) -> tuple[Fixed, list[Any], int]:  # fmt: skip
    """What follows from shapes and strides: a launch's numbers, keys and values in TMA tiles, and a tile's rows."""
    hopper, hopper_kernel = _for_hopper()
    keys = hopper_kernel.block_n(shape.head_dim)
    window_right, window_left, chunk = visible
    has_whole_blocks = keys <= min(window_left, chunk) < FAR.value  # within a window, or a chunk
    rows = hopper.tma_rows(shape.page_size, keys)
    in_tiles = [layout.in_tiles(dim, hopper.TMA_COLS.value) for layout, dim in zip(layouts, dims, strict=True)]
    *page_rows, head_rows = layouts[0].steps
    num_batches = -(-keys // rows // hopper_kernel.BATCH.value)
    numbers = fixed_numbers(
        hopper_kernel.prefill_hopper_kernel,
        UncappedScales(*scales[:2]),
        Window(window_right, window_left),
        Flags(has_sinks, int(lse_stride is not None)),
        HopperSteps._make((*(page_rows or [0]), head_rows, num_batches, *(tiles.head for tiles in in_tiles))),
        HopperStrides._make((*strides, lse_stride or 0)),
        HopperConstants(
            CHUNK=chunk, LOCAL=int(has_whole_blocks), PAGE_SIZE=shape.page_size, TMA_ROWS=rows,
            KV_HEADS=shape.num_kv_heads, GROUP=shape.group_size, BLOCK_Q=shape.tile_tokens, BLOCK_N=keys,
            DIM=shape.head_dim, DIM_VO=shape.head_dim_vo, Q_STAGES=hopper_kernel.q_stages(shape.head_dim),
            LAUNCH_DEPENDENTS=shape.launch_dependents,
        ),
    )  # fmt: skip
    return numbers, in_tiles, rows

"""Launches of the prefill kernel for Hopper: descriptors, constants, and its grid."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

from attn_backends.kernels.launch import Fixed, fixed_numbers, launch
from attn_backends.kernels.prefill.arguments import (
    Descriptors,
    Flags,
    HopperConstants,
    HopperShape,
    HopperSteps,
    HopperStrides,
    HopperTensors,
    HopperVarying,
    PrefillRows,
    Scales,
    UncappedScales,
    VisibleRange,
    Window,
)
from attn_backends.kernels.prefill.row_layout import RowLayout, TiledRows, row_layouts
from attn_backends.kernels.prefill.split_launch import TileList
from attn_backends.kernels.split_kv import FAR


@cache
def _for_hopper() -> tuple[Any, Any]:
    from attn_backends.kernels import hopper
    from attn_backends.kernels.prefill import hopper_kernel  # not every Triton has what these import

    return hopper, hopper_kernel


def prefill_on_hopper(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor | None, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor, sinks: torch.Tensor, tiles: torch.Tensor, layouts: tuple[RowLayout, RowLayout],
    scales: Scales, visible: VisibleRange, has_sinks: int, tiled: PrefillRows, splits: TileList | None,
    shape: HopperShape, num_programs: int,
) -> None:  # fmt: skip
    """Args: num_programs: that suffice, however many tiles there are; splits: the list of tiles, where there is one."""
    hopper, hopper_kernel = _for_hopper()
    cache_dtype = key.dtype
    if shape.tile.raw_stages:  # two columns as one
        key, value = key.view(query.dtype), value.view(query.dtype)
        of_pairs = row_layouts(key, value)
        assert of_pairs is not None
        layouts = of_pairs
    first_row, num_rows, num_tiles, section = tiled
    strides, lse_stride = (*query.stride()[:2], *output.stride()[:2]), None if lse is None else lse.stride(0)
    numbers, (keys, values), rows = _numbers(
        layouts, (key.shape[-1], value.shape[-1]), scales, visible, has_sinks, strides, lse_stride, shape,
        splits is not None, cache_dtype,
    )  # fmt: skip
    descriptors = Descriptors(hopper.tma_descriptor(keys.shape, keys.strides, key, rows),
                              hopper.tma_descriptor(values.shape, values.strides, value, rows))  # fmt: skip
    table, stride = (seq_lens, 0) if page_table is None else (page_table, page_table.stride(0))
    lists = (tiles, sinks, sinks) if splits is None else (splits.work_items, splits.partial_acc, splits.partial_ml)
    num_items = num_tiles if splits is None else len(splits.work_items)
    tensors = HopperTensors(query, output, sinks if lse is None else lse, table, seq_lens, query_start_loc,
                            key_start_loc, sinks, tiles, *lists)  # fmt: skip
    launch(hopper_kernel.prefill_hopper_kernel, min(num_items * shape.num_kv_heads, num_programs), tensors,
           HopperVarying(first_row, num_rows, section, stride, num_items), numbers, hopper_kernel.GROUP_WARPS,
           descriptors=descriptors, use_pdl=shape.use_pdl > 0, most_registers=shape.tile.most_registers)  # fmt: skip


@lru_cache(maxsize=256)  # layers and steps are alike
def _numbers(
    layouts: tuple[RowLayout, RowLayout], dims: tuple[int, int], scales: Scales, visible: VisibleRange, has_sinks: int,
    strides: tuple[int, ...], lse_stride: int | None, shape: HopperShape, is_split: bool,
    cache_dtype: torch.dtype,
) -> tuple[Fixed, list[TiledRows], int]:  # fmt: skip
    """What follows from shapes and strides: the numbers of a launch, how keys and values lie in TMA tiles, and a tile's
    rows."""
    hopper, hopper_kernel = _for_hopper()
    keys, tokens = shape.tile.keys, shape.tile.tokens(shape.group_size)
    window_right, window_left, chunk = visible
    has_whole_blocks = min(window_left - tokens, chunk - 1) >= keys - 1  # all see some, wherever it is
    local = 0 if min(window_left, chunk) >= FAR.value else 2 if has_whole_blocks else 1
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
            CHUNK=chunk, LOCAL=local, PAGE_SIZE=shape.page_size, TMA_ROWS=rows, KV_HEADS=shape.num_kv_heads,
            GROUP=shape.group_size, BLOCK_N=keys, DIM=shape.head_dim,
            DIM_VO=shape.head_dim_vo, GROUPS=shape.tile.groups, IN_TURNS=int(shape.tile.in_turns),
            K_STAGES=shape.tile.stages, V_STAGES=shape.tile.blocks_of_values,
            Q_STAGES=shape.tile.q_stages, USE_PDL=shape.use_pdl,
            LAUNCH_DEPENDENTS=shape.launch_dependents, SPLIT=int(is_split), RAW_STAGES=shape.tile.raw_stages,
            E5M2=int(cache_dtype is torch.float8_e5m2),
        ),
    )  # fmt: skip
    return numbers, in_tiles, rows

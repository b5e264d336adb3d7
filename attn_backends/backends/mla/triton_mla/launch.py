"""Launches of TRITON_MLA: a decode over rows that are split, and what combines the splits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_backends.backends.mla.impl import LatentTensors
from attn_backends.backends.mla.triton_mla.arguments import (
    COMBINE_WARPS,
    CombineColumns,
    CombineConstants,
    CombineTensors,
    DecodeConstants,
    DecodeTensors,
    Descriptors,
    HopperConstants,
    HopperDescriptors,
    HopperTensors,
    HopperUpcastTensors,
    Scales,
    SlotStep,
    Spread,
    TableRow,
)
from attn_backends.backends.mla.triton_mla.decode_kernel import mla_combine_kernel, mla_decode_kernel
from attn_backends.backends.mla.triton_mla.tuning import SplitPlan, block_dims
from attn_backends.kernels.cut_list import CutList
from attn_backends.kernels.launch import has_hopper_kernels, has_tensor_engine, launch, supports_pdl
from attn_backends.kernels.operators import operator
from attn_backends.kernels.split_kv import HOPPER_PAGE
from attn_backends.spec import KVCacheSpec, MLASpec


def suits_hopper_kernel(spec: MLASpec, cache: KVCacheSpec, device: torch.device) -> bool:
    """Whether the kernel that is written for Hopper can serve a layer: rows of 512 + 64, in the queries' 16 bits or in
    8, whose pages loads of 16 rows divide."""
    return (
        has_hopper_kernels(device)
        and (spec.kv_lora_rank, spec.qk_rope_head_dim) == (512, 64)
        and spec.dtype is not torch.float32
        and (spec.cache_dtype is spec.dtype or spec.cache_dtype.itemsize == 1)
        and spec.scale > 0
        and cache.page_size % HOPPER_PAGE == 0
    )


class Workspace(NamedTuple):
    """Where the parts of split rows meet."""

    partial_acc: torch.Tensor  # [partial slots * rank] f32
    partial_ml: torch.Tensor  # [partial slots * 2] f32: highest logit, sum of weights

    def check(self, plan: SplitPlan, spec: MLASpec) -> None:
        """Refuse a launch that would write beyond the end.

        Raises:
            ValueError: the batch is above the limits that the workspace was sized from.
        """
        needs, has = plan.need(spec), tuple(map(torch.Tensor.numel, self))
        if any(need > size for need, size in zip(needs, has, strict=True)):
            raise ValueError(
                f"a step of {plan.num_rows} rows of {plan.queries} queries needs {needs} floats of TRITON_MLA's "
                f"workspace, which has {has}: make the state with Limits that hold the batch"
            )


@dataclass(frozen=True)
class Split:
    """How the rows of a step are cut, and its workspace."""

    plan: SplitPlan
    query_starts: torch.Tensor  # [num_rows + 1] i32
    work_list: CutList
    workspace: Workspace

    def anew(self) -> Split:
        """The same for another step, with a list of its own."""
        return replace(self, work_list=self.work_list.anew())


def launch_decode(spec: MLASpec, k_scale: float, given: LatentTensors, page_table: torch.Tensor, split: Split) -> None:
    """Launch a layer's decode over rows that are split, and what combines the splits."""
    query, latent_cache, output, lse = given
    plan, tile = split.plan, split.plan.tile
    block_rank, block_rope = block_dims(spec)
    constants = DecodeConstants(
        WANT_LSE=int(lse is not None), PAGE_SIZE=latent_cache.shape[1], QUERY_LEN=query.shape[1],
        HEADS=spec.num_qo_heads, TILES=plan.tiles, BLOCK_M=plan.tile_rows, BLOCK_N=tile.keys, RANK=spec.kv_lora_rank,
        ROPE=spec.qk_rope_head_dim, BLOCK_RANK=block_rank, BLOCK_ROPE=block_rope, STAGES=tile.stages,
        EXACT=int(query.dtype is torch.float32), USE_PDL=supports_pdl(query.device),
    )  # fmt: skip
    scales, listed = Scales(spec.scale * k_scale * math.log2(math.e), k_scale), split.work_list
    mla_decode(query, latent_cache, output, lse, page_table, listed.work_items, listed.more_items, *split.workspace,
               scales, constants, tile.warps, tile.hopper, plan.combine_spread(block_rank))  # fmt: skip


@operator(("output", "lse", "partial_acc", "partial_ml"))
def mla_decode(
    query: torch.Tensor, latent_cache: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor, work_items: torch.Tensor, more_items: torch.Tensor, partial_acc: torch.Tensor,
    partial_ml: torch.Tensor, scales: Scales, constants: DecodeConstants, warps: int, for_hopper: bool, spread: int,
) -> None:  # fmt: skip
    form, lse_or_dummy = constants, partial_ml if lse is None else lse
    table_row = TableRow(page_table.stride(0))
    lists, grid = (work_items, more_items), len(more_items) * form.TILES
    if for_hopper:
        tensors = HopperTensors(query, output, lse_or_dummy, page_table, *lists, partial_acc, partial_ml)
        _on_hopper(grid, tensors, latent_cache, table_row, scales, form)
    else:
        launch(mla_decode_kernel, grid, DecodeTensors(query, latent_cache, output, lse_or_dummy, page_table, *lists,
               partial_acc, partial_ml), table_row, (scales, form), warps,
               descriptors=_descriptors(query, latent_cache, form), use_pdl=form.USE_PDL)  # fmt: skip
    combine = CombineConstants(
        value_scale=scales.value_scale, WANT_LSE=form.WANT_LSE, QUERIES=form.QUERY_LEN * form.HEADS,
        SLOT_QUERIES=form.TILES * form.BLOCK_M, RANK=form.RANK, BLOCK_RANK=form.BLOCK_RANK, USE_PDL=form.USE_PDL,
    )  # fmt: skip
    launch(mla_combine_kernel, len(more_items) * spread,
           CombineTensors(output, lse_or_dummy, *lists, partial_acc, partial_ml), Spread(spread),
           (combine, CombineColumns.of(form.BLOCK_RANK)), COMBINE_WARPS, use_pdl=form.USE_PDL)  # fmt: skip


def _on_hopper(
    grid: int, tensors: HopperTensors, latent_cache: torch.Tensor, table_row: TableRow, scales: Scales,
    form: DecodeConstants,
) -> None:  # fmt: skip
    from attn_backends.backends.mla.triton_mla import decode_hopper_kernel
    from attn_backends.kernels import hopper  # not every Triton has what these import

    slots, rows = latent_cache.flatten(0, 1), hopper.tma_rows(form.PAGE_SIZE, decode_hopper_kernel.BLOCK_N.value)
    given: HopperTensors | HopperUpcastTensors = tensors
    descriptors: tuple[Any, ...] = (None, None)
    slot_step = 0
    if slots.itemsize == 1:
        words = slots.view(torch.int32)
        slot_step, given = words.stride(0), HopperUpcastTensors(words, *tensors)
    else:
        num_rows, queries, width = (query := tensors.query.flatten(1, 2)).shape
        of_rows = hopper.tma_descriptor([queries, num_rows, width], [width, queries * width, 1], query,
                                        decode_hopper_kernel.BLOCK_M.value)  # fmt: skip
        by_rows = (
            hopper.tma_descriptor([*slots.shape], [*slots.stride()], slots, each) for each in (HOPPER_PAGE, rows)
        )
        descriptors = HopperDescriptors(of_rows, *by_rows)
    constants = HopperConstants(
        WANT_LSE=form.WANT_LSE, PAGE_SIZE=form.PAGE_SIZE, TMA_ROWS=rows, QUERY_LEN=form.QUERY_LEN, HEADS=form.HEADS,
        TILES=form.TILES, UPCAST=slots.itemsize == 1, E5M2=slots.dtype is torch.float8_e5m2,
        USE_PDL=form.USE_PDL,
    )  # fmt: skip
    launch(decode_hopper_kernel.mla_hopper_kernel, grid, given, table_row, (SlotStep(slot_step), scales, constants),
           decode_hopper_kernel.GROUP_WARPS, descriptors=descriptors, use_pdl=form.USE_PDL)  # fmt: skip


def _descriptors(query: torch.Tensor, latent_cache: torch.Tensor, form: DecodeConstants) -> Descriptors:
    """Descriptors for the tensor memory accelerator: one thread asks for a block, and no other waits for it.

    It wants whole blocks of one page, rows of 16 bytes, and dims that need no padding. Products of 8-bit rows wait for
    their conversion anyway.
    """
    is_plain = (form.RANK, form.ROPE) == (form.BLOCK_RANK, form.BLOCK_ROPE) and latent_cache.dtype is query.dtype
    if form.PAGE_SIZE % form.BLOCK_N or not is_plain or not has_tensor_engine(query.device):
        return Descriptors(None, None)
    rows = latent_cache.flatten(0, 1)
    return Descriptors(
        *(TensorDescriptor(rows, [*rows.shape], [*rows.stride()], [form.BLOCK_N, width])
          for width in (form.RANK, form.ROPE))
    )  # fmt: skip

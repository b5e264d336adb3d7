"""Launches of TRITON_MLA: a decode over rows that are cut, and its join."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_backends.backends.mla.triton_mla.decode_kernel import mla_decode_kernel, mla_join_kernel
from attn_backends.backends.mla.triton_mla.tuning import Cut, block_dims
from attn_backends.kernels.launch import can_start_early, has_hopper_kernels, has_tensor_engine, launch, operator
from attn_backends.kernels.split_kv import HOPPER_PAGE, ItemList
from attn_backends.spec import KVCacheSpec, MLASpec

_JOIN_REGISTERS = 64  # of a thread, for the parts that it joins at a time
_JOIN_WARPS = 4


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

    partial: torch.Tensor  # [partial slots * rank] f32
    sums: torch.Tensor  # [partial slots * 2] f32: highest logit, sum of weights

    def check(self, cut: Cut, spec: MLASpec) -> None:
        """Refuse a launch that would write beyond the end.

        Raises:
            ValueError: the batch is above the limits that the workspace was sized from.
        """
        needs, has = cut.need(spec), tuple(map(torch.Tensor.numel, self))
        if any(need > size for need, size in zip(needs, has, strict=True)):
            raise ValueError(
                f"a step of {cut.num_rows} rows of {cut.queries} queries needs {needs} floats of TRITON_MLA's "
                f"workspace, which has {has}: make the state with Limits that hold the batch"
            )


@dataclass(frozen=True)
class Split:
    """How the rows of a step are cut, and its workspace."""

    cut: Cut
    query_starts: torch.Tensor  # [num_rows + 1] i32
    list: ItemList  # of [cut.num_items, 8]
    room: Workspace


def launch_decode(
    spec: MLASpec, k_scale: float, query: torch.Tensor, latent_cache: torch.Tensor, output: torch.Tensor,
    lse: torch.Tensor | None, page_table: torch.Tensor, split: Split, query_len: int,
) -> None:  # fmt: skip
    """A layer's decode over rows that are cut, and their join."""
    cut, tile = split.cut, split.cut.tile
    constants = [
        latent_cache.shape[1], query_len, spec.num_qo_heads, cut.tiles, cut.tile_rows, tile.keys, spec.kv_lora_rank,
        spec.qk_rope_head_dim, *block_dims(spec), tile.stages, int(query.dtype is torch.float32),
    ]  # fmt: skip
    mla_decode(query, latent_cache, output, lse, page_table, split.list.items, *split.room,
               [spec.scale * k_scale * math.log2(math.e), k_scale], constants, tile.warps, tile.hopper,
               cut.join_spread)  # fmt: skip


@operator(("output", "lse", "partial", "sums"))
def mla_decode(
    query: torch.Tensor, latent_cache: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor, items: torch.Tensor, partial: torch.Tensor, sums: torch.Tensor, factors: list[float],
    constants: list[int], warps: int, for_hopper: bool, spread: int,
) -> None:  # fmt: skip
    _page_size, query_len, heads, tiles, tile_rows, _keys, rank, _rope, block_rank, *_ = constants
    sums_to, want_lse, grid = sums if lse is None else lse, int(lse is not None), len(items) * tiles
    early, table_row = can_start_early(query.device), (page_table.stride(0),)
    tensors = (output, sums_to, page_table, items, partial, sums)
    if for_hopper:
        _on_hopper(grid, query, latent_cache, tensors, table_row, factors, want_lse, constants, early)
    else:
        fixed = (*factors, want_lse, *constants, early)
        launch(mla_decode_kernel, grid, (query, latent_cache, *tensors), table_row, fixed, warps,
               descriptors=_descriptors(query, latent_cache, constants))  # fmt: skip
    at_once = max(1, _JOIN_REGISTERS * 32 * _JOIN_WARPS // block_rank)  # a power of two, as all of these are
    fixed = (factors[1], want_lse, query_len * heads, tiles * tile_rows, rank, block_rank, at_once, early)
    launch(mla_join_kernel, len(items) * spread, (output, sums_to, items, partial, sums), (spread,), fixed, _JOIN_WARPS,
           early=early)  # fmt: skip


def _on_hopper(
    grid: int, query: torch.Tensor, latent_cache: torch.Tensor, tensors: tuple[torch.Tensor, ...],
    table_row: tuple[int], factors: list[float], want_lse: int, constants: list[int], lets_next_start: bool,
) -> None:  # fmt: skip
    from attn_backends.backends.mla.triton_mla import decode_hopper_kernel
    from attn_backends.kernels import hopper  # not every Triton has what these import

    page_size, query_len, heads, tiles, *_ = constants
    slots, rows = latent_cache.flatten(0, 1), hopper.rows_of_load(page_size, decode_hopper_kernel.KEYS.value)
    widen, slot_step = slots.itemsize == 1, 0
    descriptors: tuple[TensorDescriptor, ...] = ()
    tensors = (query, *tensors)
    if widen:
        words = slots.view(torch.int32)
        slot_step, tensors = words.stride(0), (words, *tensors)
    else:
        descriptors = (hopper.strips_of([*slots.shape], [*slots.stride()], slots, rows),)
    fixed = (slot_step, *factors, want_lse, page_size, rows, query_len, heads, tiles, widen,
             slots.dtype is torch.float8_e5m2, lets_next_start)  # fmt: skip
    launch(decode_hopper_kernel.mla_hopper_kernel, grid, tensors, table_row, fixed, decode_hopper_kernel.GROUP_WARPS,
           descriptors=descriptors)  # fmt: skip


def _descriptors(
    query: torch.Tensor, latent_cache: torch.Tensor, constants: list[int]
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """For the tensor memory accelerator: one thread asks for a block, and no other waits for it.

    It wants whole blocks of one page, rows of 16 bytes, and dims that need no padding. Products of 8-bit rows wait for
    their conversion anyway.
    """
    page_size, _, _, _, _, keys, rank, rope, block_rank, block_rope, *_ = constants
    is_plain = (rank, rope) == (block_rank, block_rope) and latent_cache.dtype is query.dtype
    if page_size % keys or not is_plain or not has_tensor_engine(query.device):
        return None, None
    rows = latent_cache.flatten(0, 1)
    made = [TensorDescriptor(rows, [*rows.shape], [*rows.stride()], [keys, width]) for width in (rank, rope)]
    return made[0], made[1]

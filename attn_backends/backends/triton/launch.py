"""Launches of TRITON's kernels: grids, constants, and where Triton interprets them, one torch operator each.

Those of prefill alone, which other backends have too, are in `attn_backends.kernels.prefill.launch`.
"""

from __future__ import annotations

from functools import lru_cache

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
from attn_backends.backends.triton.kernels.decode import decode_kernel
from attn_backends.backends.triton.kernels.upcast import upcast_kernel
from attn_backends.backends.triton.schedule import Schedule, ShortBlocks, SplitPlan, lists_pages
from attn_backends.backends.triton.tuning import DecodeTile, upcast_heads
from attn_backends.kernels.launch import launch, power_of_two, start_kernel
from attn_backends.kernels.operators import operator
from attn_backends.kernels.pdl import Pdl
from attn_backends.kernels.prefill.arguments import BlockDims, Flags, Scales, VisibleRange
from attn_backends.kernels.prefill.launch import PrefillKernels, Rows, TileSizes, is_alike, strides_of
from attn_backends.kernels.prefill.tiles import PrefillTile
from attn_backends.kernels.tiles import block_dims
from attn_backends.spec import AttentionSpec

_SHORT_BLOCK = 16  # keys: one page's, so that three such blocks are under way where a mask is; of longer ones two
_REGISTERS = 65536  # of a multiprocessor
_COMBINE_REGISTERS = 128  # of a thread, for the splits that it combines at a time; half of what it can have at most
_COMBINED_ROWS = 64  # queries of all splits that one program combines; more are for all that have a split
_JOIN_REGISTERS = 64  # of a thread, for the splits of one query that it combines at a time
_WIDE, _NARROW = 128, 32  # columns of a query that a program combines at a time, of few splits and of many
_UPCAST_BLOCK = 64  # of a program


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
        _decode(query, key, value, output, lse, page_table, listed.work_items, listed.more_items, listed.item_pages,
                *workspace, *self._extras, varying, self._scales[True], self._visible, self._has_sinks, constants, grid,
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


@lru_cache(maxsize=256)  # layers and steps are alike
def _decode_constants(
    logits: tuple[int, int, int], alike: int, pairs: int, page_size: int, num_kv_heads: int,
    group_size: int, plan: SplitPlan, tile: DecodeTile, dims: BlockDims, is_local: bool, exact: bool,
    one_loop: bool, short: ShortBlocks, pdl: Pdl,
) -> DecodeConstants:  # fmt: skip
    threads = 32 * tile.warps
    registers = min(_COMBINE_REGISTERS, _REGISTERS // (tile.programs * threads) // 2) * threads
    block_splits = 1 << max(1, registers // (plan.used_m * dims[-1])).bit_length() - 1  # a power of two
    joined = min(tile.joined, max(2, _COMBINED_ROWS // plan.used_m))
    one_loop |= is_local
    masked_stages = tile.stages if one_loop else min(tile.stages, 3 if tile.keys <= _SHORT_BLOCK else 2)
    return DecodeConstants(
        *logits, alike, pairs, PAGE_SIZE=page_size, LISTED=int(lists_pages(short, page_size)),
        KV_HEADS=num_kv_heads, GROUP=group_size,
        TILES=plan.tiles, BLOCK_M=plan.block_m, BLOCK_N=tile.keys, DIM=dims.DIM, DIM_VO=dims.DIM_VO,
        BLOCK_DIM=dims.BLOCK_DIM, BLOCK_DIM_VO=dims.BLOCK_DIM_VO, LOCAL=int(is_local), MASKED=int(one_loop),
        STAGES=tile.stages, MASKED_STAGES=masked_stages, EXACT=int(exact),
        USED_M=plan.used_m, JOINED=joined, BLOCK_SPLITS=min(block_splits, joined),
        JOIN_SIZE=_JOIN_REGISTERS * threads, WIDE=min(dims[-1], _WIDE), NARROW=min(dims[-1], _NARROW), THREADS=threads,
        SHORT=short.usual, LONGER=short.of_few, PART=short.part, PDL=int(pdl),
    )  # fmt: skip


def _can_be_pairs(value: torch.Tensor) -> int:
    """Whether values are of 8 bits, and can be read two by two."""
    return int(value.itemsize == 1 and not any(stride % 2 for stride in (*value.stride()[:-1], value.data_ptr())))


@operator(("output", "lse", "partial_acc", "partial_ml", "counters"))
def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor, work_items: torch.Tensor, more_items: torch.Tensor, item_pages: torch.Tensor,
    partial_acc: torch.Tensor, partial_ml: torch.Tensor, counters: torch.Tensor, slopes: torch.Tensor,
    sinks: torch.Tensor, varying: DecodeVarying, scales: Scales, visible: VisibleRange, has_sinks: int,
    constants: DecodeConstants, grid: int, warps: int,
) -> None:  # fmt: skip
    tensors = DecodeTensors(query, key, value, output, partial_ml if lse is None else lse, page_table, work_items,
                            more_items, item_pages, partial_acc, partial_ml, counters, slopes, sinks)  # fmt: skip
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

"""FlashMLA's newer schedules by a kernel of ours: the ones that its own makes, in a fraction of the time.

Its own goes from part to part in one thread. Here all parts of a row are worked out at once. What the numbers mean is
the kernel's own affair, so `is_known` asks it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from attn_backends.kernels.launch import start_kernel

_KEYS = tl.constexpr(64)  # of a block
_OVERHEAD = tl.constexpr(5)  # blocks, that to begin a row costs
_NUMBERS = 8  # of a part
_ROWS = tl.constexpr(128)  # whose lengths are read at a time
_TRIED = (30000, 0, 1, 13000, 64)  # lengths, to see what the kernel's own schedule says


@triton.jit
def _blocks_of(seq_len):  # type: ignore[no-untyped-def]
    return tl.maximum((seq_len + _KEYS - 1) // _KEYS, 1)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])  # type: ignore[untyped-decorator]
def _fill_kernel(seq_lens, tile_metadata, splits, num_rows, num_parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program. Rows are dealt out in turn; a part has room for so many blocks, and each row that it begins or goes
    on with takes _OVERHEAD of them. Of a row that does not fit the part takes what does, if anything.

    Args:
        seq_lens: [num_rows] i32.
        tile_metadata: [num_parts, 8] i32: first and last row, first block of the one and end of the other, the first's
            split, whether the first and the last are split.
        splits: [num_rows + 1] i32: of all rows before.
    """
    costs = tl.zeros([_ROWS], tl.int32)
    for begin in range(0, num_rows, _ROWS):
        row = begin + tl.arange(0, _ROWS)
        lens = tl.load(seq_lens + row, mask=row < num_rows, other=0)
        costs += tl.where(row < num_rows, _blocks_of(lens) + _OVERHEAD, 0)
    room = (tl.sum(costs, 0) + num_parts - 1) // num_parts + _OVERHEAD
    of_one_row = room - _OVERHEAD

    part = tl.arange(0, PARTS)
    zero = tl.zeros([PARTS], tl.int32)
    first_row, first_block, first_split = tl.where(part == 0, zero, num_rows), zero, zero
    end_row, end_block = zero + num_rows, zero
    current, left, num_splits = 0, room, 0
    tl.store(splits, 0)
    next_len = tl.load(seq_lens)
    for row in range(num_rows):
        blocks = _blocks_of(next_len)
        next_len = tl.load(seq_lens + tl.minimum(row + 1, num_rows - 1))  # under way while this row is dealt out
        here = tl.minimum(tl.maximum(left - _OVERHEAD, 0), blocks)
        more = (blocks - here + of_one_row - 1) // of_one_row  # parts
        nth = part - current - 1
        begins = (nth >= 0) & (nth < more)
        first_row = tl.where(begins, row, first_row)
        first_block = tl.where(begins, here + nth * of_one_row, first_block)
        first_split = tl.where(begins, nth + (here > 0).to(tl.int32), first_split)
        ends = (nth >= -1) & (nth < more - 1)  # where the next begins
        end_row = tl.where(ends, row, end_row)
        end_block = tl.where(ends, here + (nth + 1) * of_one_row, end_block)
        last = blocks - here - (more - 1) * of_one_row
        left = tl.where(more > 0, room - last, left - blocks) - _OVERHEAD
        current += more
        num_splits += more + (here > 0).to(tl.int32)
        tl.store(splits + row + 1, num_splits)

    goes_on = end_block > 0
    last_row = tl.where(goes_on, end_row, end_row - 1)
    inside = part < num_parts
    last_len = tl.load(seq_lens + last_row, mask=inside, other=0)
    end_block = tl.where(goes_on, end_block, (last_len + _KEYS - 1) // _KEYS)
    is_one_row = first_row == last_row
    first_is_split = (first_block > 0) | (is_one_row & goes_on)
    last_is_split = goes_on | (is_one_row & (first_block > 0))
    to = tile_metadata + part * 8
    tl.store(to, first_row, mask=inside)
    tl.store(to + 1, last_row, mask=inside)
    tl.store(to + 2, first_block, mask=inside)
    tl.store(to + 3, end_block, mask=inside)
    tl.store(to + 4, first_split, mask=inside)
    tl.store(to + 5, first_is_split.to(tl.int32), mask=inside)
    tl.store(to + 6, last_is_split.to(tl.int32), mask=inside)


def fill(seq_lens: torch.Tensor, tile_metadata: torch.Tensor, splits: torch.Tensor) -> None:
    """The schedule for lengths [num_rows] i32, where FlashMLA has made room for it: [num_parts, 8] and [num_rows + 1]
    i32. One launch.

    Raises:
        ValueError: there is room for other sizes.
    """
    num_parts = len(tile_metadata)
    shapes = (tuple(tile_metadata.shape), tuple(splits.shape))
    if shapes != ((num_parts, _NUMBERS), (len(seq_lens) + 1,)) or not (
        tile_metadata.is_contiguous() and splits.is_contiguous()
    ):
        raise ValueError(
            f"a schedule of {len(seq_lens)} rows is {_NUMBERS} numbers a part and {len(seq_lens) + 1} splits, in one "
            f"piece each, and there is room for {shapes[0]} and {shapes[1]}"
        )
    width = triton.next_power_of_2(num_parts)
    start_kernel(_fill_kernel, (1,), seq_lens, tile_metadata, splits, len(seq_lens), num_parts, width, num_warps=4)


def is_known(decode: Callable[..., Any], new_schedule: Callable[[], Any], device: torch.device) -> bool:
    """Whether FlashMLA's own schedule for some lengths is the one that `fill` makes.

    Args:
        decode: `flash_mla_with_kvcache`.
        new_schedule: gives an empty one, which the first call fills.
    """
    made = new_schedule()
    seq_lens = torch.tensor(_TRIED, dtype=torch.int32, device=device)
    query = torch.zeros(len(_TRIED), 1, 1, 576, dtype=torch.bfloat16, device=device)
    page = torch.zeros(1, _KEYS.value, 1, 576, dtype=torch.bfloat16, device=device)
    table = torch.zeros(len(_TRIED), -(-max(_TRIED) // _KEYS.value), dtype=torch.int32, device=device)
    decode(query, page, table, seq_lens, 512, made, None, causal=True)
    tile_metadata, splits = (getattr(made, name, None) for name in ("tile_scheduler_metadata", "num_splits"))
    if (
        tile_metadata is None
        or splits is None
        or tile_metadata.shape[1:] != (_NUMBERS,)
        or splits.shape != (len(_TRIED) + 1,)
    ):
        return False
    ours, our_splits = torch.zeros_like(tile_metadata), torch.zeros_like(splits)
    fill(seq_lens, ours, our_splits)
    return torch.equal(_said(ours), _said(tile_metadata)) and torch.equal(our_splits, splits)


def _said(tile_metadata: torch.Tensor) -> torch.Tensor:
    """What has a meaning of a schedule of _TRIED: not the last number, nor the first block of a part without rows."""
    said = tile_metadata[:, : _NUMBERS - 1].clone()
    said[:, 2].masked_fill_(said[:, 0] == len(_TRIED), 0)
    return said

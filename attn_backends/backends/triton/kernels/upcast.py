"""Keys and values of 8 bits made 16 bits, once for all tiles of queries that read them."""

from __future__ import annotations

import triton
import triton.language as tl

_NOT_CONSTANT = ["first_row", "num_rows", "table_row", "first_head"]
_ANYWHERE = ["page_table", "seq_lens"]  # read from `first_row` on: no code depends on whether they are aligned


@triton.jit(
    do_not_specialize=_NOT_CONSTANT,
    do_not_specialize_on_alignment=_ANYWHERE,
)  # type: ignore[untyped-decorator]
def upcast_kernel(  # type: ignore[no-untyped-def]
    key_cache,  # [num_pages, PAGE_SIZE, heads, DIM] of 8 bits, the last dimension contiguous
    value_cache,  # [num_pages, PAGE_SIZE, heads, DIM_VO]
    keys,  # [num_keys, HEADS, DIM] of 16 bits
    values,  # [num_keys, HEADS, DIM_VO] of 16 bits
    starts,  # [rows] i32, receives where a row's keys begin in `keys`
    page_table,  # [rows, max_pages] i32
    seq_lens,  # [rows] i32
    first_row,  # rows before it are left alone
    num_rows,  # rows from there on
    table_row,  # elements from row to row of the page table
    first_head,  # heads before it are left alone
    key_page,  # elements from page to page, as all strides
    key_slot,
    key_head,
    value_page,
    value_slot,
    value_head,
    MAX_ROWS: tl.constexpr,  # a power of two, at least num_rows
    PAGE_SIZE: tl.constexpr,  # slots
    HEADS: tl.constexpr,  # heads from first_head on
    BLOCK_N: tl.constexpr,  # keys of a program
    DIM: tl.constexpr,
    DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # DIM, padded
    BLOCK_DIM_VO: tl.constexpr,  # DIM_VO, padded
):
    """One program copies BLOCK_N of a row's keys and values, for one head."""
    head, block = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    rows = tl.arange(0, MAX_ROWS)
    lens = tl.load(seq_lens + first_row + rows, mask=rows < num_rows, other=0)
    blocks = (lens + BLOCK_N - 1) // BLOCK_N
    if block + head == 0:
        tl.store(starts + first_row + rows, tl.cumsum(lens) - lens, mask=rows < num_rows)
    nth = tl.sum((tl.cumsum(blocks) <= block).to(tl.int32))
    is_before, is_it = rows < nth, rows == nth
    start, seq_len = tl.sum(tl.where(is_before, lens, 0)), tl.sum(tl.where(is_it, lens, 0))
    lane = (block - tl.sum(tl.where(is_before, blocks, 0))) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = lane < seq_len
    pages = page_table + (first_row + nth).to(tl.int64) * table_row
    page = tl.load(pages + lane // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    to = ((start + lane).to(tl.int64) * HEADS + head)[:, None]
    dims, dims_vo = tl.arange(0, BLOCK_DIM)[None], tl.arange(0, BLOCK_DIM_VO)[None]
    of_head = (first_head + head).to(tl.int64)
    key_rows = key_cache + of_head * key_head + (page * key_page + lane % PAGE_SIZE * key_slot)[:, None]
    mask = live[:, None] & (dims < DIM)
    key = tl.load(key_rows + dims, mask=mask)
    tl.store(keys + to * DIM + dims, key.to(keys.dtype.element_ty), mask=mask)
    value_rows = value_cache + of_head * value_head + (page * value_page + lane % PAGE_SIZE * value_slot)[:, None]
    mask = live[:, None] & (dims_vo < DIM_VO)
    value = tl.load(value_rows + dims_vo, mask=mask)
    tl.store(values + to * DIM_VO + dims_vo, value.to(values.dtype.element_ty), mask=mask)

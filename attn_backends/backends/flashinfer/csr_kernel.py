"""The CSR of a page table without each row's leading pages, in one launch on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn_backends.batch.csr import PagedCsr
from attn_backends.kernels.launch import start_kernel

_BLOCK = 1024


_NOT_CONSTANT = ["stride", "num_reqs", "num_indices"]
_ANYWHERE = ["page_table", "indices", "last_page_len"]  # where they begin follows from the number of rows


@triton.jit(do_not_specialize=_NOT_CONSTANT, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def csr_kernel(  # type: ignore[no-untyped-def]
    page_table,  # [num_reqs, max_pages] i32
    stride,  # elements from row to row of the page table
    seq_lens,  # [num_reqs] i32
    first_pages,  # [num_reqs] i32, pages that are left out in front
    indptr,  # [num_reqs + 1] i32
    indices,  # [num_indices] i32
    last_page_len,  # [num_reqs] i32
    num_reqs,
    num_indices,
    PAGE_SIZE: tl.constexpr,  # slots
    MAX_ROWS: tl.constexpr,  # a power of two, at least num_reqs
    BLOCK: tl.constexpr,  # pages at a time
):
    """One program writes a row's CSR; the last one also zeroes what is left of `indices`."""
    row = tl.program_id(0)
    rows = tl.arange(0, MAX_ROWS)
    lane = tl.arange(0, BLOCK)
    lens = tl.load(seq_lens + rows, mask=rows < num_reqs, other=0)
    first = tl.load(first_pages + rows, mask=rows < num_reqs, other=0)
    used = tl.maximum((lens + PAGE_SIZE - 1) // PAGE_SIZE - first, 0)
    mine = rows == row
    start = tl.sum(tl.where(rows < row, used, 0), 0)
    count = tl.sum(tl.where(mine, used, 0), 0)
    seq_len = tl.sum(tl.where(mine, lens, 0), 0)
    table_row = page_table + row.to(tl.int64) * stride + tl.sum(tl.where(mine, first, 0), 0)
    if row == 0:
        tl.store(indptr, 0)
    tl.store(indptr + row + 1, start + count)
    tl.store(last_page_len + row, tl.where(seq_len > 0, (seq_len - 1) % PAGE_SIZE + 1, 0))
    for at in range(0, count, BLOCK):
        column = at + lane
        tl.store(indices + start + column, tl.load(table_row + column, mask=column < count), mask=column < count)
    if row == num_reqs - 1:
        for at in range(start + count, num_indices, BLOCK):
            tl.store(indices + at + lane, tl.zeros([BLOCK], tl.int32), mask=at + lane < num_indices)


def csr_of(
    page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, num_indices: int, first_pages: torch.Tensor
) -> PagedCsr:
    """`attn_backends.batch.csr.csr_of`, in one launch."""
    num_reqs, device = len(seq_lens), seq_lens.device
    packed = torch.empty(2 * num_reqs + 1 + num_indices, dtype=torch.int32, device=device)
    indptr, last_page_len, indices = packed.split([num_reqs + 1, num_reqs, num_indices])
    start_kernel(
        csr_kernel, (num_reqs,),
        page_table, page_table.stride(0), seq_lens, first_pages, indptr, indices, last_page_len, num_reqs, num_indices,
        page_size, triton.next_power_of_2(num_reqs), _BLOCK,
    )  # fmt: skip
    return PagedCsr(indptr, indices, last_page_len)

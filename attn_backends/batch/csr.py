"""FlashInfer's CSR of a page table, worked out where the table lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PagedCsr:
    """A page table as FlashInfer reads it: row i owns `indices[indptr[i]:indptr[i + 1]]`."""

    indptr: torch.Tensor  # [R + 1] i32
    indices: torch.Tensor  # [indptr[-1] or more] i32
    last_page_len: torch.Tensor  # [R] i32; 1 to page_size, 0 for a row without keys


def csr_of(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    num_indices: int,
    first_pages: torch.Tensor | None = None,
) -> PagedCsr:
    """The CSR of a dense table, on its device and without a read of it.

    Args:
        page_table: [R, max_pages] i32. Columns past a row's own pages are not read.
        seq_lens: [R] i32, 0 for padding.
        num_indices: length of `indices`, at least the sum of the rows' pages: the host knows it.
        first_pages: [R] i32, how many leading pages of each row are left out; None: none.
    """
    used = (seq_lens + page_size - 1).div(page_size, rounding_mode="floor")
    if first_pages is not None:
        used = (used - first_pages).clamp_(min=0)
    indptr = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    place = torch.arange(num_indices, dtype=torch.int32, device=page_table.device)
    row = torch.searchsorted(indptr[1:], place, right=True).clamp_(max=max(0, len(used) - 1))
    column = torch.minimum(place - indptr[row], used[row] - 1).clamp_(min=0)
    if first_pages is not None:
        column = column + first_pages[row]
    indices = page_table[row, column] if page_table.numel() else place
    indices = torch.where(place < indptr[-1], indices, 0)
    last_page_len = torch.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0)
    return PagedCsr(indptr, indices, last_page_len.to(torch.int32))

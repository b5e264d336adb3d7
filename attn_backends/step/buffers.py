"""A step's tensors on its device, and what fills them there from a page table and lengths: slots, positions, CSR."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attn_backends.batch.csr import csr_of
from attn_backends.batch.page_table import PAD_SLOT
from attn_backends.spec import KVCacheSpec, Limits


class StepShape(NamedTuple):
    """How large a step is. Padded rows stand behind the others, and so do their tokens."""

    num_reqs: int  # R
    num_actual_reqs: int
    num_tokens: int  # T
    num_actual_tokens: int


class RowViews(NamedTuple):
    """The first R rows of `StepBuffers`."""

    query_start_loc: torch.Tensor  # [R + 1] i32
    query_ends: torch.Tensor  # [R] i32: query_start_loc without its leading 0
    seq_lens: torch.Tensor  # [R] i32
    page_table: torch.Tensor  # [R, capacity] i32
    paged_kv_indptr: torch.Tensor  # [R + 1] i32
    paged_kv_last_page_len: torch.Tensor  # [R] i32


class TokenViews(NamedTuple):
    """The first T tokens of `StepBuffers`."""

    slot_mapping: torch.Tensor  # [T] i64
    positions: torch.Tensor  # [T] i64
    token_ids: torch.Tensor  # [T] i64


class StepBuffers:
    """A step's tensors on its device, allocated once for the largest step; every step is a view of their beginnings.

    Args:
        page_table: [max_num_requests, capacity] i32, on the device.
        with_indices: whether to hold the CSR's indices, as many as the page table: requests may share pages.
    """

    def __init__(self, limits: Limits, cache: KVCacheSpec, page_table: torch.Tensor, with_indices: bool) -> None:
        num_reqs, device = limits.max_num_requests, page_table.device
        self.page_size = cache.page_size
        self.page_table = page_table
        self.query_start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        self.paged_kv_indptr = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
        self.paged_kv_last_page_len = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        num_indices = page_table.numel() if with_indices else 0
        self.paged_kv_indices = torch.zeros(num_indices, dtype=torch.int32, device=device)
        self.slot_mapping = torch.zeros(limits.max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(limits.max_num_tokens, dtype=torch.int64, device=device)
        self.token_ids = torch.zeros(limits.max_num_tokens, dtype=torch.int64, device=device)
        # A view takes about as long as a small kernel's launch, and steps repeat their sizes.
        self.rows = lru_cache(maxsize=num_reqs)(self._rows)
        self.tokens = lru_cache(maxsize=num_reqs)(self._tokens)

    def _rows(self, num_reqs: int) -> RowViews:
        return RowViews(
            self.query_start_loc[: num_reqs + 1],
            self.query_start_loc[1 : num_reqs + 1],
            self.seq_lens[:num_reqs],
            self.page_table[:num_reqs],
            self.paged_kv_indptr[: num_reqs + 1],
            self.paged_kv_last_page_len[:num_reqs],
        )

    def _tokens(self, num_tokens: int) -> TokenViews:
        return TokenViews(self.slot_mapping[:num_tokens], self.positions[:num_tokens], self.token_ids[:num_tokens])


def own_tensors(shared: Any) -> StepBuffers | None:
    """The tensors that graphs are given if they are a step table's, whose rows all begin with a page; another engine's
    may hold any number there."""
    return shared if isinstance(shared, StepBuffers) else None


def fill_step(buffers: StepBuffers, shape: StepShape, seq_lens: torch.Tensor, query_lens: torch.Tensor) -> None:
    """Lengths → query starts, positions and slots of a step, in place. No read of the device.

    Args:
        seq_lens: [R] i32 on the device, 0 for padding; may be the buffers' own.
        query_lens: [R] i32 on the device.
    """
    rows, tokens = buffers.rows(shape.num_reqs), buffers.tokens(shape.num_actual_tokens)
    rows.seq_lens.copy_(seq_lens)
    torch.cumsum(query_lens, 0, dtype=torch.int32, out=rows.query_ends)
    actual = buffers.rows(shape.num_actual_reqs)
    row = torch.arange(shape.num_actual_reqs, device=seq_lens.device)
    if shape.num_actual_tokens == shape.num_actual_reqs:
        torch.sub(actual.seq_lens, 1, out=tokens.positions)
    else:
        row = torch.repeat_interleave(row, query_lens[: len(row)], output_size=shape.num_actual_tokens)
        behind = actual.seq_lens - actual.query_ends  # position less index, the same for all tokens of a row
        torch.add(torch.arange(len(row), device=row.device), behind[row], out=tokens.positions)
    column = tokens.positions.div(buffers.page_size, rounding_mode="floor")
    offset = tokens.positions - column * buffers.page_size
    torch.add(offset, actual.page_table[row, column].long(), alpha=buffers.page_size, out=tokens.slot_mapping)
    if shape.num_tokens > shape.num_actual_tokens:
        buffers.slot_mapping[shape.num_actual_tokens : shape.num_tokens] = PAD_SLOT
        buffers.positions[shape.num_actual_tokens : shape.num_tokens] = 0


def advance_step(buffers: StepBuffers, shape: StepShape, ones: torch.Tensor) -> None:
    """One token further in every row but padding, in place: `fill_step` for lengths that are on the device alone.

    Args:
        shape: one token a row.
        ones: [R or more] i32 on the device.
    """
    buffers.rows(shape.num_actual_reqs).seq_lens.add_(1)
    fill_step(buffers, shape, buffers.rows(shape.num_reqs).seq_lens, ones[: shape.num_reqs])


def fill_csr(buffers: StepBuffers, num_reqs: int, num_indices: int) -> None:
    """The CSR of the step that `fill_step` has filled, in place; `num_indices` as for `csr_of`."""
    rows = buffers.rows(num_reqs)
    csr = csr_of(rows.page_table, rows.seq_lens, buffers.page_size, num_indices)
    rows.paged_kv_indptr.copy_(csr.indptr)
    rows.paged_kv_last_page_len.copy_(csr.last_page_len)
    buffers.paged_kv_indices[:num_indices].copy_(csr.indices)


def write_pages(
    page_table: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, starts: torch.Tensor, pages: torch.Tensor
) -> None:
    """Put runs of pages into the table: run i is `pages[starts[i]:starts[i + 1]]`, from column `first[i]` on."""
    behind = first - starts[:-1]  # column less place, the same for all pages of a run
    run = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), starts.diff(), output_size=len(pages))
    page_table[rows[run], torch.arange(len(pages), device=rows.device) + behind[run]] = pages


def move_rows(page_table: torch.Tensor, rows: torch.Tensor, sources: torch.Tensor, width: int) -> None:
    """Copies the first `width` columns of rows `sources` to `rows`, which may overlap: all are read before any is
    written.

    Args:
        page_table: [max_num_requests, capacity] i32.
        rows, sources: [M] i32, on the table's device.
    """
    leading = page_table[:, :width]
    leading[rows] = leading[sources]

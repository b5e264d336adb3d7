"""The device's side of a step table: what is asked of it, the CPU's answer, which is the host's memory, and a GPU's.

For a GPU one copy a step brings what is new, and one launch derives the rest. Rows that changed places are moved on the
device first, so that they cost two numbers each and not their pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from attn_backends.batch.csr import PagedCsr
from attn_backends.batch.page_table import IntArray
from attn_backends.step.buffers import (
    StepBuffers,
    StepShape,
    advance_step,
    fill_csr,
    fill_step,
    move_rows,
    write_pages,
)
from attn_backends.step.rows import PageRows, PageRuns, RowMoves
from attn_backends.step.staging import Event, StagingRing

_MAX_PAGES_A_COPY = 1 << 16  # 256 KiB


class PackedShape(NamedTuple):
    """The layout of the one copy of a step, in i32, one behind the other:

    seq_lens [R], query_lens [R], token_ids [num_token_ids]; of each of E runs (see `PageRuns`) rows [E], first [E] and
    starts [E + 1]; pages [num_pages]; of M moves (see `RowMoves`) rows [M] and sources [M].
    """

    num_rows: int  # of the table: those of the step, and those that have new pages
    num_reqs: int  # R; 0: pages alone
    num_token_ids: int  # T, or 0: they are on the device already
    num_runs: int  # E
    num_pages: int
    num_moves: int  # M

    @property
    def runs(self) -> int:
        return 2 * self.num_reqs + self.num_token_ids

    @property
    def pages(self) -> int:
        return self.runs + 3 * self.num_runs + 1

    @property
    def moves(self) -> int:
        return self.pages + self.num_pages

    @property
    def size(self) -> int:
        return self.moves + 2 * self.num_moves


class AheadShape(NamedTuple):
    """The copy of an advance begins with these, i32; then come E runs and their pages, as in `PackedShape`."""

    num_reqs: int  # R of the step that is advanced; 0: pages alone
    num_runs: int  # E
    num_advanced: int  # how often, this time included
    num_indices: int  # of the CSR, where lengths are upper bounds; else 0: the device knows

    def size(self, num_pages: int) -> int:
        return len(self) + 3 * self.num_runs + 1 + num_pages


class DeriveStep(Protocol):
    """Fills the buffers: pages into the table, then what follows from lengths. In stream order behind the copy."""

    def __call__(self, packed: PackedShape, shape: StepShape, num_indices: int) -> None:
        """Fill them for a step just packed and sent."""

    def advance(self, ahead: AheadShape, shape: StepShape, num_pages: int) -> None:
        """Send what was packed into the ring of advances, and move the last step on by one token."""


class TorchDerive:
    """`DeriveStep` in torch operations, on any device."""

    def __init__(self, buffers: StepBuffers, packed: torch.Tensor, ring: StagingRing) -> None:
        self.buffers = buffers
        self.packed = packed
        self.ring = ring
        self._ones = torch.ones_like(buffers.seq_lens)

    def __call__(self, packed: PackedShape, shape: StepShape, num_indices: int) -> None:
        self._write_pages(self.packed[packed.runs : packed.moves], packed.num_runs)
        if packed.num_reqs:
            lens, ids = self.packed[: 2 * packed.num_reqs].chunk(2), self.packed[2 * packed.num_reqs : packed.runs]
            self.buffers.tokens(packed.num_token_ids).token_ids.copy_(ids)
            fill_step(self.buffers, shape, *lens)
            fill_csr(self.buffers, shape.num_reqs, num_indices)

    def advance(self, ahead: AheadShape, shape: StepShape, num_pages: int) -> None:
        self.ring.send(ahead.size(num_pages))
        self._write_pages(self.ring.on_device[len(ahead) : ahead.size(num_pages)], ahead.num_runs)
        if ahead.num_reqs:
            advance_step(self.buffers, shape, self._ones)
            fill_csr(self.buffers, shape.num_reqs, ahead.num_indices or len(self.buffers.paged_kv_indices))

    def _write_pages(self, runs: torch.Tensor, count: int) -> None:
        if count:
            rows, first, starts, pages = runs.split([count, count, count + 1, len(runs) - 3 * count - 1])
            write_pages(self.buffers.page_table, rows, first, starts, pages)


class DeviceCopy:
    """`DeviceSide` for memory that is not the host's.

    Args:
        make_derive: what derives, given the buffers and where copies arrive.
        max_pages_a_copy: a step that needs more pages is preceded by copies of pages alone.
        make_event: see `StagingRing`.
    """

    def __init__(
        self,
        rows: PageRows,
        device: torch.device,
        make_derive: Callable[[StepBuffers, torch.Tensor, StagingRing], DeriveStep] = TorchDerive,
        *,
        max_pages_a_copy: int = _MAX_PAGES_A_COPY,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        page_table = torch.zeros(rows.page_table.shape, dtype=torch.int32, device=device)
        self.buffers = StepBuffers(rows.limits, rows.cache, page_table, with_indices=True)
        self.max_pages = min(max_pages_a_copy, page_table.numel())
        size = 1 + 7 * rows.limits.max_num_requests + rows.limits.max_num_tokens + self.max_pages
        self.ring = StagingRing(size, device, make_event=make_event)
        # An advance brings about a page a row; its copies are of one size, and small.
        self.max_pages_ahead = min(self.max_pages, rows.limits.max_num_requests)
        ahead = AheadShape(0, rows.limits.max_num_requests, 0, 0).size(self.max_pages_ahead)
        self.ring_ahead = StagingRing(ahead, device, depth=16, group=4, make_event=make_event)
        self.derive = make_derive(self.buffers, self.ring.on_device, self.ring_ahead)
        self.packed = PackedShape(0, 0, 0, 0, 0, 0)
        self.csr = lru_cache(maxsize=rows.limits.max_num_requests)(self._csr)

    def step(self, rows: PageRows, step: HostStep) -> PagedCsr:
        moves, runs = rows.take_moves(), rows.take_unsent(self.max_pages)
        while rows.has_unsent:
            self._send(rows.num_rows, moves, runs, None)
            moves, runs = None, rows.take_unsent(self.max_pages)
        self.packed = self._send(rows.num_rows, moves, runs, step)
        if step.context_lens_on_device is not None:
            lens, actual = self.ring.on_device, step.shape.num_actual_reqs
            queries = lens[step.shape.num_reqs :][:actual]
            torch.add(step.context_lens_on_device, queries, out=lens[:actual])
        self.derive(self.packed, step.shape, self._num_indices(step.seq_lens))
        return self.csr(step.shape.num_reqs)

    def advance(
        self, rows: PageRows, shape: StepShape, seq_lens: torch.Tensor, num_advanced: int, are_upper_bounds: bool
    ) -> PagedCsr:
        runs = rows.take_unsent(self.max_pages_ahead)
        while rows.has_unsent:
            self._send_ahead(AheadShape(0, 0, 0, 0), shape, runs)
            runs = rows.take_unsent(self.max_pages_ahead)
        num_indices = self._num_indices(seq_lens.numpy()) if are_upper_bounds else 0
        self._send_ahead(AheadShape(shape.num_reqs, 0, num_advanced, num_indices), shape, runs)
        return self.csr(shape.num_reqs)

    def _send_ahead(self, ahead: AheadShape, shape: StepShape, runs: PageRuns | None) -> None:
        buffer, num_pages = self.ring_ahead.next_buffer(), 0
        if runs is not None:
            ahead, num_pages = ahead._replace(num_runs=len(runs.rows)), len(runs.pages)
            _put(runs, buffer[len(ahead) :])
        buffer[: len(ahead)] = ahead
        self.derive.advance(ahead, shape, num_pages)

    def _num_indices(self, seq_lens: IntArray) -> int:
        page_size = self.buffers.page_size
        return int(np.add.reduce((seq_lens + (page_size - 1)) // page_size))

    def _csr(self, num_reqs: int) -> PagedCsr:
        """All of the indices: how many count is for `CommonAttentionMetadata` to say, and only if it is asked."""
        rows = self.buffers.rows(num_reqs)
        return PagedCsr(rows.paged_kv_indptr, self.buffers.paged_kv_indices, rows.paged_kv_last_page_len)

    def _send(self, num_rows: int, moves: RowMoves | None, runs: PageRuns | None, step: HostStep | None) -> PackedShape:
        """Packs and copies, and moves rows. Without a step, pages are put in place at once: the next copy overwrites
        them."""
        buffer = self.ring.next_buffer()
        num_reqs, num_token_ids = _put_step(step, buffer) if step else (0, 0)
        num_runs, num_pages = (len(runs.rows), len(runs.pages)) if runs else (0, 0)
        num_moves = len(moves.rows) if moves else 0
        packed = PackedShape(max(num_rows, num_reqs), num_reqs, num_token_ids, num_runs, num_pages, num_moves)
        if runs:
            _put(runs, buffer[packed.runs :])
        if moves:
            _put((moves.rows, moves.sources), buffer[packed.moves :])
        self.ring.send(packed.size)
        if moves:
            to, sources = self.ring.on_device[packed.moves : packed.size].chunk(2)
            move_rows(self.buffers.page_table, to, sources, moves.width)
        if step is None:
            self.derive(packed, StepShape(0, 0, 0, 0), 0)
        return packed


def _put_step(step: HostStep, buffer: IntArray) -> tuple[int, int]:
    """Writes a step's lengths and token ids to the buffer's front; returns how many rows and ids, padding included."""
    num_reqs, num_token_ids = step.shape.num_reqs, 0
    buffer[:num_reqs] = step.seq_lens
    buffer[num_reqs : 2 * num_reqs] = step.query_lens
    if step.token_ids is not None:
        num_token_ids = step.shape.num_tokens
        ids = buffer[2 * num_reqs : 2 * num_reqs + num_token_ids]
        ids[: len(step.token_ids)] = step.token_ids
        ids[len(step.token_ids) :] = 0
    return num_reqs, num_token_ids


def _put(arrays: Iterable[NDArray[Any]], buffer: IntArray) -> None:
    """Writes arrays to the buffer's front, one behind the other."""
    at = 0
    for values in arrays:
        buffer[at : at + len(values)] = values
        at += len(values)


class HostStep(NamedTuple):
    """What the host knows of a step. All of it was checked."""

    shape: StepShape
    seq_lens: IntArray  # [R] i32
    query_lens: IntArray  # [R] i32
    token_ids: NDArray[np.int64] | None  # [num_actual_tokens]; None: they are on the device already
    context_lens_on_device: torch.Tensor | None  # [num_actual_reqs] i32: exact, where the host has upper bounds


class DeviceSide(Protocol):
    """Fills `buffers`, in place, with what follows from a step's lengths."""

    buffers: StepBuffers

    def step(self, rows: PageRows, step: HostStep) -> PagedCsr | None:
        """A new step, with all pages that the rows have. Returns views of its CSR, or None: nobody needed it yet."""

    def advance(
        self, rows: PageRows, shape: StepShape, seq_lens: torch.Tensor, num_advanced: int, are_upper_bounds: bool
    ) -> PagedCsr | None:
        """The last step, one token further in every row but padding, with all pages that the rows have now.

        Args:
            seq_lens: [R] i32 on the host, what it now takes for the lengths; exact unless `are_upper_bounds`.
            num_advanced: how often the step was advanced, this time included.
        """


class SharedMemory:
    """The CPU's side: the page table is the host's, no page is copied, and who asks for the CSR makes it."""

    def __init__(self, rows: PageRows) -> None:
        self.buffers = StepBuffers(rows.limits, rows.cache, torch.from_numpy(rows.page_table), with_indices=False)
        self._token_ids: NDArray[np.int64] = self.buffers.token_ids.numpy()
        self._ones = torch.ones(rows.limits.max_num_requests, dtype=torch.int32, device="cpu")

    def step(self, rows: PageRows, step: HostStep) -> None:
        rows.mark_sent()
        seq_lens, query_lens = torch.from_numpy(step.seq_lens), torch.from_numpy(step.query_lens)
        if step.context_lens_on_device is not None:
            actual = step.shape.num_actual_reqs
            seq_lens = torch.nn.functional.pad(
                step.context_lens_on_device + query_lens[:actual], (0, len(seq_lens) - actual)
            )
        if step.token_ids is not None:
            self._token_ids[: len(step.token_ids)] = step.token_ids
            self._token_ids[len(step.token_ids) : step.shape.num_tokens] = 0
        fill_step(self.buffers, step.shape, seq_lens, query_lens)

    def advance(
        self, rows: PageRows, shape: StepShape, seq_lens: torch.Tensor, num_advanced: int, are_upper_bounds: bool
    ) -> None:
        rows.mark_sent()
        advance_step(self.buffers, shape, self._ones)

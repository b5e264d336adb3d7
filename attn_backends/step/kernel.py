"""The step's one kernel on a GPU: pages into the table, and lengths → query starts, positions, slots and CSR."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from attn_backends.kernels.launch import start_compiled
from attn_backends.step.buffers import StepBuffers, StepShape
from attn_backends.step.device import AheadShape, PackedShape
from attn_backends.step.staging import StagingRing, no_garbage_collection

_NOT_CONSTANT = ["num_reqs", "num_token_ids", "num_runs", "num_indices"]
_BLOCK = 1024


@triton.jit(do_not_specialize=_NOT_CONSTANT)  # type: ignore[untyped-decorator]
def derive_step_kernel(  # type: ignore[no-untyped-def]
    packed,  # i32, see `PackedShape`
    packed_advance,  # i32, see `AheadShape`; read if ADVANCE
    page_table,  # [max_rows, CAPACITY] i32
    query_start_loc,  # [max_rows + 1] i32
    seq_lens,  # [max_rows] i32
    indptr,  # [max_rows + 1] i32
    indices,  # i32
    last_page_len,  # [max_rows] i32
    slot_mapping,  # i64
    positions,
    token_ids,
    num_reqs,
    num_token_ids,
    num_runs,  # runs of new pages
    num_indices,
    CAPACITY: tl.constexpr,  # pages of a row
    PAGE_SIZE: tl.constexpr,  # slots
    MAX_ROWS: tl.constexpr,  # a power of two, at least the number of rows
    BLOCK: tl.constexpr,  # elements at a time
    ADVANCE: tl.constexpr,  # the step follows on the last one, with a token more in each row
):
    """One program derives a row's part of a step.

    It reads the row's new pages from the copy itself, and all others from the table: no program waits for a store, its
    own or another's. Lengths are those of the last step's copy plus how often it was advanced, so that a program may
    store its row's length while others still sum up lengths.

    To advance, sizes and new pages are in a copy of their own, and the last step's stays.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    rows = tl.arange(0, MAX_ROWS)

    num_advanced = 0
    runs = packed + 2 * num_reqs + num_token_ids
    if ADVANCE:
        num_reqs = tl.load(packed_advance)
        num_runs = tl.load(packed_advance + 1)
        num_advanced = tl.load(packed_advance + 2)
        num_indices = tl.load(packed_advance + 3)
        runs = packed_advance + 4
    is_run = rows < num_runs
    is_mine = is_run & (tl.load(runs + rows, mask=is_run, other=-1) == row)
    run_first = tl.load(runs + num_runs + rows, mask=is_mine, other=0)
    run_start = tl.load(runs + 2 * num_runs + rows, mask=is_mine, other=0)
    run_end = tl.load(runs + 2 * num_runs + rows + 1, mask=is_mine, other=0)
    # From column `first` on the row's pages are in the copy.
    first = tl.where(tl.sum(is_mine.to(tl.int32), 0) > 0, tl.sum(run_first, 0), CAPACITY)
    stop = first + tl.sum(run_end - run_start, 0)
    pages = runs + 3 * num_runs + 1 + tl.sum(run_start, 0)
    table_row = page_table + row.to(tl.int64) * CAPACITY
    for start in range(first, stop, BLOCK):
        column = start + lane
        tl.store(table_row + column, tl.load(pages + column - first, mask=column < stop), mask=column < stop)

    if row < num_reqs:
        lens = tl.load(packed + rows, mask=rows < num_reqs, other=0)
        lens += tl.where(lens > 0, num_advanced, 0)
        if ADVANCE:
            query_lens = tl.where(rows < num_reqs, 1, 0)
        else:
            query_lens = tl.load(packed + num_reqs + rows, mask=rows < num_reqs, other=0)
        used = (lens + PAGE_SIZE - 1) // PAGE_SIZE
        seq_len = tl.sum(tl.where(rows == row, lens, 0), 0)
        query_len = tl.sum(tl.where(rows == row, query_lens, 0), 0)
        num_used = tl.sum(tl.where(rows == row, used, 0), 0)
        first_token = tl.sum(tl.where(rows < row, query_lens, 0), 0)
        first_index = tl.sum(tl.where(rows < row, used, 0), 0)

        if row == 0:
            tl.store(query_start_loc, 0)
            tl.store(indptr, 0)
        tl.store(query_start_loc + row + 1, first_token + query_len)
        tl.store(indptr + row + 1, first_index + num_used)
        tl.store(seq_lens + row, seq_len)
        tl.store(last_page_len + row, tl.where(seq_len > 0, (seq_len - 1) % PAGE_SIZE + 1, 0))

        for start in range(0, num_used, BLOCK):
            column = start + lane
            old = tl.load(table_row + column, mask=(column < num_used) & (column < first), other=0)
            new = tl.load(pages + column - first, mask=(column < num_used) & (column >= first), other=0)
            tl.store(indices + first_index + column, tl.where(column < first, old, new), mask=column < num_used)
        if row == num_reqs - 1:
            for start in range(first_index + num_used, num_indices, BLOCK):
                tl.store(indices + start + lane, tl.zeros([BLOCK], tl.int32), mask=start + lane < num_indices)

        for start in range(0, query_len, BLOCK):
            token = start + lane
            position = tl.maximum(seq_len - query_len + token, 0)
            live = (token < query_len) & (seq_len > 0)
            column = position // PAGE_SIZE
            old = tl.load(table_row + column, mask=live & (column < first), other=0)
            new = tl.load(pages + column - first, mask=live & (column >= first), other=0)
            slot = tl.where(column < first, old, new).to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
            at = first_token + token
            tl.store(slot_mapping + at, tl.where(live, slot, -1), mask=token < query_len)
            tl.store(positions + at, tl.where(live, position, 0).to(tl.int64), mask=token < query_len)
            if not ADVANCE:
                given = (token < query_len) & (num_token_ids > 0)
                token_id = tl.load(packed + 2 * num_reqs + at, mask=given, other=0)
                tl.store(token_ids + at, token_id.to(tl.int64), mask=given)


class TritonDerive:
    """`DeriveStep` in one launch; to advance, that of a graph: the copy from a slot of the ring, and the kernel."""

    def __init__(self, buffers: StepBuffers, packed: torch.Tensor, ring: StagingRing) -> None:
        num_rows, capacity = buffers.page_table.shape
        self.ring = ring
        self.num_rows = num_rows
        self._tensors = (
            packed, ring.on_device, buffers.page_table, buffers.query_start_loc, buffers.seq_lens,
            buffers.paged_kv_indptr, buffers.paged_kv_indices, buffers.paged_kv_last_page_len, buffers.slot_mapping,
            buffers.positions, buffers.token_ids,
        )  # fmt: skip
        self._constants = (capacity, buffers.page_size, triton.next_power_of_2(num_rows), _BLOCK)
        self._addresses = tuple(tensor.data_ptr() for tensor in self._tensors)
        self._compiled: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        if packed.device.type == "cuda":  # elsewhere the kernel is interpreted, and there is nothing to compile
            with torch.cuda.device(packed.device):
                # No rows: it compiles, and writes nothing.
                self._compiled = derive_step_kernel[(1,)](*self._tensors, 0, 0, 0, 0, *self._constants, False)
                self._launch_advance()
                self._graphs = [self._capture(host) for host in ring.hosts_cpu]

    def __call__(self, packed: PackedShape, shape: StepShape, num_indices: int) -> None:
        sizes = (packed.num_reqs, packed.num_token_ids, packed.num_runs, num_indices)
        grid = (packed.num_rows, 1, 1)
        if self._compiled is None:
            derive_step_kernel[grid](*self._tensors, *sizes, *self._constants, False)
        else:
            # All arguments but the sizes are the same for ever, so what triton does to find the kernel is done once.
            start_compiled(self._compiled, grid, *self._addresses, *sizes, *self._constants, False)

    def advance(self, packed: AheadShape, shape: StepShape, num_pages: int) -> None:
        if self._graphs:
            self._graphs[self.ring.slot].replay()
            self.ring.sent()
        else:
            self.ring.send(packed.size(num_pages))
            self._launch_advance()

    def _launch_advance(self) -> None:
        derive_step_kernel[(self.num_rows,)](*self._tensors, 0, 0, 0, 0, *self._constants, True)

    def _capture(self, host: torch.Tensor) -> torch.cuda.CUDAGraph:
        """All of a slot: how much of it counts is in its head, so one graph serves every advance."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), no_garbage_collection():
            graph.capture_begin()
            self.ring.on_device.copy_(host, non_blocking=True)
            self._launch_advance()
            graph.capture_end()
        return graph

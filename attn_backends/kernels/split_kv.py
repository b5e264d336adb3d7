"""Splitting the keys of decode rows over a GPU and combining the splits: what kernels of ours share.

The device itself splits the work: one small launch a step reads the lengths and lists work items, runs of keys of one
row that take about equally long. How many there may be follows from the number of rows and of multiprocessors alone, so
the grid is the same for every batch of a graph, and one long row among short ones is as fast as the same keys in even
rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from attn_backends.kernels.launch import ALIGNED, INTERPRETED, operator, start_compiled, start_kernel

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 30)  # beyond any position
MAX_SPLITS = tl.constexpr(1 << 15)  # of a row, which a work item has as one number with its own
HOPPER_PAGE = 16  # slots, of which the pages of kernels for Hopper are multiples, as those of a load are
COUNTERS = tl.constexpr(1024)  # that a scheduling program clears at a time
ITEMS_PER_PROGRAM = 64  # of a scheduling program


class SplitSizes(NamedTuple):
    """What follows from the shape of a batch of decode rows, whatever their lengths."""

    num_rows: int
    target: int  # work items that fill the GPU
    window_left: int  # positions before its own that a query sees
    chunk: int  # positions in a chunk; a query sees its own chunk alone
    block_n: int  # keys of a block
    min_blocks: int  # blocks of a work item at least


class ScheduleTensors(NamedTuple):
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    work_items: torch.Tensor
    counters: torch.Tensor


class ScheduleNumbers(NamedTuple):
    num_rows: int
    target: int
    max_work_items: int
    window_left: int
    chunk: int
    num_counters: int
    BLOCK_N: int
    MIN_BLOCKS: int
    MAX_ROWS: int
    BLOCK_ITEMS: int


@operator(("work_items", "counters"))
def list_work(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, work_items: torch.Tensor, counters: torch.Tensor,
    sizes: SplitSizes,
) -> None:  # fmt: skip
    """List the work items for lengths [num_rows] and query starts [num_rows + 1], i32, in one launch."""
    _launch_schedule(ScheduleTensors(seq_lens, query_start_loc, work_items, counters), sizes)


def _launch_schedule(tensors: ScheduleTensors, sizes: SplitSizes) -> tuple[Any, tuple[int, ...]]:
    """Returns the compiled kernel and its grid, and its arguments behind the first two tensors."""
    work_items, counters = tensors.work_items, tensors.counters
    grid = (-(-len(work_items) // ITEMS_PER_PROGRAM), 1, 1)
    numbers = ScheduleNumbers(
        num_rows=sizes.num_rows, target=sizes.target, max_work_items=len(work_items), window_left=sizes.window_left,
        chunk=sizes.chunk, num_counters=len(counters), BLOCK_N=sizes.block_n, MIN_BLOCKS=sizes.min_blocks,
        MAX_ROWS=triton.next_power_of_2(sizes.num_rows), BLOCK_ITEMS=ITEMS_PER_PROGRAM,
    )  # fmt: skip
    compiled = start_kernel(schedule_kernel, grid, *tensors, *numbers, num_warps=4)
    return None if compiled is None else (compiled, grid), (work_items.data_ptr(), counters.data_ptr(), *numbers)


class WorkList:
    """The work items of batches of one shape. Triton finds the kernel slower than it launches it: that is done once.

    Args:
        work_items: [max_work_items, 8] i32, which every batch is listed into.
        counters: [num_counters] i32, which every listing sets to 0: what a launch that was cut short left there must
            not be found by the next step. None: there are none.
    """

    def __init__(self, work_items: torch.Tensor, sizes: SplitSizes, counters: torch.Tensor | None = None) -> None:
        self.work_items = work_items
        self.counters = work_items.new_empty(0) if counters is None else counters
        self._sizes = sizes
        self._kernel: Any = None
        self._arguments: tuple[int, ...] = ()

    def fill(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """List the work items for lengths [num_rows] and query starts [num_rows + 1], i32, in one launch."""
        at = (seq_lens.data_ptr(), query_start_loc.data_ptr())
        if self._kernel is not None and not (at[0] | at[1]) % ALIGNED:
            start_compiled(*self._kernel, *at, *self._arguments)
        elif INTERPRETED or (at[0] | at[1]) % ALIGNED:
            self._list(seq_lens, query_start_loc)
        else:
            self._kernel, self._arguments = self._launch(seq_lens, query_start_loc)

    def _list(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        list_work(seq_lens, query_start_loc, self.work_items, self.counters, self._sizes)

    def _launch(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
        tensors = ScheduleTensors(seq_lens, query_start_loc, self.work_items, self.counters)
        return _launch_schedule(tensors, self._sizes)


_VARY = ["num_rows", "target", "max_work_items", "window_left", "chunk", "num_counters"]


@triton.jit(do_not_specialize=_VARY)  # type: ignore[untyped-decorator]
def schedule_kernel(  # type: ignore[no-untyped-def]
    seq_lens,  # [num_rows] i32
    query_start_loc,  # [num_rows + 1] i32
    work_items,  # [max_work_items, 8] i32, see below
    counters,  # [num_counters] i32, become 0
    num_rows,
    target,  # work items that fill the GPU
    max_work_items,
    window_left,  # positions before its own that a query sees
    chunk,  # positions in a chunk; a query sees its own chunk alone
    num_counters,
    BLOCK_N: tl.constexpr,  # keys of a block
    MIN_BLOCKS: tl.constexpr,  # blocks of a work item at least
    MAX_ROWS: tl.constexpr,  # a power of two, at least num_rows
    BLOCK_ITEMS: tl.constexpr,  # work items of a program
):
    """List a step's work items: about `target` in all, or one a row.

    A work item is all that a program has to know: the row (-1: none), its first key, the end of its keys, the row's
    first partial slot, the row's number of splits times MAX_SPLITS plus the number of this one, the row's length, its
    first query token, and its number of query tokens.

    A row with less than half as many blocks again as a work item has is not split: at most 4 / 3 of `target` items are
    splits of rows.
    """
    clear_counters(counters, num_counters)
    rows = tl.arange(0, MAX_ROWS)
    exists = rows < num_rows
    lens, starts, query_lens = load_rows(seq_lens, query_start_loc, rows, exists)
    first = first_key(lens - query_lens, window_left, chunk) // BLOCK_N
    blocks = tl.maximum((lens + BLOCK_N - 1) // BLOCK_N - first, 0)
    size = tl.maximum((tl.sum(blocks, 0) + target - 1) // target, MIN_BLOCKS)
    num_splits = tl.where(exists, tl.maximum((blocks + size // 2) // size, 1), 0)
    ends = tl.cumsum(num_splits, 0)
    num_partials = tl.where(num_splits > 1, num_splits, 0)
    slots_before = tl.cumsum(num_partials, 0) - num_partials

    work_item = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    row = tl.sum((ends[None] <= work_item[:, None]).to(tl.int32), 1)
    mine = rows[None] == row[:, None]
    row_splits = tl.maximum(of_row(mine, num_splits), 1)
    split = work_item - of_row(mine, ends - num_splits)
    row_first, row_num_blocks = of_row(mine, first), of_row(mine, blocks)
    row_len = of_row(mine, lens)
    start = (row_first + split * row_num_blocks // row_splits) * BLOCK_N
    stop = tl.minimum((row_first + (split + 1) * row_num_blocks // row_splits) * BLOCK_N, row_len)
    store_item(
        work_items + work_item * 8, work_item < max_work_items, tl.where(row < num_rows, row, -1), start, stop,
        of_row(mine, slots_before), row_splits * MAX_SPLITS + split, row_len, of_row(mine, starts),
        of_row(mine, query_lens),
    )  # fmt: skip


@triton.jit
def clear_counters(counters, num_counters):  # type: ignore[no-untyped-def]
    """Set counters to 0, by all programs of a launch."""
    for first in range(tl.program_id(0) * COUNTERS, num_counters, tl.num_programs(0) * COUNTERS):
        counter = first + tl.arange(0, COUNTERS)
        tl.store(counters + counter, counter * 0, mask=counter < num_counters)


@triton.jit
def load_rows(seq_lens, query_start_loc, rows, exists):  # type: ignore[no-untyped-def]
    """[MAX_ROWS]: each row's length, its first query token and their number; zeros for what does not exist."""
    starts = tl.load(query_start_loc + rows, mask=exists, other=0)
    query_lens = tl.load(query_start_loc + rows + 1, mask=exists, other=0) - starts
    return tl.load(seq_lens + rows, mask=exists, other=0), starts, query_lens


@triton.jit
def of_row(mine, values):  # type: ignore[no-untyped-def]
    """[BLOCK_ITEMS]: of [MAX_ROWS] values that of each work item's row, by where it is [BLOCK_ITEMS, MAX_ROWS]."""
    return tl.sum(tl.where(mine, values[None], 0), 1)


@triton.jit
def store_item(  # type: ignore[no-untyped-def]
    to,  # [BLOCK_ITEMS] pointers to 8 i32, see `schedule_kernel`
    inside,  # [BLOCK_ITEMS]: there is such an item
    row,  # [BLOCK_ITEMS] i32, as what follows
    start,
    stop,
    first_slot,
    split_info,
    seq_len,
    first_token,
    query_len,
):
    """Store work items."""
    tl.store(to, row, mask=inside)
    tl.store(to + 1, start, mask=inside)
    tl.store(to + 2, stop, mask=inside)
    tl.store(to + 3, first_slot, mask=inside)
    tl.store(to + 4, split_info, mask=inside)
    tl.store(to + 5, seq_len, mask=inside)
    tl.store(to + 6, first_token, mask=inside)
    tl.store(to + 7, query_len, mask=inside)


@triton.jit
def first_key(position, window_left, chunk):  # type: ignore[no-untyped-def]
    """The oldest key that a query sees, by its position."""
    position = tl.maximum(position, 0)
    return tl.maximum(position - window_left, position // chunk * chunk)


@triton.jit
def seen_by_all(oldest, newest, seq_len, window_right, window_left, chunk):  # type: ignore[no-untyped-def]
    """The first key that all queries from one position to another see, and the first key after those."""
    chunk_end = (tl.maximum(oldest, 0) // chunk + 1) * chunk
    return first_key(newest, window_left, chunk), tl.minimum(tl.minimum(seq_len, oldest + 1 + window_right), chunk_end)


@triton.jit  # type: ignore[untyped-decorator]
def store_partial(  # type: ignore[no-untyped-def]
    partial_acc,  # [partial slots, USED_M, columns of acc] f32
    partial_ml,  # [partial slots, USED_M, 2] f32
    partial_slot,
    acc,  # [BLOCK_M or USED_M, BLOCK_DIM_VO] f32
    m_i,  # in base 2
    l_i,
    used,  # queries that exist
    USED_M: tl.constexpr,
):
    """Store a partial result."""
    lane, dims = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    slot = partial_slot.to(tl.int64) * USED_M + lane
    live = (lane < used) & (lane < USED_M)
    tl.store(partial_acc + slot[:, None] * acc.shape[1] + dims[None], acc, mask=live[:, None])
    tl.store(partial_ml + slot * 2, m_i, mask=live)
    tl.store(partial_ml + slot * 2 + 1, l_i, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def combine_splits(  # type: ignore[no-untyped-def]
    partial_acc,  # [partial slots, BLOCK_M, BLOCK_DIM_VO] f32
    partial_ml,  # [partial slots, BLOCK_M, 2] f32: m_i in base 2, l_i
    first,  # the row's first slot
    step,  # slots from split to split
    num_splits,  # of the row
    num_queries,  # of a slot that exist
    BLOCK_M: tl.constexpr,  # queries of a slot
    BLOCK_DIM_VO: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,  # splits that are loaded at a time: so many loads are under way
    COLUMNS: tl.constexpr,  # of BLOCK_DIM_VO, from where `partial_acc` points to on
):
    """Combine all splits of a row, each weighing exp2 of its highest logit; returns acc, m_i, l_i."""
    offs_m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, COLUMNS)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in range(0, num_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        at = (first + split.to(tl.int64) * step)[:, None] * BLOCK_M + offs_m[None]  # [BLOCK_SPLITS, BLOCK_M]
        there = (split < num_splits)[:, None] & (offs_m < num_queries)[None]
        m_splits = tl.load(partial_ml + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        l_splits = tl.load(partial_ml + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        acc_splits = tl.load(partial_acc + at[:, :, None] * BLOCK_DIM_VO + dims[None, None], mask=there[:, :, None],
                             other=0.0, cache_modifier=".cg")  # fmt: skip
        m_new = tl.maximum(m_i, tl.max(m_splits, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(m_splits - m_safe[None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(l_splits * p, 0)
        acc = acc * alpha[:, None] + tl.sum(acc_splits * p[:, :, None], 0)
        m_i = m_new
    return acc, m_i, l_i


@triton.jit  # type: ignore[untyped-decorator]
def load_block(at, live, within, MASKED: tl.constexpr, FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros where nothing is to be read: what lies there may be NaN. Without a mask where all is read."""
    if MASKED:
        loaded = tl.load(at, mask=live, other=0.0) if FULL else tl.load(at, mask=live & within, other=0.0)
    else:
        loaded = tl.load(at) if FULL else tl.load(at, mask=within, other=0.0)
    return loaded

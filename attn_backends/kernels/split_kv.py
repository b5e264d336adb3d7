"""Splits of rows' keys: what kernels of ours that list, make and combine them share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 30)  # beyond any position
MAX_SPLITS = tl.constexpr(1 << 15)  # of a row, which a work item has as one number with its own
HOPPER_PAGE = 16  # slots, of which the pages of kernels for Hopper are multiples, as those of a load are
COUNTERS = tl.constexpr(1024)  # that a scheduling program clears at a time


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
def store_items(to, inside, numbers):  # type: ignore[no-untyped-def]
    """Store work items of eight numbers each, a tuple of i32, where `to` points, if they are `inside` of their list."""
    for i in tl.static_range(8):
        tl.store(to + i, numbers[i], mask=inside)


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

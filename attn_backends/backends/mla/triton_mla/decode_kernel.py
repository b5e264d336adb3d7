"""Decode on latent rows: every query head of a token reads the same ones, once, as keys and as values.

The rows of a tile are pairs of a query token and a head, which lie one behind the other. A block of latent rows is
loaded once: its product with the absorbed queries gives the logits, and the weights multiply the same block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.fp8 import (
    accumulate,
    as_pairs,
    interleave_columns,
    row_amax,
    scale_to_fp16,
    unpack_columns,
    zero_acc,
)
from attn_backends.kernels.pdl import grid_wait_and_launch_dependents
from attn_backends.kernels.split_kv import LN_2, MAX_SPLITS, combine_splits, load_block


@triton.jit(do_not_specialize=["table_row"])  # type: ignore[untyped-decorator]
def mla_decode_kernel(  # type: ignore[no-untyped-def]
    latent_rows,  # descriptor of the cache as [num_slots, RANK + ROPE], for blocks of [BLOCK_N, RANK]; or None
    rope_rows,  # the same for blocks of [BLOCK_N, ROPE]; both where a block lies in one page
    query,  # [num_rows, QUERY_LEN * HEADS, RANK + ROPE], contiguous as all tensors
    latent_cache,  # [num_pages, PAGE_SIZE, RANK + ROPE]
    output,  # [num_rows, QUERY_LEN * HEADS, RANK]
    lse,  # [num_rows, QUERY_LEN * HEADS] f32, natural log, if WANT_LSE
    page_table,  # [num_rows, max_pages] i32
    work_items,  # [max_work_items, 8] i32, see `equal_cuts.cut_kernel`
    more_items,  # [programs of a tile, 2] i32, the same
    partial_acc,  # [partial slots, TILES * BLOCK_M, BLOCK_RANK] f32
    partial_ml,  # [partial slots, TILES * BLOCK_M, 2] f32: m_i in base 2, l_i
    table_row,  # elements from row to row of the page table
    scale,  # f32, of logits in base 2
    value_scale,  # f32, of cached values
    WANT_LSE: tl.constexpr,  # 0 or 1
    PAGE_SIZE: tl.constexpr,  # slots
    QUERY_LEN: tl.constexpr,  # query tokens of a row
    HEADS: tl.constexpr,  # query heads
    TILES: tl.constexpr,  # tiles of a row's queries
    BLOCK_M: tl.constexpr,  # queries of a tile: token times head
    BLOCK_N: tl.constexpr,  # keys of a block
    RANK: tl.constexpr,  # latent columns
    ROPE: tl.constexpr,  # columns of a rope key
    BLOCK_RANK: tl.constexpr,  # RANK, padded
    BLOCK_ROPE: tl.constexpr,  # ROPE, padded
    STAGES: tl.constexpr,  # blocks under way
    EXACT: tl.constexpr,  # 0 or 1: a product of float32 is three of tf32
    USE_PDL: tl.constexpr,  # 0 or 1: it starts early, and `mla_combine_kernel` does, see `kernels.pdl.Pdl`
):
    """One program attends for a cut of all rows' keys and a tile of BLOCK_M of a row's queries."""
    if USE_PDL:
        grid_wait_and_launch_dependents()
    tile, program = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    next_item, end_item = tl.load(more_items + program * 2), tl.load(more_items + program * 2 + 1)
    row, start, stop, first_slot, split_info, seq_len = _load_item(work_items, program, True)
    while row >= 0:
        num_splits, split = split_info // MAX_SPLITS, split_info % MAX_SPLITS
        lane = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        live = lane < QUERY_LEN * HEADS
        from_row = query + (row.to(tl.int64) * (QUERY_LEN * HEADS) + lane)[:, None] * (RANK + ROPE)
        ranks = tl.arange(0, BLOCK_RANK)
        # Products of 64 rows have their queries in shared memory, if these are as they were loaded.
        of_8_bits: tl.constexpr = latent_cache.dtype.element_ty.primitive_bitwidth == 8
        PAIRS: tl.constexpr = of_8_bits and RANK % 2 == 0 and ROPE % 2 == 0 and BLOCK_M < 64
        q = _columns(from_row, live, RANK, BLOCK_RANK, PAIRS)
        q_rope = _columns(from_row + RANK, live, ROPE, BLOCK_ROPE, PAIRS)
        q_scale = None
        if PAIRS and query.dtype.element_ty == tl.bfloat16:
            q_scale = tl.maximum(tl.maximum(row_amax(q[0]), row_amax(q[1])),
                                 tl.maximum(row_amax(q_rope[0]), row_amax(q_rope[1])))  # fmt: skip
            q = scale_to_fp16(q[0], q_scale), scale_to_fp16(q[1], q_scale)
            q_rope = scale_to_fp16(q_rope[0], q_scale), scale_to_fp16(q_rope[1], q_scale)

        acc = zero_acc(BLOCK_M, BLOCK_RANK, PAIRS)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        pages = page_table + row.to(tl.int64) * table_row
        last_seen = seq_len - QUERY_LEN + lane // HEADS
        # Blocks that all queries see whole need no mask.
        whole = tl.minimum(stop, seq_len - QUERY_LEN + 1) // BLOCK_N * BLOCK_N
        whole = tl.maximum(whole, start)
        acc, m_i, l_i = _attend(q, q_rope, q_scale, acc, m_i, l_i, start, whole, seq_len, last_seen,
                                   latent_cache, latent_rows, rope_rows, pages, scale, False, PAGE_SIZE, BLOCK_N, RANK,
                                   ROPE, STAGES, EXACT)  # fmt: skip
        # What lies behind the last key may be NaN, which a mask keeps out and a descriptor does not.
        acc, m_i, l_i = _attend(q, q_rope, q_scale, acc, m_i, l_i, whole, stop, seq_len, last_seen,
                                   latent_cache, None, None, pages, scale, True, PAGE_SIZE, BLOCK_N, RANK, ROPE, 1,
                                   EXACT)  # fmt: skip
        acc = interleave_columns(acc)
        if num_splits == 1:
            _write(output, lse, acc, m_i, l_i, row, lane, value_scale, WANT_LSE, QUERY_LEN * HEADS, RANK, RANK)
        else:
            slot = (first_slot + split).to(tl.int64) * (TILES * BLOCK_M) + lane
            tl.store(partial_acc + slot[:, None] * BLOCK_RANK + ranks[None], acc, mask=live[:, None])
            tl.store(partial_ml + slot * 2, m_i, mask=live)
            tl.store(partial_ml + slot * 2 + 1, l_i, mask=live)
        row, start, stop, first_slot, split_info, seq_len = _load_item(work_items, next_item, next_item < end_item)
        next_item += 1


@triton.jit
def _load_item(work_items, work_item, exists):  # type: ignore[no-untyped-def]
    """A work item's numbers, see `CutList`; a row of -1 where there is none."""
    at = work_items + work_item * 8
    row, seq_len = tl.load(at, mask=exists, other=-1), tl.load(at + 5, mask=exists, other=0)
    start, stop = tl.load(at + 1, mask=exists, other=0), tl.load(at + 2, mask=exists, other=0)
    return row, start, stop, tl.load(at + 3, mask=exists, other=0), tl.load(at + 4, mask=exists, other=0), seq_len


@triton.jit(do_not_specialize=["spread"])  # type: ignore[untyped-decorator]
def mla_combine_kernel(  # type: ignore[no-untyped-def]
    output,  # [num_rows, QUERIES, RANK]
    lse,  # [num_rows, QUERIES] f32, natural log, if WANT_LSE
    work_items,  # [max_work_items, 8] i32, see `equal_cuts.cut_kernel`
    more_items,  # [programs of a tile, 2] i32, the same
    partial_acc,  # [partial slots, SLOT_QUERIES, BLOCK_RANK] f32
    partial_ml,  # [partial slots, SLOT_QUERIES, 2] f32: m_i in base 2, l_i
    spread,  # programs of a cut; it differs from batch to batch, so it is no constant
    value_scale,  # f32, of cached values
    WANT_LSE: tl.constexpr,  # 0 or 1
    QUERIES: tl.constexpr,  # of a row: token times head
    SLOT_QUERIES: tl.constexpr,  # queries that a partial slot holds
    RANK: tl.constexpr,  # latent columns
    BLOCK_RANK: tl.constexpr,  # RANK, padded
    USE_PDL: tl.constexpr,  # 0 or 1: it starts before the decode has ended, whose work items were there before
    NUMBERS: tl.constexpr,  # of partial results that are combined at a time, as all these a power of two
    WIDEST: tl.constexpr,  # columns of a query that are combined at a time, of the fewest splits
    WIDE: tl.constexpr,  # the same of more splits
    NARROW: tl.constexpr,  # the same of many splits
):
    """Combine the splits of rows: `spread` programs a split take the row's queries in turn, the more columns at a time
    the fewer splits there are.

    So a row has `spread` times as many programs as splits. The launch is one of its own: with 128 heads a row's partial
    results are megabytes, which the last program of the row to end would combine alone. Of a cut's items the first and
    the last one are splits, or none.
    """
    program, part = tl.program_id(0) // spread, tl.program_id(0) % spread
    next_item, end_item = tl.load(more_items + program * 2), tl.load(more_items + program * 2 + 1)
    first = _load_item(work_items, program, True)
    last = _load_item(work_items, end_item - 1, next_item < end_item)
    if USE_PDL:
        grid_wait_and_launch_dependents()
    for nth in range(2):
        row = tl.where(nth == 0, first[0], last[0])
        first_slot, split_info = tl.where(nth == 0, first[3], last[3]), tl.where(nth == 0, first[4], last[4])
        num_splits = split_info // MAX_SPLITS
        if (row >= 0) & (num_splits > 1):
            given = (output, lse, partial_acc, partial_ml, row, first_slot * SLOT_QUERIES, num_splits,
                     split_info % MAX_SPLITS * spread + part, num_splits * spread, value_scale)  # fmt: skip
            if num_splits <= NUMBERS // WIDEST:
                _combine_share(*given, WANT_LSE, QUERIES, SLOT_QUERIES, RANK, BLOCK_RANK, NUMBERS, WIDEST)
            elif num_splits <= NUMBERS // WIDE:
                _combine_share(*given, WANT_LSE, QUERIES, SLOT_QUERIES, RANK, BLOCK_RANK, NUMBERS, WIDE)
            else:
                _combine_share(*given, WANT_LSE, QUERIES, SLOT_QUERIES, RANK, BLOCK_RANK, NUMBERS, NARROW)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_share(  # type: ignore[no-untyped-def]
    output, lse, partial_acc, partial_ml, row, first, num_splits, nth, programs, value_scale,
    WANT_LSE: tl.constexpr, QUERIES: tl.constexpr, SLOT_QUERIES: tl.constexpr, RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr, NUMBERS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Combine and write what the `nth` of a row's programs has of its queries, COLUMNS at a time; `first` is the row's
    first partial result."""
    RUNS: tl.constexpr = BLOCK_RANK // COLUMNS
    for each in range(nth * QUERIES * RUNS // programs, (nth + 1) * QUERIES * RUNS // programs):
        query, column = each // RUNS, each % RUNS * COLUMNS
        acc, m_i, l_i = combine_splits(partial_acc + column, partial_ml, first + query, SLOT_QUERIES, num_splits, 1, 1,
                                       BLOCK_RANK, NUMBERS // COLUMNS, COLUMNS)  # fmt: skip
        _write(output + column, lse, acc, m_i, l_i, row, query + tl.arange(0, 1), value_scale, WANT_LSE, QUERIES, RANK,
               RANK - column)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _columns(rows, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load all columns of queries, or the even ones and the odd ones."""
    if PAIRS:
        columns = tl.arange(0, BLOCK // 2)
        mask = live[:, None] & (columns[None] < WIDTH // 2)
        even = tl.load(rows + 2 * columns[None], mask=mask, other=0.0)
        return even, tl.load(rows + 2 * columns[None] + 1, mask=mask, other=0.0)
    else:
        columns = tl.arange(0, BLOCK)
        return (tl.load(rows + columns[None], mask=live[:, None] & (columns[None] < WIDTH), other=0.0),)


@triton.jit  # type: ignore[untyped-decorator]
def _products(queries, keys, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply queries with keys over all columns."""
    first = tl.dot(queries[0], tl.trans(keys[0]), input_precision=PRECISION)
    if len(keys) == 1:
        return first
    else:
        return tl.dot(queries[1], tl.trans(keys[1]), first, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,  # tuple of [BLOCK_M, BLOCK_RANK]; or the even and the odd columns, for a cache of 8 bits
    q_rope,  # tuple of [BLOCK_M, BLOCK_ROPE], the same
    q_scale,  # [BLOCK_M] f32, see `fp8.scale_to_fp16`; or None
    acc,  # weighted values so far, as `zero_acc` has them
    m_i,  # [BLOCK_M] f32, the highest logit so far, in base 2
    l_i,  # [BLOCK_M] f32, the sum of weights so far
    start,  # the first key
    stop,  # the end of the keys
    num_keys,  # of the row
    last_seen,  # [BLOCK_M] i32, the last key that a query sees, if MASKED
    latent_cache,
    latent_rows,
    rope_rows,
    pages,  # pointer to the row's page ids
    scale,  # f32, of logits in base 2
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Attend to keys `start` to `stop` in blocks of BLOCK_N; returns acc, m_i, l_i."""
    lane = tl.arange(0, BLOCK_N)
    of_dtype: tl.constexpr = latent_cache.dtype.element_ty
    as_dtype: tl.constexpr = q[0].dtype
    TOGETHER: tl.constexpr = len(q)  # columns that are read as one
    ranks, ropes = tl.arange(0, q[0].shape[1]), tl.arange(0, q_rope[0].shape[1])
    cached = latent_cache
    if TOGETHER == 2:
        cached = as_pairs(latent_cache)
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"  # of float32 alone; see `attend_keys` of TRITON
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        keys = first + lane
        live = keys < num_keys
        if latent_rows is not None:
            slot = tl.load(pages + first // PAGE_SIZE) * PAGE_SIZE + first % PAGE_SIZE
            latent = latent_rows.load([slot, 0])
            rope = rope_rows.load([slot, RANK])
        else:
            if PAGE_SIZE % BLOCK_N == 0:  # a block lies in one page
                page = tl.load(pages + first // PAGE_SIZE).to(tl.int64)
                slots = page * PAGE_SIZE + first % PAGE_SIZE + lane
            else:
                page = tl.load(pages + keys // PAGE_SIZE, mask=live if MASKED else None).to(tl.int64)
                slots = page * PAGE_SIZE + keys % PAGE_SIZE
            rank: tl.constexpr = RANK // TOGETHER
            wide: tl.constexpr = ROPE // TOGETHER
            latents = cached + slots[:, None] * (rank + wide)
            latent = load_block(
                latents + ranks[None], live[:, None], ranks[None] < rank, MASKED, ranks.shape[0] == rank
            )
            rope = load_block(
                latents + rank + ropes[None], live[:, None], ropes[None] < wide, MASKED, ropes.shape[0] == wide
            )
        latent = unpack_columns(latent, of_dtype, as_dtype, TOGETHER == 2)
        rope = unpack_columns(rope, of_dtype, as_dtype, TOGETHER == 2)
        logits = _products(q, latent, precision) * scale
        logits_rope = _products(q_rope, rope, precision) * scale
        # Always so, which the compiler does not see. Without a branch it finds that the product reaches another, and
        # then lays all warps along its rows: those of 64 or fewer do not suffice, and half the warps repeat the others.
        logits = logits + logits_rope if first >= start else logits - logits_rope
        if q_scale is not None:
            logits *= q_scale[:, None]
        if MASKED:
            logits = tl.where(live[None] & (keys[None] <= last_seen[:, None]), logits, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(logits, 1))
        m_safe = m_new
        if MASKED:  # a row that has seen nothing yet
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(logits - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = accumulate(acc, p.to(as_dtype), alpha, latent, precision)
        m_i = m_new
    return acc, m_i, l_i


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    output, lse, acc, m_i, l_i, row, lane, value_scale,
    WANT_LSE: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr, num_columns,
):  # fmt: skip
    """Outputs and natural LSEs of a row's queries `lane`, of columns from where `output` points to on; zeros and -inf
    for one that saw no key."""
    live = lane < QUERIES
    at = row.to(tl.int64) * QUERIES + lane
    ranks = tl.arange(0, acc.shape[1])
    saw = l_i > 0
    divisor = tl.where(saw, l_i, 1.0)
    out = tl.where(saw[:, None], acc * (value_scale / divisor)[:, None], 0.0)
    to = output + at[:, None] * RANK + ranks[None]
    tl.store(to, out.to(output.dtype.element_ty), mask=live[:, None] & (ranks[None] < num_columns))
    if WANT_LSE:
        tl.store(lse + at, tl.where(saw, (m_i + tl.log2(divisor)) * LN_2, float("-inf")), mask=live)

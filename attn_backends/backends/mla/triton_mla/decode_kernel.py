"""Decode on latent rows: every query head of a token reads the same ones, once, as keys and as values.

The rows of a tile are pairs of a query token and a head, which lie one behind the other. A block of latent rows is
loaded once: its product with the absorbed queries gives the logits, and the weights multiply the same block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.fp8 import add_values, all_columns, as_pairs, columns_of, largest_of, no_sums, shares_of
from attn_backends.kernels.launch import let_next_start, wait_for_last
from attn_backends.kernels.split_kv import LN_2, MOST_ITEMS, join, load_block


@triton.jit(do_not_specialize=["table_row"])  # type: ignore[untyped-decorator]
def mla_decode_kernel(  # type: ignore[no-untyped-def]
    latent_rows, rope_rows, query, latent_cache, output, lse, page_table, items, partial, partial_sums, table_row,
    scale, value_scale,
    WANT_LSE: tl.constexpr, PAGE_SIZE: tl.constexpr, QUERY_LEN: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, LETS_NEXT_START: tl.constexpr,
):  # fmt: skip
    """One program an item and tile of ROWS of its queries. All tensors are contiguous.

    Args:
        query: [num_rows, QUERY_LEN * HEADS, RANK + ROPE].
        latent_cache: [num_pages, PAGE_SIZE, RANK + ROPE].
        latent_rows, rope_rows: descriptors of it as [num_slots, RANK + ROPE], for blocks of [KEYS, RANK] and [KEYS,
            ROPE], where a block lies in one page; else None.
        output: [num_rows, QUERY_LEN * HEADS, RANK]; lse: [num_rows, QUERY_LEN * HEADS] f32.
        items: see `triton_split`; a place of partial results holds TILES * ROWS queries of BLOCK_RANK.
        scale: of logits in base 2; value_scale: of the cache.
        LETS_NEXT_START: `mla_join_kernel` starts early (see `triton_launch.Start`).
    """
    if LETS_NEXT_START:
        let_next_start()
    tile = tl.program_id(0) % TILES
    item = items + tl.program_id(0) // TILES * 8
    row = tl.load(item)
    start, stop, place, parts = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    seq_len = tl.load(item + 5)
    if row >= 0:
        count, nth = parts // MOST_ITEMS, parts % MOST_ITEMS
        lane = tile * ROWS + tl.arange(0, ROWS)
        live = lane < QUERY_LEN * HEADS
        from_row = query + (row.to(tl.int64) * (QUERY_LEN * HEADS) + lane)[:, None] * (RANK + ROPE)
        ranks = tl.arange(0, BLOCK_RANK)
        # Products of 64 rows have their queries in shared memory, if these are as they were loaded.
        of_8_bits: tl.constexpr = latent_cache.dtype.element_ty.primitive_bitwidth == 8
        PAIRS: tl.constexpr = of_8_bits and RANK % 2 == 0 and ROPE % 2 == 0 and ROWS < 64
        q = _columns(from_row, live, RANK, BLOCK_RANK, PAIRS)
        q_rope = _columns(from_row + RANK, live, ROPE, BLOCK_ROPE, PAIRS)
        stretch = None
        if PAIRS and query.dtype.element_ty == tl.bfloat16:
            stretch = tl.maximum(tl.maximum(largest_of(q[0]), largest_of(q[1])),
                                 tl.maximum(largest_of(q_rope[0]), largest_of(q_rope[1])))  # fmt: skip
            q = shares_of(q[0], stretch), shares_of(q[1], stretch)
            q_rope = shares_of(q_rope[0], stretch), shares_of(q_rope[1], stretch)

        sums = no_sums(ROWS, BLOCK_RANK, PAIRS)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        pages = page_table + row.to(tl.int64) * table_row
        last_seen = seq_len - QUERY_LEN + lane // HEADS
        # Blocks that all queries see whole need no mask.
        whole = tl.minimum(stop, seq_len - QUERY_LEN + 1) // KEYS * KEYS
        whole = tl.maximum(whole, start)
        sums, top, total = _attend(q, q_rope, stretch, sums, top, total, start, whole, seq_len, last_seen,
                                   latent_cache, latent_rows, rope_rows, pages, scale, False, PAGE_SIZE, KEYS, RANK,
                                   ROPE, STAGES, EXACT)  # fmt: skip
        # What lies behind the last key may be NaN, which a mask keeps out and a descriptor does not.
        sums, top, total = _attend(q, q_rope, stretch, sums, top, total, whole, stop, seq_len, last_seen,
                                   latent_cache, None, None, pages, scale, True, PAGE_SIZE, KEYS, RANK, ROPE, 1,
                                   EXACT)  # fmt: skip
        sums = all_columns(sums)
        if count == 1:
            _write(output, lse, sums, top, total, row, lane, value_scale, WANT_LSE, QUERY_LEN * HEADS, RANK)
        else:
            mine = (place + nth).to(tl.int64) * (TILES * ROWS) + lane
            tl.store(partial + mine[:, None] * BLOCK_RANK + ranks[None], sums, mask=live[:, None])
            tl.store(partial_sums + mine * 2, top, mask=live)
            tl.store(partial_sums + mine * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["spread"])  # type: ignore[untyped-decorator]
def mla_join_kernel(  # type: ignore[no-untyped-def]
    output, lse, items, partial, partial_sums, spread, value_scale,
    WANT_LSE: tl.constexpr, QUERIES: tl.constexpr, PLACE: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join the parts of split rows: `spread` programs an item, for the row's queries in turn, so that a row has
    `spread` times as many programs as parts. It differs from batch to batch: it is no constant.

    A launch of its own: with 128 heads a row's parts are megabytes, which the last item of the row to end would join
    alone. PLACE is how many queries a place of partial results holds; PARTS are joined at a time. EARLY: it starts
    before the decode has ended, whose items were there before.
    """
    item = items + tl.program_id(0) // spread * 8
    row, place, parts = tl.load(item), tl.load(item + 3), tl.load(item + 4)
    count = parts // MOST_ITEMS
    if EARLY:
        wait_for_last()
    if row >= 0 and count > 1:
        nth, programs = parts % MOST_ITEMS * spread + tl.program_id(0) % spread, count * spread
        for query in range(nth * QUERIES // programs, (nth + 1) * QUERIES // programs):
            joined, top, total = join(
                partial, partial_sums, place * PLACE + query, PLACE, count, 1, 1, BLOCK_RANK, PARTS
            )
            _write(output, lse, joined, top, total, row, query + tl.arange(0, 1), value_scale, WANT_LSE, QUERIES, RANK)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(rows, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of queries: all columns, or the even ones and the odd ones."""
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
    """Of all columns."""
    first = tl.dot(queries[0], tl.trans(keys[0]), input_precision=PRECISION)
    if len(keys) == 1:
        return first
    else:
        return tl.dot(queries[1], tl.trans(keys[1]), first, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, q_rope, stretch, sums, top, total, start, stop, num_keys, last_seen, latent_cache, latent_rows, rope_rows,
    pages, scale,
    MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to keys `start` to `stop` in blocks of KEYS, as `last_seen` [ROWS] i32 allows if MASKED.

    Queries and sums may be two: of even and of odd columns, for a cache of 8 bits. `stretch` is as in `tile`.

    Returns:
        sums, top, total: weighted values as `no_sums` has them, the highest logit in base 2, the sum of weights.
    """
    lane = tl.arange(0, KEYS)
    of_dtype: tl.constexpr = latent_cache.dtype.element_ty
    as_dtype: tl.constexpr = q[0].dtype
    TOGETHER: tl.constexpr = len(q)  # columns that are read as one
    ranks, ropes = tl.arange(0, q[0].shape[1]), tl.arange(0, q_rope[0].shape[1])
    cached = latent_cache
    if TOGETHER == 2:
        cached = as_pairs(latent_cache)
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"  # of float32 alone; see `attend_keys` of TRITON
    for first in tl.range(start, stop, KEYS, num_stages=STAGES):
        keys = first + lane
        live = keys < num_keys
        if latent_rows is not None:
            slot = tl.load(pages + first // PAGE_SIZE) * PAGE_SIZE + first % PAGE_SIZE
            latent = latent_rows.load([slot, 0])
            rope = rope_rows.load([slot, RANK])
        else:
            if PAGE_SIZE % KEYS == 0:  # a block lies in one page
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
        latent = columns_of(latent, of_dtype, as_dtype, TOGETHER == 2)
        rope = columns_of(rope, of_dtype, as_dtype, TOGETHER == 2)
        logits = _products(q, latent, precision) * scale
        logits_rope = _products(q_rope, rope, precision) * scale
        # Always so, which the compiler does not see. Without a branch it finds that the product reaches another, and
        # then lays all warps along its rows: those of 64 or fewer do not suffice, and half the warps repeat the others.
        logits = logits + logits_rope if first >= start else logits - logits_rope
        if stretch is not None:
            logits *= stretch[:, None]
        if MASKED:
            logits = tl.where(live[None] & (keys[None] <= last_seen[:, None]), logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = new_top
        if MASKED:  # a row that has seen nothing yet
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - base[:, None])
        shrunk = tl.exp2(top - base)
        total = total * shrunk + tl.sum(weights, 1)
        sums = add_values(sums, weights.to(as_dtype), shrunk, latent, precision)
        top = new_top
    return sums, top, total


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    output, lse, sums, top, total, row, lane, value_scale,
    WANT_LSE: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Outputs and natural LSEs of a row's queries `lane`; zeros and -inf for one that saw no key."""
    live = lane < QUERIES
    at = row.to(tl.int64) * QUERIES + lane
    ranks = tl.arange(0, sums.shape[1])
    saw = total > 0
    divisor = tl.where(saw, total, 1.0)
    out = tl.where(saw[:, None], sums * (value_scale / divisor)[:, None], 0.0)
    to = output + at[:, None] * RANK + ranks[None]
    tl.store(to, out.to(output.dtype.element_ty), mask=live[:, None] & (ranks[None] < RANK))
    if WANT_LSE:
        tl.store(lse + at, tl.where(saw, (top + tl.log2(divisor)) * LN_2, float("-inf")), mask=live)

"""Decode on latent rows: every query head of a token reads the same ones, once, as keys and as values.

The rows of a tile are pairs of a query token and a head, which lie one behind the other. A block of latent rows is
loaded once: its product with the absorbed queries gives the logits, and the weights multiply the same block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.triton_split import LN_2, MOST_ITEMS, join, load_block


@triton.jit(do_not_specialize=["table_row"])  # type: ignore[untyped-decorator]
def mla_decode_kernel(  # type: ignore[no-untyped-def]
    query, latent_cache, latent_rows, rope_rows, output, lse, page_table, items, partial, partial_sums, scale,
    value_scale, table_row,
    WANT_LSE: tl.constexpr, PAGE_SIZE: tl.constexpr, QUERY_LEN: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
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
    """
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
        ranks, ropes = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
        q = tl.load(from_row + ranks[None], mask=live[:, None] & (ranks[None] < RANK), other=0.0)
        q_rope = tl.load(from_row + RANK + ropes[None], mask=live[:, None] & (ropes[None] < ROPE), other=0.0)

        sums = tl.zeros([ROWS, BLOCK_RANK], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        pages = page_table + row.to(tl.int64) * table_row
        last_seen = seq_len - QUERY_LEN + lane // HEADS
        # Blocks that all queries see whole need no mask.
        whole = tl.minimum(stop, seq_len - QUERY_LEN + 1) // KEYS * KEYS
        whole = tl.maximum(whole, start)
        sums, top, total = _attend(q, q_rope, sums, top, total, start, whole, seq_len, last_seen, latent_cache,
                                   latent_rows, rope_rows, pages, scale, False, PAGE_SIZE, KEYS, RANK, ROPE, STAGES,
                                   EXACT)  # fmt: skip
        # What lies behind the last key may be NaN, which a mask keeps out and a descriptor does not.
        sums, top, total = _attend(q, q_rope, sums, top, total, whole, stop, seq_len, last_seen, latent_cache,
                                   None, None, pages, scale, True, PAGE_SIZE, KEYS, RANK, ROPE, 1, EXACT)  # fmt: skip
        if count == 1:
            _write(output, lse, sums, top, total, row, lane, value_scale, WANT_LSE, QUERY_LEN * HEADS, RANK)
        else:
            mine = (place + nth).to(tl.int64) * (TILES * ROWS) + lane
            tl.store(partial + mine[:, None] * BLOCK_RANK + ranks[None], sums, mask=live[:, None])
            tl.store(partial_sums + mine * 2, top, mask=live)
            tl.store(partial_sums + mine * 2 + 1, total, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def mla_join_kernel(  # type: ignore[no-untyped-def]
    output, lse, items, partial, partial_sums, value_scale,
    WANT_LSE: tl.constexpr, QUERIES: tl.constexpr, PLACE: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PARTS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Join the parts of split rows: SPREAD programs an item, for the row's queries in turn, so that a row has SPREAD
    times as many programs as parts.

    A launch of its own: with 128 heads a row's parts are megabytes, which the last item of the row to end would join
    alone. PLACE is how many queries a place of partial results holds; PARTS are joined at a time.
    """
    item = items + tl.program_id(0) // SPREAD * 8
    row, place, parts = tl.load(item), tl.load(item + 3), tl.load(item + 4)
    count = parts // MOST_ITEMS
    if row >= 0 and count > 1:
        nth, programs = parts % MOST_ITEMS * SPREAD + tl.program_id(0) % SPREAD, count * SPREAD
        for query in range(nth * QUERIES // programs, (nth + 1) * QUERIES // programs):
            joined, top, total = join(
                partial, partial_sums, place * PLACE + query, PLACE, count, 1, 1, BLOCK_RANK, PARTS
            )
            _write(output, lse, joined, top, total, row, query + tl.arange(0, 1), value_scale, WANT_LSE, QUERIES, RANK)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, q_rope, sums, top, total, start, stop, num_keys, last_seen, latent_cache, latent_rows, rope_rows, pages, scale,
    MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to keys `start` to `stop` in blocks of KEYS, as `last_seen` [ROWS] i32 allows if MASKED.

    Returns:
        sums, top, total: weighted values [ROWS, BLOCK_RANK] f32, the highest logit in base 2, the sum of weights.
    """
    lane = tl.arange(0, KEYS)
    ranks, ropes = tl.arange(0, q.shape[1]), tl.arange(0, q_rope.shape[1])
    precision: tl.constexpr = "ieee" if EXACT else "tf32"  # of float32 alone
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
            latents = latent_cache + slots[:, None] * (RANK + ROPE)
            latent = load_block(latents + ranks[None], live[:, None], ranks[None] < RANK, MASKED, q.shape[1] == RANK)
            rope = load_block(
                latents + RANK + ropes[None], live[:, None], ropes[None] < ROPE, MASKED, q_rope.shape[1] == ROPE
            )
        latent = latent.to(q.dtype)
        logits = tl.dot(q, tl.trans(latent), input_precision=precision) * scale
        logits_rope = tl.dot(q_rope, tl.trans(rope.to(q.dtype)), input_precision=precision) * scale
        # Always so, which the compiler does not see. Without a branch it finds that the product reaches another, and
        # then lays all warps along its rows: those of 64 or fewer do not suffice, and half the warps repeat the others.
        logits = logits + logits_rope if first >= start else logits - logits_rope
        if MASKED:
            logits = tl.where(live[None] & (keys[None] <= last_seen[:, None]), logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = new_top
        if MASKED:  # a row that has seen nothing yet
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - base[:, None])
        shrunk = tl.exp2(top - base)
        total = total * shrunk + tl.sum(weights, 1)
        sums = tl.dot(weights.to(q.dtype), latent, sums * shrunk[:, None], input_precision=precision)
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

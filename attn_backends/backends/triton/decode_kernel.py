"""Paged attention of rows with few query tokens: keys split over the GPU as evenly as their lengths ask for it.

The device itself cuts the work: one small launch a step reads the lengths and lists items, runs of keys of one row that
take about equally long. How many there may be follows from the number of rows and of multiprocessors alone, so the grid
is the same for every batch of a graph, and one long row among short ones is as fast as the same keys in even rows. The
last of a row's items to end joins them all: there is no second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.backends.triton.tile import attend_keys, finish, first_key


@triton.jit(do_not_specialize=["num_rows", "target", "max_items"])  # type: ignore[untyped-decorator]
def schedule_kernel(  # type: ignore[no-untyped-def]
    seq_lens, query_start_loc, items, num_rows, target, max_items,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, POSITIONAL: tl.constexpr, KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    MAX_ROWS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """`items` [max_items, 8] i32: row (-1: none), first key, end of keys, items of the row, place of partial results.

    About `target` items in all, or one a row. A row with less than half as many blocks again as an item has is not
    split: at most 4 / 3 of `target` items are parts of rows.
    """
    rows = tl.arange(0, MAX_ROWS)
    exists = rows < num_rows
    lens = tl.load(seq_lens + rows, mask=exists, other=0)
    position = lens
    if POSITIONAL:
        starts = tl.load(query_start_loc + rows, mask=exists, other=0)
        position -= tl.load(query_start_loc + rows + 1, mask=exists, other=0) - starts
    first = first_key(position, WINDOW, CHUNK) // KEYS
    blocks = tl.maximum((lens + KEYS - 1) // KEYS - first, 0)
    size = tl.maximum((tl.sum(blocks, 0) + target - 1) // target, MIN_BLOCKS)
    counts = tl.where(exists, tl.maximum((blocks + size // 2) // size, 1), 0)
    ends = tl.cumsum(counts, 0)
    parts = tl.where(counts > 1, counts, 0)
    parts_before = tl.cumsum(parts, 0) - parts

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row = tl.sum((ends[None] <= item[:, None]).to(tl.int32), 1)
    mine = rows[None] == row[:, None]
    count = tl.maximum(tl.sum(tl.where(mine, counts[None], 0), 1), 1)
    nth = item - tl.sum(tl.where(mine, (ends - counts)[None], 0), 1)
    place = tl.sum(tl.where(mine, parts_before[None], 0), 1) + nth
    row_first = tl.sum(tl.where(mine, first[None], 0), 1)
    row_blocks = tl.sum(tl.where(mine, blocks[None], 0), 1)
    row_len = tl.sum(tl.where(mine, lens[None], 0), 1)
    start = (row_first + nth * row_blocks // count) * KEYS
    stop = tl.minimum((row_first + (nth + 1) * row_blocks // count) * KEYS, row_len)
    inside = item < max_items
    tl.store(items + item * 8, tl.where(row < num_rows, row, -1), mask=inside)
    tl.store(items + item * 8 + 1, start, mask=inside)
    tl.store(items + item * 8 + 2, stop, mask=inside)
    tl.store(items + item * 8 + 3, count, mask=inside)
    tl.store(items + item * 8 + 4, place - nth, mask=inside)
    tl.store(items + item * 8 + 5, nth, mask=inside)


@triton.jit(do_not_specialize=["table_row"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, output, lse, page_table, seq_lens, query_start_loc, items, partial, partial_sums,
    counters, slopes, sinks, scale, value_scale, table_row,
    query_token, query_head, key_page, key_slot, key_head, value_page, value_slot, value_head, out_token, out_head,
    lse_token,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, WANT_LSE: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program an item, KV head and tile of ROWS of its queries; items of a row's heads lie side by side."""
    program = tl.program_id(0)
    tile = program % TILES
    head = program // TILES % KV_HEADS
    item = items + program // TILES // KV_HEADS * 8
    row = tl.load(item)
    if row >= 0:
        start, stop, count = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        place, nth = tl.load(item + 4), tl.load(item + 5)
        seq_len = tl.load(seq_lens + row)
        first_token = tl.load(query_start_loc + row)
        query_len = tl.load(query_start_loc + row + 1) - first_token

        lane = tile * ROWS + tl.arange(0, ROWS)
        token = lane // GROUP
        q_head = head * GROUP + lane % GROUP
        live = token < query_len
        positions = seq_len - query_len + token
        at = (first_token + token).to(tl.int64)
        dims = tl.arange(0, BLOCK_DIM)
        queries = tl.load(query + at[:, None] * query_token + q_head[:, None] * query_head + dims[None],
                          mask=live[:, None] & (dims[None] < DIM), other=0.0)  # fmt: skip
        slope = tl.load(slopes + q_head, mask=live, other=0.0) if ALIBI else tl.zeros([ROWS], tl.float32)

        sums = tl.zeros([ROWS, BLOCK_DIM_VO], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        key = key_cache + head.to(tl.int64) * key_head
        value = value_cache + head.to(tl.int64) * value_head
        pages = page_table + row.to(tl.int64) * table_row
        # Blocks that all queries see whole need no mask.
        whole = stop // KEYS * KEYS
        if CAUSAL:
            whole = tl.minimum(whole, (seq_len - query_len + 1) // KEYS * KEYS)
        whole = tl.maximum(whole, start)
        if WINDOW >= 0 or CHUNK > 0:
            whole = start
        else:
            sums, top, total = attend_keys(
                queries, sums, top, total, start, whole, seq_len, positions, slope, key, value, pages, scale,
                key_page, key_slot, value_page, value_slot,
                False, CAUSAL, WINDOW, CHUNK, SOFT_CAP, ALIBI, PAGE_SIZE, KEYS, DIM, DIM_VO, STAGES, EXACT,
            )  # fmt: skip
        sums, top, total = attend_keys(
            queries, sums, top, total, whole, stop, seq_len, positions, slope, key, value, pages, scale,
            key_page, key_slot, value_page, value_slot,
            True, CAUSAL, WINDOW, CHUNK, SOFT_CAP, ALIBI, PAGE_SIZE, KEYS, DIM, DIM_VO,
            STAGES if WINDOW >= 0 or CHUNK > 0 else 1, EXACT,
        )  # fmt: skip

        is_last = count == 1
        if count > 1:
            # [places, KV_HEADS, TILES * ROWS, ...]
            mine = ((place + nth) * KV_HEADS + head) * (TILES * ROWS) + lane
            dims_vo = tl.arange(0, BLOCK_DIM_VO)
            tl.store(partial + mine[:, None].to(tl.int64) * BLOCK_DIM_VO + dims_vo[None], sums, mask=live[:, None])
            tl.store(partial_sums + mine * 2, top, mask=live)
            tl.store(partial_sums + mine * 2 + 1, total, mask=live)
            tl.debug_barrier()  # all of the program's stores come before its count
            counter = counters + (row * KV_HEADS + head) * TILES + tile
            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
            if is_last:
                tl.debug_barrier()
                tl.store(counter, 0)  # for the next launch
                sums, top, total = _join(partial, partial_sums, place, count, head, lane, live, dims_vo,
                                         KV_HEADS, TILES * ROWS, BLOCK_DIM_VO, ROWS)  # fmt: skip
        if is_last:
            sink = tl.load(sinks + q_head, mask=live, other=0.0).to(tl.float32) if SINKS else top
            out, log_sum = finish(sums, top, total, sink, value_scale, SINKS)
            dims_vo = tl.arange(0, BLOCK_DIM_VO)
            to = output + at[:, None] * out_token + q_head[:, None] * out_head + dims_vo[None]
            tl.store(to, out.to(output.dtype.element_ty), mask=live[:, None] & (dims_vo[None] < DIM_VO))
            if WANT_LSE:
                tl.store(lse + at * lse_token + q_head, log_sum, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    partial, partial_sums, place, count, head, lane, live, dims_vo,
    KV_HEADS: tl.constexpr, LANES: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All parts of a row, each weighing exp2 of its highest logit."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for nth in tl.range(0, count, loop_unroll_factor=4):
        at = ((place + nth) * KV_HEADS + head) * LANES + lane
        top = tl.maximum(top, tl.load(partial_sums + at * 2, mask=live, other=0.0, cache_modifier=".cg"))
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.zeros([ROWS, BLOCK_DIM_VO], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for nth in tl.range(0, count, loop_unroll_factor=4):
        at = ((place + nth) * KV_HEADS + head) * LANES + lane
        part_top = tl.load(partial_sums + at * 2, mask=live, other=0.0, cache_modifier=".cg")
        part_total = tl.load(partial_sums + at * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        part = tl.load(partial + at[:, None].to(tl.int64) * BLOCK_DIM_VO + dims_vo[None], mask=live[:, None],
                       other=0.0, cache_modifier=".cg")  # fmt: skip
        weight = tl.exp2(part_top - base)
        total += part_total * weight
        sums += part * weight[:, None]
    return sums, top, total

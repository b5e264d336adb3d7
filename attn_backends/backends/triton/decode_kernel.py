"""Paged attention of rows with few query tokens: keys split over the GPU as evenly as their lengths ask for it.

The device itself cuts the work: one small launch a step reads the lengths and lists items, runs of keys of one row that
take about equally long. How many there may be follows from the number of rows and of multiprocessors alone, so the grid
is the same for every batch of a graph, and one long row among short ones is as fast as the same keys in even rows. The
last of a row's items to end joins them all: there is no second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.backends.triton.tile import FAR, attend_keys, factor, first_key, write_rows

MOST_ITEMS = tl.constexpr(1 << 15)  # of a row


@triton.jit(do_not_specialize=["num_rows", "target", "max_items", "behind", "chunk"])  # type: ignore[untyped-decorator]
def schedule_kernel(  # type: ignore[no-untyped-def]
    seq_lens, query_start_loc, items, num_rows, target, max_items, behind, chunk,
    KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr, MAX_ROWS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """`items` [max_items, 8] i32, all that a program has to know: row (-1: none), first key, end of keys, place of the
    row's partial results, how many items the row has and which this is, its length, first query token and their number.

    About `target` items in all, or one a row. A row with less than half as many blocks again as an item has is not
    split: at most 4 / 3 of `target` items are parts of rows.
    """
    rows = tl.arange(0, MAX_ROWS)
    exists = rows < num_rows
    lens = tl.load(seq_lens + rows, mask=exists, other=0)
    starts = tl.load(query_start_loc + rows, mask=exists, other=0)
    query_lens = tl.load(query_start_loc + rows + 1, mask=exists, other=0) - starts
    first = first_key(lens - query_lens, behind, chunk) // KEYS
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
    at = items + item * 8
    tl.store(at, tl.where(row < num_rows, row, -1), mask=inside)
    tl.store(at + 1, start, mask=inside)
    tl.store(at + 2, stop, mask=inside)
    tl.store(at + 3, place - nth, mask=inside)
    tl.store(at + 4, count * MOST_ITEMS + nth, mask=inside)
    tl.store(at + 5, row_len, mask=inside)
    tl.store(at + 6, tl.sum(tl.where(mine, starts[None], 0), 1), mask=inside)
    tl.store(at + 7, tl.sum(tl.where(mine, query_lens[None], 0), 1), mask=inside)


@triton.jit(do_not_specialize=["table_row", "ahead", "behind", "chunk", "has_sinks", "want_lse", "lse_token"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, output, lse, page_table, items, partial, partial_sums, counters, slopes, sinks,
    scale, value_scale, soft_cap, ahead, behind, chunk, has_sinks, want_lse, table_row,
    query_token, query_head, key_page, key_slot, key_head, value_page, value_slot, value_head, out_token, out_head,
    lse_token,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, EARLY: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program an item, KV head and tile of ROWS of its queries; items of a row's heads lie side by side.

    Of a tile LANES are queries at most; PARTS are joined at a time.
    """
    program = tl.program_id(0)
    tile = program % TILES
    head = program // TILES % KV_HEADS
    item = items + program // TILES // KV_HEADS * 8
    row = tl.load(item)
    start, stop, place, parts = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    seq_len, first_token, query_len = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    if row >= 0:
        count, nth = parts // MOST_ITEMS, parts % MOST_ITEMS
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
        # Blocks that all queries see whole need no mask.
        whole = tl.minimum(stop, seq_len - query_len + 1 + ahead) // KEYS * KEYS
        if tl.minimum(behind, chunk) < FAR:
            whole = start
        whole = tl.maximum(whole, start)
        key, value = key_cache + head.to(tl.int64) * key_head, value_cache + head.to(tl.int64) * value_head
        pages = page_table + row.to(tl.int64) * table_row
        sums, top, total = attend_keys(
            queries, tl.zeros([ROWS, BLOCK_DIM_VO], tl.float32), tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32), start, whole, seq_len, positions, slope, key, value, pages, scale, soft_cap,
            ahead, behind, chunk, key_page, key_slot, value_page, value_slot,
            False, SOFT_CAP, ALIBI, EARLY, PAGE_SIZE, KEYS, DIM, DIM_VO, STAGES, EXACT,
        )  # fmt: skip
        sums, top, total = attend_keys(
            queries, sums, top, total, whole, stop, seq_len, positions, slope, key, value, pages, scale, soft_cap,
            ahead, behind, chunk, key_page, key_slot, value_page, value_slot,
            True, SOFT_CAP, ALIBI, EARLY, PAGE_SIZE, KEYS, DIM, DIM_VO, STAGES, EXACT,
        )  # fmt: skip
        top *= factor(scale, EARLY)
        if count == 1:
            write_rows(output, lse, sinks, sums, top, total, lane, head, first_token, query_len, value_scale,
                       out_token, out_head, lse_token, has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip
        else:
            # Parts are [places, KV_HEADS, TILES, LANES, ...]
            inner = tl.arange(0, ROWS)
            mine = (((place + nth) * KV_HEADS + head) * TILES + tile).to(tl.int64) * LANES + inner
            live = live & (inner < LANES)
            dims_vo = tl.arange(0, BLOCK_DIM_VO)
            tl.store(partial + mine[:, None] * BLOCK_DIM_VO + dims_vo[None], sums, mask=live[:, None])
            tl.store(partial_sums + mine * 2, top, mask=live)
            tl.store(partial_sums + mine * 2 + 1, total, mask=live)
            tl.debug_barrier()  # all of the program's stores come before its count
            counter = counters + (row * KV_HEADS + head) * TILES + tile
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                tl.debug_barrier()
                tl.store(counter, 0)  # for the next launch
                # The last to end joins all, in lanes alone: the tile's unused rows would take its registers.
                first = (place * KV_HEADS + head) * TILES + tile
                joined, joined_top, joined_total = _join(
                    partial, partial_sums, first, KV_HEADS * TILES, count, query_len * GROUP - tile * ROWS,
                    LANES, BLOCK_DIM_VO, PARTS,
                )  # fmt: skip
                write_rows(output, lse, sinks, joined, joined_top, joined_total, tile * ROWS + tl.arange(0, LANES),
                           head, first_token, query_len, value_scale, out_token, out_head, lse_token,
                           has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    partial, partial_sums, first, step, count, num_lanes,
    LANES: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """All parts of a row, each weighing exp2 of its highest logit, PARTS at a time: so many loads are under way."""
    inner = tl.arange(0, LANES)
    dims = tl.arange(0, BLOCK_DIM_VO)
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES, BLOCK_DIM_VO], tl.float32)
    for start in range(0, count, PARTS):
        nth = start + tl.arange(0, PARTS)
        at = (first + nth.to(tl.int64) * step)[:, None] * LANES + inner[None]  # [PARTS, LANES]
        there = (nth < count)[:, None] & (inner < num_lanes)[None]
        tops = tl.load(partial_sums + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(partial_sums + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        parts = tl.load(partial + at[:, :, None] * BLOCK_DIM_VO + dims[None, None], mask=there[:, :, None], other=0.0,
                        cache_modifier=".cg")  # fmt: skip
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tops - base[None])
        shrunk = tl.exp2(top - base)
        total = total * shrunk + tl.sum(totals * weights, 0)
        sums = sums * shrunk[:, None] + tl.sum(parts * weights[:, :, None], 0)
        top = new_top
    return sums, top, total

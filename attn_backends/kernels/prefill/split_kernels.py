"""The kernels around a prefill whose keys are split: one lists its tiles, once a step, and one joins the splits."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.launch import grid_wait
from attn_backends.kernels.split_kv import clear_counters, combine_splits, load_rows, of_row
from attn_backends.kernels.tile_kernels import write_rows

FEW_SPLITS = tl.constexpr(8)  # of a tile
_NOT_CONSTANT = ["first_row", "num_rows", "max_items", "num_whole", "target", "num_kv_heads", "window_right",
                 "window_left", "chunk", "others_tokens", "num_tokens", "num_counters", "tile_tokens", "block_keys",
                 "min_blocks"]  # fmt: skip


@triton.jit(
    do_not_specialize=_NOT_CONSTANT,
    do_not_specialize_on_alignment=["seq_lens", "query_start_loc", "work_items", "counters"],
)  # type: ignore[untyped-decorator]
def list_kernel(  # type: ignore[no-untyped-def]
    seq_lens,  # [rows] i32
    query_start_loc,  # [rows + 1] i32
    work_items,  # [max_items, 8] i32, see below
    counters,  # [num_counters] i32, become 0
    first_row,  # rows before it are left alone
    num_rows,  # rows from there on
    max_items,
    num_whole,  # tiles of the longest rows that are whole, of one KV head; none if MIXED
    target,  # splits of all other tiles and KV heads at most; at least 1
    num_kv_heads,
    window_right,  # positions after its own that a query sees
    window_left,  # positions before its own that a query sees
    chunk,  # positions in a chunk; a query sees its own chunk alone
    others_tokens,  # rows of no more query tokens are left alone, if MIXED
    num_tokens,  # tokens behind all rows up to there are one more row, without keys, if MIXED
    num_counters,
    tile_tokens,  # query tokens of a tile
    block_keys,
    min_blocks,  # blocks of a split at least
    BLOCK_ROWS: tl.constexpr,  # rows that are looked at at a time
    BLOCK_ITEMS: tl.constexpr,  # work items of a program
    MIXED: tl.constexpr,  # 0 or 1: of a graph of mixed batches
):
    """List a step's tiles, and the splits of those that have several, as `splits.num_splits` says.

    A work item is a row (-1: none), its first query token and their number, which of them is the tile's first, the
    row's length, the number of the tile's splits, which of them this is, and the first one's partial slot.

    First come `num_whole` tiles of the longest rows, then splits, those of a tile side by side, whose slots are their
    numbers behind those; then tiles that are whole as they are short. Of whole tiles the longest rows' are in front,
    and of a row the last ones, which see the most keys where attention is causal: so what is left for the end is short.
    """
    clear_counters(counters, num_counters)
    window, mixed, tile = (window_right, window_left, chunk), (others_tokens, num_tokens), (tile_tokens, block_keys)
    rows = (seq_lens, query_start_loc, first_row, num_rows, num_whole, window, mixed, tile)
    num_blocks = tl.zeros([BLOCK_ROWS], tl.int64)
    for begin in range(0, num_rows + MIXED, BLOCK_ROWS):
        tiles, blocks, _lens, _starts, _query_lens = _load_of(rows, begin, BLOCK_ROWS, MIXED)
        whole = _whole_of(rows, begin, tiles, blocks, BLOCK_ROWS, MIXED)
        num_blocks += (tiles - whole).to(tl.int64) * blocks
    even = tl.maximum((tl.sum(num_blocks, 0) * num_kv_heads + target - 1) // target, min_blocks)
    nth, size = 0, even
    num_split_items, num_split_tiles = _count_splits(rows, min_blocks, size, BLOCK_ROWS, MIXED)
    while num_split_items * num_kv_heads > target:
        nth += 1
        size = (even * (8 + (1 << nth) // 2) + 7) // 8  # as `splits.SIZES` has them
        num_split_items, num_split_tiles = _count_splits(rows, min_blocks, size, BLOCK_ROWS, MIXED)

    work_item = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    row, first_token, query_len, seq_len = work_item * 0 - 1, work_item * 0, work_item * 0, work_item * 0
    first, num_splits, split = work_item * 0, work_item * 0 + 1, work_item * 0
    split_before = num_whole  # items before a row's splits
    for begin in range(0, num_rows + MIXED, BLOCK_ROWS):
        tiles, blocks, lens, starts, query_lens = _load_of(rows, begin, BLOCK_ROWS, MIXED)
        before = _before_of(rows, begin, tiles, blocks, BLOCK_ROWS, MIXED)
        whole = tl.minimum(tl.maximum(num_whole - before, 0), tiles)
        splits = _num_splits(blocks, size, min_blocks)
        split_counts = tl.where(splits > 1, (tiles - whole) * splits, 0)
        split_begins = split_before + tl.cumsum(split_counts, 0) - split_counts
        # All tiles that are split are of longer rows, and have as many items in front of a short row's as splits.
        whole_counts = tl.where(splits > 1, whole, tiles)
        whole_begins = before + tl.where(whole > 0, 0, num_split_items - num_split_tiles)
        nth_whole, nth_split = work_item[:, None] - whole_begins[None], work_item[:, None] - split_begins[None]
        is_whole = (nth_whole >= 0) & (nth_whole < whole_counts[None])
        is_split = (nth_split >= 0) & (nth_split < split_counts[None])
        mine = is_whole | is_split
        from_last = tl.where(is_whole, nth_whole, whole[None] + nth_split // splits[None])  # tiles of the row behind it
        # Of tokens behind all rows the last one's pages are looked up.
        row += of_row(mine, 1 + first_row + tl.minimum(begin + tl.arange(0, BLOCK_ROWS), num_rows - 1))
        first_token += of_row(mine, starts)
        query_len += of_row(mine, query_lens)
        seq_len += of_row(mine, lens)
        num_splits += of_row(is_split, splits - 1)
        first += tl.sum(tl.where(mine, tiles[None] - 1 - from_last, 0), 1) * tile_tokens
        split += tl.sum(tl.where(is_split, nth_split % splits[None], 0), 1)
        split_before += tl.sum(split_counts, 0)
    to, inside = work_items + work_item * 8, work_item < max_items
    tl.store(to, row, mask=inside)
    tl.store(to + 1, first_token, mask=inside)
    tl.store(to + 2, query_len, mask=inside)
    tl.store(to + 3, first, mask=inside)
    tl.store(to + 4, seq_len, mask=inside)
    tl.store(to + 5, num_splits, mask=inside)
    tl.store(to + 6, split, mask=inside)
    tl.store(to + 7, work_item - num_whole - split, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _count_splits(rows, min_blocks, size, BLOCK_ROWS: tl.constexpr, MIXED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of splits of all tiles that have several, and of those tiles, of one KV head."""
    num_items, num_tiles = 0, 0
    for begin in range(0, rows[3] + MIXED, BLOCK_ROWS):
        tiles, blocks, _lens, _starts, _query_lens = _load_of(rows, begin, BLOCK_ROWS, MIXED)
        whole = _whole_of(rows, begin, tiles, blocks, BLOCK_ROWS, MIXED)
        splits = _num_splits(blocks, size, min_blocks)
        split_tiles = tl.where(splits > 1, tiles - whole, 0)
        num_items += tl.sum(split_tiles * splits, 0)
        num_tiles += tl.sum(split_tiles, 0)
    return num_items, num_tiles


@triton.jit
def _num_splits(blocks, size, min_blocks):  # type: ignore[no-untyped-def]
    """[BLOCK_ROWS] i32: a row's splits of `size` blocks at most, and of `min_blocks` at least."""
    splits = ((blocks + size - 1) // size).to(tl.int32)
    return tl.maximum(tl.minimum(splits, blocks // min_blocks), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _load_of(rows, begin, BLOCK_ROWS: tl.constexpr, MIXED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_ROWS]: each row's tiles and the blocks of its widest, see `splits.TileLoad`; its length, its first query
    token and their number."""
    seq_lens, query_start_loc, first_row, num_rows, _num_whole, window, mixed, tile = rows
    window_right, window_left, chunk = window
    others_tokens, num_tokens = mixed
    tile_tokens, block_keys = tile
    nth = begin + tl.arange(0, BLOCK_ROWS)
    lens, starts, query_lens = load_rows(seq_lens, query_start_loc, first_row + nth, nth < num_rows)
    if MIXED:
        is_rest = nth == num_rows
        starts += tl.load(query_start_loc + first_row + nth, mask=is_rest, other=0)
        query_lens = tl.where(is_rest, tl.maximum(num_tokens - starts, 0), query_lens)
        query_lens = tl.where(is_rest | (query_lens > others_tokens), query_lens, 0)
    reach = tl.minimum(lens, tl.minimum(window_left, chunk)) + tile_tokens + tl.minimum(query_lens, window_right)
    blocks = (tl.minimum(lens, reach) + block_keys - 1) // block_keys
    return (query_lens + tile_tokens - 1) // tile_tokens, blocks, lens, starts, query_lens


@triton.jit  # type: ignore[untyped-decorator]
def _whole_of(  # type: ignore[no-untyped-def]
    rows, begin, tiles, blocks, BLOCK_ROWS: tl.constexpr, MIXED: tl.constexpr
):
    """[BLOCK_ROWS]: how many of a row's tiles, as `_load_of` has them, are among the first that are whole."""
    whole = tiles * 0
    if MIXED == 0:  # noqa: SIM102 (a constant on its own leaves out what is not there)
        if rows[4] > 0:  # to look at all rows for each takes long where they are many
            before = _before_of(rows, begin, tiles, blocks, BLOCK_ROWS, MIXED)
            whole = tl.minimum(tl.maximum(rows[4] - before, 0), tiles)
    return whole


@triton.jit  # type: ignore[untyped-decorator]
def _before_of(  # type: ignore[no-untyped-def]
    rows, begin, tiles, blocks, BLOCK_ROWS: tl.constexpr, MIXED: tl.constexpr
):
    """[BLOCK_ROWS]: how many tiles rows have that are longer, or as long and in front; 0 if none of these has any."""
    nth = begin + tl.arange(0, BLOCK_ROWS)
    before = tl.zeros([BLOCK_ROWS], tl.int32)
    if tl.max(tiles, 0) > 0:  # not where all are another launch's
        for other in range(0, rows[3] + MIXED, BLOCK_ROWS):
            other_tiles, other_blocks, _lens, _starts, _query_lens = _load_of(rows, other, BLOCK_ROWS, MIXED)
            other_nth = other + tl.arange(0, BLOCK_ROWS)
            is_first = (other_blocks[None] == blocks[:, None]) & (other_nth[None] < nth[:, None])
            before += of_row((other_blocks[None] > blocks[:, None]) | is_first, other_tiles)
    return before


@triton.jit(
    do_not_specialize=["spread", "has_sinks", "want_lse", "lse_token"],
    do_not_specialize_on_alignment=["lse", "sinks", "work_items"],
)  # type: ignore[untyped-decorator]
def join_kernel(  # type: ignore[no-untyped-def]
    output,  # [num_tokens, KV_HEADS * GROUP, DIM_VO]
    lse,  # [num_tokens, KV_HEADS * GROUP] f32, natural log, if want_lse
    sinks,  # [KV_HEADS * GROUP] f32 logits, if has_sinks
    work_items,  # [programs / KV_HEADS / spread or more, 8] i32, from the first split on, see `list_kernel`
    partial_acc,  # [partial slots, KV_HEADS, BLOCK_M, BLOCK_DIM_VO] f32
    partial_ml,  # [partial slots, KV_HEADS, BLOCK_M, 2] f32: m_i in base 2, l_i
    spread,  # programs for each split
    value_scale,  # f32, of cached values
    has_sinks,  # 0 or 1
    want_lse,  # 0 or 1
    out_token,  # elements from token to token, as all strides
    out_head,
    lse_token,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_Q: tl.constexpr,  # query tokens of a tile
    BLOCK_M: tl.constexpr,  # queries of a slot, a multiple of QUERIES
    DIM_VO: tl.constexpr,
    BLOCK_DIM_VO: tl.constexpr,  # a power of two
    QUERIES: tl.constexpr,  # that are joined at a time, where they have few splits
    BLOCK_SPLITS: tl.constexpr,  # of a query's whole columns that are loaded at a time, a multiple of QUERIES
    COLUMNS: tl.constexpr,  # of a query that are joined at a time, where it has many splits
    PDL: tl.constexpr,  # 0 or 1: the kernel in front lets this one start
):
    """The programs of a tile's splits take its queries in turn, and join all splits of each: several queries at a time
    where those are few, and some columns of one where they are many, so that as much is under way."""
    program = tl.program_id(0)
    head, work_item = program // spread % KV_HEADS, program // spread // KV_HEADS
    at = work_items + work_item * 8
    row, first_token, query_len, first = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    num_splits, split, first_slot = tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    if PDL:  # the list was there before that one was launched
        grid_wait()
    if (row >= 0) & (num_splits > 1):
        used = tl.minimum(query_len - first, BLOCK_Q) * GROUP
        slot = first_slot.to(tl.int64) * KV_HEADS + head
        part, num_parts = split * spread + program % spread, num_splits * spread
        if num_splits <= FEW_SPLITS:
            for query in range(part * QUERIES, used, num_parts * QUERIES):
                _join_queries(partial_acc, partial_ml, slot, query, 0, num_splits, output, lse, sinks, head,
                              first_token, query_len, first, used, value_scale, out_token, out_head, lse_token,
                              has_sinks, want_lse, KV_HEADS, GROUP, BLOCK_M, DIM_VO, BLOCK_DIM_VO, QUERIES,
                              BLOCK_SPLITS // QUERIES, BLOCK_DIM_VO)  # fmt: skip
        else:
            PARTS: tl.constexpr = BLOCK_DIM_VO // COLUMNS
            for nth in range(part, used * PARTS, num_parts):
                _join_queries(partial_acc, partial_ml, slot, nth // PARTS, nth % PARTS * COLUMNS, num_splits, output,
                              lse, sinks, head, first_token, query_len, first, used, value_scale, out_token, out_head,
                              lse_token, has_sinks, want_lse, KV_HEADS, GROUP, BLOCK_M, DIM_VO, BLOCK_DIM_VO, 1,
                              BLOCK_SPLITS * PARTS, COLUMNS)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _join_queries(  # type: ignore[no-untyped-def]
    partial_acc,
    partial_ml,
    slot,  # of a tile's first split and the head
    query,  # of the tile
    column,  # of the query
    num_splits,
    output,
    lse,
    sinks,
    head,
    first_token,
    query_len,
    first,
    used,  # queries of the tile
    value_scale,
    out_token,
    out_head,
    lse_token,
    has_sinks,
    want_lse,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM_VO: tl.constexpr,
    BLOCK_DIM_VO: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Join COLUMNS of QUERIES of a tile's queries, from `column` and `query` on, and write what they give."""
    at = slot * (BLOCK_M // QUERIES) + query // QUERIES  # in blocks of so many queries
    acc, m_i, l_i = combine_splits(
        partial_acc + column, partial_ml, at, KV_HEADS * (BLOCK_M // QUERIES), num_splits, used - query, QUERIES,
        BLOCK_DIM_VO, BLOCK_SPLITS, COLUMNS,
    )  # fmt: skip
    lane = query + tl.arange(0, QUERIES)
    lane = tl.where(lane < used, first * GROUP + lane, query_len * GROUP)  # behind the row's last: not written
    write_rows(output + column, lse, sinks, acc, m_i, l_i, lane, head, first_token, query_len, value_scale, out_token,
               out_head, lse_token, has_sinks, want_lse, GROUP, DIM_VO - column)  # fmt: skip

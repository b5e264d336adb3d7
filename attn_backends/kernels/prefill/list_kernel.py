"""The kernel that lists a prefill's tiles, the longest rows' first, with the splits of some, once a step."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.prefill.by_length import list_by_length
from attn_backends.kernels.split_kv import FAR, load_rows, of_row, store_items

DIGITS = tl.constexpr(16)  # that a digit can be, all of which are tried at a time
_NOT_CONSTANT = ["first_row", "num_rows", "max_items", "num_whole", "target", "num_kv_heads", "window_right",
                 "window_left", "chunk", "others_tokens", "num_tokens", "num_counters", "tile_tokens", "tile_queries",
                 "group_size", "block_keys", "min_blocks", "split_keys"]  # fmt: skip


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
    tile_tokens,  # query tokens that a tile has queries of, at most
    tile_queries,  # of a tile: query tokens times the query heads of a KV head
    group_size,  # query heads of a KV head
    block_keys,
    min_blocks,  # blocks of a split at least
    split_keys,  # keys of a split at most, times the query heads of a KV head, if BY_LENGTH
    BLOCK_ROWS: tl.constexpr,  # rows that are looked at at a time; once in all, if there are no more
    OWN_ROWS: tl.constexpr,  # rows whose work items a program lists, with the others of a column of the grid
    BLOCK_ITEMS: tl.constexpr,  # work items of each that it lists at a time
    MIXED: tl.constexpr,  # 0 or 1: of a graph of mixed batches
    BY_LENGTH: tl.constexpr,  # 0 or 1: all tiles are in the order of their own lengths, and split by these; OWN_ROWS is
    # 1 then, and no row is behind the first BLOCK_ROWS
):
    """List a step's tiles, and the splits of those that have several, as `splits.num_splits` says.

    A work item is a row (-1: none), its first query token and their number, which of its queries is the tile's first,
    the row's length, the number of the tile's splits, which of them this is, and the first one's partial slot.

    First come `num_whole` tiles of the longest rows, then splits, a row's first ones of all its tiles in front of its
    second ones, as tiles that are worked on at a time then read the same keys, and memory is asked for these once. A
    tile's slots are side by side. Then come tiles that are whole as they are short. Of whole tiles the longest rows'
    are in front, and of a row the last ones, which see the most keys where attention is causal: so what is left for the
    end is short. With BY_LENGTH it is shorter: tiles that see more keys are in front of all rows' that see less. Those
    that see more than `split_keys` are split then, each into as many splits as it must be, which lie side by side.
    """
    window, mixed = (window_right, window_left, chunk), (others_tokens, num_tokens)
    tile = (tile_tokens, tile_queries, group_size, block_keys)
    rows = (seq_lens, query_start_loc, first_row, num_rows, num_whole, window, mixed, tile)
    own = tl.program_id(0) * OWN_ROWS + tl.arange(0, OWN_ROWS)
    tiles, blocks, lens, starts, query_lens = _load_of(rows, own, MIXED)
    all_rows = _load_of(rows, tl.arange(0, BLOCK_ROWS), MIXED)
    held = all_rows[:2]
    if BY_LENGTH:
        own_row = (tl.sum(tiles, 0), tl.sum(blocks, 0), tl.sum(lens, 0), tl.sum(starts, 0), tl.sum(query_lens, 0))
        num_items = list_by_length(work_items, rows, tl.sum(own, 0), own_row, all_rows, split_keys, target,
                                   num_kv_heads, max_items, BLOCK_ROWS, BLOCK_ITEMS)  # fmt: skip
    else:
        num_items = _list_by_rows(work_items, rows, own, (tiles, blocks, lens, starts, query_lens), held, target,
                                  num_kv_heads, min_blocks, max_items, BLOCK_ROWS, BLOCK_ITEMS, MIXED)  # fmt: skip

    NUMBERS: tl.constexpr = OWN_ROWS * BLOCK_ITEMS
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    program, num_programs = program + tl.program_id(1) * num_programs, num_programs * tl.num_programs(1)
    for begin in range(num_items + program * NUMBERS, max_items, num_programs * NUMBERS):
        work_item = begin + tl.arange(0, NUMBERS)
        none, to = work_item * 0, work_items + work_item * 8
        store_items(
            to, work_item < max_items, (none - 1, none, none, none, none, none + 1, none, work_item - num_whole)
        )
    for begin in range(program * NUMBERS, num_counters, num_programs * NUMBERS):
        counter = begin + tl.arange(0, NUMBERS)
        tl.store(counters + counter, counter * 0, mask=counter < num_counters)


@triton.jit  # type: ignore[untyped-decorator]
def _list_by_rows(  # type: ignore[no-untyped-def]
    work_items, rows, own, own_rows, held, target, num_kv_heads, min_blocks, max_items, BLOCK_ROWS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """List the tiles of a program's own rows, and their splits, in the order of all rows' lengths. Returns how many
    work items there are of all rows."""
    tiles, blocks, lens, starts, query_lens = own_rows
    num_whole, tile_queries = rows[4], rows[7][1]
    edge = _edge_of(rows, held, BLOCK_ROWS, MIXED)
    size = _split_size(rows, held, edge, target, num_kv_heads, min_blocks, BLOCK_ROWS, MIXED)
    counts = _counts_of(rows, held, edge, own, blocks, size, min_blocks, BLOCK_ROWS, MIXED)
    before, splits_before, num_tiles, num_more = counts

    whole = tl.minimum(tl.maximum(num_whole - before, 0), tiles)
    splits = _num_splits(blocks, size, min_blocks)
    # All tiles that are split are of longer rows, and have as many items in front of a short row's as splits.
    whole_counts = tl.where(splits > 1, whole, tiles)
    whole_begins = before + tl.where(whole > 0, 0, num_more)
    num_items = whole_counts + tl.where(splits > 1, (tiles - whole) * splits, 0)
    split_begins = num_whole + splits_before - whole_counts
    split_tiles = tl.maximum(tiles - whole, 1)
    row = rows[2] + tl.minimum(own, rows[3] - 1)  # of tokens behind all rows the last one's pages are looked up
    for begin in range(tl.program_id(1) * BLOCK_ITEMS, tl.max(num_items, 0), tl.num_programs(1) * BLOCK_ITEMS):
        nth = (begin + tl.arange(0, BLOCK_ITEMS))[None]
        is_whole, nth_split = nth < whole_counts[:, None], nth - whole_counts[:, None]
        work_item = nth + tl.where(is_whole, whole_begins[:, None], split_begins[:, None])
        split = tl.where(is_whole, 0, nth_split // split_tiles[:, None])
        split_tile = nth_split - split * split_tiles[:, None]
        from_last = tl.where(is_whole, nth, whole[:, None] + split_tile)  # tiles of the row behind it
        slot = (split_begins + whole_counts)[:, None] + split_tile * splits[:, None]  # of several splits
        store_items(
            work_items + work_item * 8, (nth < num_items[:, None]) & (work_item < max_items), (row[:, None],
            starts[:, None], query_lens[:, None], (tiles[:, None] - 1 - from_last) * tile_queries, lens[:, None],
            tl.where(is_whole, 1, splits[:, None]), split, slot - num_whole),
        )  # fmt: skip
    return num_tiles + num_more


@triton.jit  # type: ignore[untyped-decorator]
def _edge_of(rows, held, BLOCK_ROWS: tl.constexpr, MIXED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the first tiles that are whole end: a number of blocks, how many tiles of rows with as many are among them,
    and how many are not. Of rows with more blocks all tiles are, and of others none.

    It is the largest number of blocks that more than `num_whole` tiles have or exceed, found digit by digit; beyond
    that of any row if no tiles are among them.
    """
    num_whole, edge, edge_whole, edge_rest = rows[4], rows[4] * 0 + FAR, rows[4] * 0, rows[4] * 0
    if MIXED == 0:  # noqa: SIM102 (a constant on its own leaves out what is not there)
        if num_whole > 0:
            most = tl.zeros([BLOCK_ROWS], tl.int32)
            for begin in range(0, rows[3], BLOCK_ROWS):
                most = tl.maximum(most, _load_again(rows, held, begin, BLOCK_ROWS, MIXED)[1])
            longest = tl.max(most, 0)
            edge, step = num_whole * 0, num_whole * 0 + 1
            while step * DIGITS <= longest:
                step *= DIGITS
            while step > 0:
                digit = tl.arange(0, DIGITS)
                count = tl.zeros([DIGITS], tl.int32)
                for begin in range(0, rows[3], BLOCK_ROWS):
                    tiles, blocks = _load_again(rows, held, begin, BLOCK_ROWS, MIXED)
                    count += of_row(blocks[None] >= (edge + digit * step)[:, None], tiles)
                edge += step * tl.sum(((digit > 0) & (count > num_whole)).to(tl.int32), 0)
                step //= DIGITS
            counts = tl.zeros([BLOCK_ROWS], tl.int64)  # of rows with more blocks, and of these
            for begin in range(0, rows[3], BLOCK_ROWS):
                tiles, blocks = _load_again(rows, held, begin, BLOCK_ROWS, MIXED)
                tiles = tiles.to(tl.int64)
                counts += tl.where(blocks > edge, tiles << 32, tl.where(blocks == edge, tiles, 0))
            both = tl.sum(counts, 0)
            edge_whole = num_whole - (both >> 32).to(tl.int32)
            edge_rest = both.to(tl.int32) - edge_whole
    return edge, edge_whole, edge_rest


@triton.jit  # type: ignore[untyped-decorator]
def _split_size(  # type: ignore[no-untyped-def]
    rows, held, edge, target, num_kv_heads, min_blocks, BLOCK_ROWS: tl.constexpr, MIXED: tl.constexpr
):
    """Number of blocks of a split at most: the first of `splits.SIZES` of which there are no more than the target."""
    edge_blocks, _edge_whole, edge_rest = edge
    num_blocks = tl.zeros([BLOCK_ROWS], tl.int64)
    for begin in range(0, rows[3] + MIXED, BLOCK_ROWS):
        tiles, blocks = _load_again(rows, held, begin, BLOCK_ROWS, MIXED)
        num_blocks += tl.where(blocks < edge_blocks, tiles, 0).to(tl.int64) * blocks
    all_blocks = tl.sum(num_blocks, 0) + edge_rest.to(tl.int64) * edge_blocks
    even = tl.minimum((all_blocks * num_kv_heads + target - 1) // target, FAR // 16).to(tl.int32)
    even = tl.maximum(even, min_blocks)

    nth = tl.arange(0, 4)  # of the last size there are never more
    sizes = _nth_size(even, nth)
    counts = tl.zeros([BLOCK_ROWS, 4], tl.int32)
    for begin in range(0, rows[3] + MIXED, BLOCK_ROWS):
        tiles, blocks = _load_again(rows, held, begin, BLOCK_ROWS, MIXED)
        splits = _num_splits(blocks[:, None], sizes[None], min_blocks)
        counts += tl.where(splits > 1, tl.where(blocks < edge_blocks, tiles, 0)[:, None] * splits, 0)
    of_edge = _num_splits(edge_blocks, sizes, min_blocks)
    num_items = tl.sum(counts, 0) + tl.where(of_edge > 1, edge_rest * of_edge, 0)
    return _nth_size(even, tl.min(tl.where(num_items * num_kv_heads <= target, nth, 4), 0))


@triton.jit
def _nth_size(even, nth):  # type: ignore[no-untyped-def]
    """Number of blocks of the nth of `splits.SIZES`."""
    return (even * (8 + (1 << nth) // 2) + 7) // 8


@triton.jit  # type: ignore[untyped-decorator]
def _counts_of(  # type: ignore[no-untyped-def]
    rows, held, edge, own, own_blocks, size, min_blocks, BLOCK_ROWS: tl.constexpr, MIXED: tl.constexpr
):
    """[OWN_ROWS] i32: how many tiles rows have that are longer than each of a program's own, or as long and in front,
    and how many splits all rows in front. Then how many tiles there are, and how many more work items."""
    edge_blocks, edge_whole, edge_rest = edge
    before, splits_before, edge_before = own * 0, own * 0, own * 0
    num_tiles, num_more = tl.zeros([BLOCK_ROWS], tl.int32), tl.zeros([BLOCK_ROWS], tl.int32)
    for begin in range(0, rows[3] + MIXED, BLOCK_ROWS):
        tiles, blocks = _load_again(rows, held, begin, BLOCK_ROWS, MIXED)
        in_front = (begin + tl.arange(0, BLOCK_ROWS))[None] < own[:, None]
        as_long = (blocks[None] == own_blocks[:, None]) & in_front
        before += of_row((blocks[None] > own_blocks[:, None]) | as_long, tiles)
        splits = _num_splits(blocks, size, min_blocks)
        split_tiles = tl.where((splits > 1) & (blocks < edge_blocks), tiles, 0)
        splits_before += of_row(in_front, split_tiles * splits)
        num_tiles += tiles
        num_more += split_tiles * (splits - 1)
        if MIXED == 0:  # noqa: SIM102 (a constant on its own leaves out what is not there)
            if rows[4] > 0:
                edge_before += of_row(in_front, tl.where(blocks == edge_blocks, tiles, 0))
    of_edge = _num_splits(edge_blocks, size, min_blocks)  # if it is 1, shorter rows have no splits either
    splits_before += tl.maximum(edge_before - edge_whole, 0) * of_edge
    return before, splits_before, tl.sum(num_tiles, 0), tl.sum(num_more, 0) + edge_rest * (of_edge - 1)


@triton.jit
def _num_splits(blocks, size, min_blocks):  # type: ignore[no-untyped-def]
    """i32: a row's splits of `size` blocks at most, no less than `min_blocks`, and of `min_blocks` at least."""
    splits = (blocks + size - 1) // size
    splits -= (splits * min_blocks > blocks).to(tl.int32)  # the last one was short: the others take what it had
    return tl.maximum(splits, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _load_again(  # type: ignore[no-untyped-def]
    rows, held, begin, BLOCK_ROWS: tl.constexpr, MIXED: tl.constexpr
):
    """[BLOCK_ROWS]: tiles and blocks of rows from `begin` on, or those that are held, if there are no others."""
    tiles, blocks = held
    if rows[3] + MIXED > BLOCK_ROWS:
        tiles, blocks = _load_of(rows, begin + tl.arange(0, BLOCK_ROWS), MIXED)[:2]
    return tiles, blocks


@triton.jit  # type: ignore[untyped-decorator]
def _load_of(rows, nth, MIXED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each row's tiles and the blocks of its widest, see `splits.TileLoad`; its length, its first query token and their
    number; zeros for what does not exist."""
    seq_lens, query_start_loc, first_row, num_rows, _num_whole, window, mixed, tile = rows
    window_right, window_left, chunk = window
    others_tokens, num_tokens = mixed
    tile_tokens, tile_queries, group_size, block_keys = tile
    lens, starts, query_lens = load_rows(seq_lens, query_start_loc, first_row + nth, nth < num_rows)
    if MIXED:
        is_rest = nth == num_rows
        starts += tl.load(query_start_loc + first_row + nth, mask=is_rest, other=0)
        query_lens = tl.where(is_rest, tl.maximum(num_tokens - starts, 0), query_lens)
        query_lens = tl.where(is_rest | (query_lens > others_tokens), query_lens, 0)
    reach = tl.minimum(lens, tl.minimum(window_left, chunk)) + tile_tokens + tl.minimum(query_lens, window_right)
    blocks = (tl.minimum(lens, reach) + block_keys - 1) // block_keys
    tiles = (query_lens * group_size + tile_queries - 1) // tile_queries
    return tiles, blocks, lens, starts, query_lens

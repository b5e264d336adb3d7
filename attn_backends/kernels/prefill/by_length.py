"""A list of a prefill's tiles in the order of their own lengths, with the splits of those that see many keys; a part of
`list_kernel`.

Keys are counted as queries are, times the query heads of a KV head: tiles that end within a token differ by less than
one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.split_kv import store_items

UNSPLIT = tl.constexpr((1 << 31) - 1)  # keys of a split, which no tile sees more of


@triton.jit  # type: ignore[untyped-decorator]
def list_by_length(  # type: ignore[no-untyped-def]
    work_items,
    rows,  # as `list_kernel` has it
    own,  # the row that is listed, counted from the first
    own_row,  # its tiles, the blocks of the widest, its length, its first query token and their number, as `all_rows`
    all_rows,  # [BLOCK_ROWS] of each
    split_keys,  # of a split at most, of a tile that sees more
    target,  # splits of all tiles and KV heads at most: none are made if there would be more
    num_kv_heads,
    max_items,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    """List a row's tiles, a tile's splits side by side, and behind those of all tiles that see more keys; the number of
    a split tile's first work item is its partial slot. Returns how many work items all rows have."""
    _tile_tokens, tile_queries, group_size, _block_keys = rows[7]
    split_keys, most, num_more = _allowed(all_rows, rows[7], split_keys, target, num_kv_heads)
    tiles, _blocks, length, start, query_len = own_row
    row = rows[2] + own
    in_front = (tl.arange(0, BLOCK_ROWS) < own).to(tl.int32)[None]
    for begin in range(tl.program_id(1) * BLOCK_ITEMS, tiles, tl.num_programs(1) * BLOCK_ITEMS):
        nth = begin + tl.arange(0, BLOCK_ITEMS)  # tiles of the row behind it
        ends = (length - query_len) * group_size + (tiles - nth) * tile_queries
        keys = tl.minimum(length * group_size, ends)
        fewer = keys[:, None] - in_front  # of tiles that see as many those of the rows in front come first
        splits = tl.maximum((keys - 1) // split_keys + 1, 1)
        own_most = tl.max(splits, 0)
        before = _num_longer(all_rows, rows[7], fewer)
        for several in range(1, own_most):
            before += _num_longer(all_rows, rows[7], tl.maximum(fewer, several * split_keys))
        for several in range(own_most, most):  # of tiles that are all longer
            before += _num_above(all_rows, rows[7], several * split_keys)
        same = nth * 0
        for split in range(0, most):
            work_item = before + split
            store_items(
                work_items + work_item * 8, (nth < tiles) & (split < splits) & (work_item < max_items),
                (row + same, start + same, query_len + same, (tiles - 1 - nth) * tile_queries, length + same, splits,
                 split + same, before),
            )  # fmt: skip
    return tl.sum(all_rows[0], 0) + num_more


@triton.jit
def _allowed(all_rows, tile, split_keys, target, num_kv_heads):  # type: ignore[no-untyped-def]
    """Keys of a split, splits of the tile that sees the most keys, and how many more work items than tiles there are;
    UNSPLIT, 1 and 0 where rows that are longer than was said would have more splits than there is room for."""
    most = tl.maximum((tl.max(all_rows[2], 0) * tile[2] - 1) // split_keys + 1, 1)
    num_more = most * 0
    for several in range(1, most):
        num_more += _num_above(all_rows, tile, several * split_keys)
    num_splits = num_more + _num_above(all_rows, tile, split_keys)  # with the first ones
    has_room = num_splits * num_kv_heads <= target
    return tl.where(has_room, split_keys, UNSPLIT), tl.where(has_room, most, 1), tl.where(has_room, num_more, 0)


@triton.jit
def _num_above(all_rows, tile, keys):  # type: ignore[no-untyped-def]
    """How many tiles see more than so many keys."""
    return tl.sum(_num_longer(all_rows, tile, (all_rows[0] * 0 + keys)[None]), 0)


@triton.jit
def _num_longer(all_rows, tile, keys):  # type: ignore[no-untyped-def]
    """[n] i32: how many tiles see more than so many keys [n, BLOCK_ROWS], of each row its own number."""
    tiles, _blocks, lens, _starts, query_lens = all_rows
    _tile_tokens, tile_queries, group_size, _block_keys = tile
    context = (lens - query_lens)[None] * group_size
    no_more = tl.maximum(keys - context, 0) // tile_queries  # tiles of a row that see no more
    return tl.sum(tl.where(keys < lens[None] * group_size, tiles[None] - no_more, 0), 1)

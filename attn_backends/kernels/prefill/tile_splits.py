"""Splits of the tiles that see the most keys, each by itself, where all tiles and splits are worked on at once.

The tiles of a prompt see from a block to all of its keys, so that the last ones alone take twice as long as all would
in equal parts. By `splits.num_splits` all tiles of a row have as many splits, for which there may not be programs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.prefill.split_tiles import SplitTile
from attn_backends.kernels.prefill.splits import TileLoad, read_time

_MOST_SPLITS = 32  # of a tile: the list looks at all rows once for each


class TileSplits(NamedTuple):
    """How tiles are split by their own lengths."""

    blocks: int  # of a split at most; a tile that sees no more is whole
    num_splits: int  # of all tiles of a KV head that are split
    taken: float  # in blocks of the usual tile that a program reads


def tile_keys(tile: SplitTile, query_lens: IntArray, seq_lens: IntArray) -> NDArray[np.int64]:
    """Keys that each tile sees, row by row, the first one first; counted as queries are, times the query heads of a KV
    head, as `by_length.list_by_length` does."""
    tiles = tile.num_tiles(query_lens)
    row = np.repeat(np.arange(len(tiles)), tiles)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    seen = seq_lens.astype(np.int64) * tile.group_size
    context = seen - query_lens.astype(np.int64) * tile.group_size
    keys: NDArray[np.int64] = np.minimum(seen[row], context[row] + (nth + 1) * tile.rows)
    return keys


def split_by_tile(
    load: TileLoad, keys: NDArray[np.int64], num_kv_heads: int, num_programs: int, tile: SplitTile, least: float
) -> TileSplits | None:
    """The shortest splits with which all tiles and splits are worked on at once, if that takes less time than `least`.

    Args:
        load: of FEW_ROWS at most, which have a tile at least.
        keys: as `tile_keys` has them; each query sees all keys before its own.
        least: in blocks of the usual tile that a program reads.
    """
    most, of_block = num_programs // num_kv_heads, tile.keys * tile.group_size
    blocks = -(-keys // of_block)
    low, high = max(2 * tile.min_blocks, -(-int(blocks.sum()) // most)), int(blocks.max())
    if low >= high or tile.alone * tile.of_a_block * low + tile.of_a_tile + tile.of_the_join >= least:
        return None
    while low < high:
        size = (low + high) // 2
        if int((-(-keys // (size * of_block))).sum()) > most:
            low = size + 1
        else:
            high = size
    splits = -(-keys // (low * of_block))
    if not 2 <= splits.max() <= _MOST_SPLITS:
        return None
    of_split = np.where(splits > 1, splits, 0)
    used = np.repeat(np.broadcast_to(load.used, load.tiles.shape), load.tiles)
    of_a_block = tile.block_time(int(splits.sum()) * num_kv_heads, num_programs)
    computed = of_a_block * int((-(-blocks // splits)).max()) + tile.of_a_tile
    of_rows = int(blocks[load.tiles[load.tiles > 0].cumsum() - 1].sum())  # the last tile of each sees all keys
    read = read_time(of_rows, int(blocks.sum()), num_kv_heads, num_programs, tile)
    joined = tile.of_the_join + tile.of_all_splits * float(of_split @ used) * num_kv_heads / num_programs
    taken = max(computed, read) + joined
    return TileSplits(low, int(of_split.sum()), taken) if taken < least else None

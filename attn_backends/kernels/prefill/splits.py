"""When prefill splits keys: where its tiles leave multiprocessors idle, and what the splits need of a workspace.

A launch is told a target, how many splits there may be of all tiles and KV heads, and of how many tiles none are. How
long a split is follows on the device from the rows' lengths there (see `list_kernel.list_kernel`), and so it does
here: `num_splits` is the rule for both. Whatever the lengths are, no more tiles' splits than the target need a slot,
and a launch that is captured once suits all lengths that come. `tile_splits` has another rule, of splits whose length
the host says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.prefill.split_tiles import OF_A_TILE, SLOT_QUERIES, SplitTile
from attn_backends.spec import AttentionSpec

FEW_ROWS = 64  # whose tiles a list may have in the order of their own lengths: one program looks at all at once
SIZES = (8, 9, 10, 12, 16)  # of a split at most, in eighths of an even share
_EIGHTHS = np.array(SIZES)
_WAVES = 2  # splits for each program at most
_QUARTERS = (4 * _WAVES, 4, 3, 2, 1)  # of the number of programs, that are tried: of ways alike the last wins
_OF_A_LAUNCH = 6.0  # what decodes take at least that run behind
# Part of the time, below which nothing is split, of short and of long ones; and how long is long.
_LEAST_SAVED, _LEAST_SAVED_OF_LONG, _LONG = 0.1, 0.05, 200.0


class PrefillSplits(NamedTuple):
    """How a step's prefill, whose longest rows' tiles come first, is split."""

    target: int  # splits of all tiles and KV heads at most; 0: none is split
    tile: SplitTile  # of the kernel that this is for: another one splits nothing
    num_whole: int = 0  # tiles of a KV head that come first and are whole
    num_kv_heads: int = 0  # of a launch, if a layer's take several; 0: all
    by_length: bool = False  # tiles of all rows are in the order of the keys that they see; of many rows they are not
    split_blocks: int = 0  # of a split at most, of FEW_ROWS' tiles by their own lengths; 0: none of these is split

    @property
    def is_of_all(self) -> bool:
        """Whether any tile may be split."""
        return self.target > 0 and not self.num_whole


class TileLoad(NamedTuple):
    """What the tiles of some rows read, for one KV head."""

    tiles: NDArray[np.int64]  # [rows]
    blocks: NDArray[np.int64]  # [rows], of the widest of a row's tiles, or a few more
    used: NDArray[np.floating[Any]] | float = 1.0  # [rows], the part of a tile's queries that exist

    @staticmethod
    def of(spec: AttentionSpec, tile: SplitTile, query_lens: IntArray, seq_lens: IntArray) -> TileLoad:
        """Args: query_lens, seq_lens: [rows], or upper bounds of the latter."""
        queries, keys = query_lens.astype(np.int64), seq_lens.astype(np.int64)
        left = keys if spec.window_left < 0 else np.minimum(keys, spec.window_left)
        left = left if spec.chunk_size is None else np.minimum(left, spec.chunk_size)
        reach = left + tile.tokens + (0 if spec.causal else queries)
        tiles = tile.num_tiles(query_lens)
        used = queries * spec.group_size / (np.maximum(tiles, 1) * tile.rows)
        return TileLoad(tiles, -(-np.minimum(keys, reach) // tile.keys), used)


def reading_time(load: TileLoad, num_kv_heads: int, num_programs: int, tile: SplitTile) -> float:
    """What it takes at least to read all keys: from memory once for each row, and from the L2 for a row's other
    tiles."""
    if not tile.of_a_read:
        return 0.0
    first, all_read = int(np.minimum(load.tiles, 1) @ load.blocks), int(load.tiles @ load.blocks)
    return read_time(first, all_read, num_kv_heads, num_programs, tile)


def read_time(first: int, all_read: int, num_kv_heads: int, num_programs: int, tile: SplitTile) -> float:
    """The same of so many blocks of a KV head, the first ones from memory."""
    return (tile.of_a_read * first + tile.of_another * (all_read - first)) * num_kv_heads / num_programs


def busy_time(load: TileLoad, num_kv_heads: int, num_programs: int, tile: SplitTile) -> float:
    """What all blocks take where all programs are as long busy."""
    even = tile.of_a_block * int(load.tiles @ load.blocks) * num_kv_heads / num_programs
    return max(even, reading_time(load, num_kv_heads, num_programs, tile))


def most_tile_splits(num_programs: int) -> int:
    """Number of splits of all tiles and KV heads that a launch can have."""
    return _WAVES * num_programs


def most_queries(num_sms: int) -> int:
    """Number of queries of all splits that a workspace has room for."""
    return most_tile_splits(num_sms) * SLOT_QUERIES


def num_splits(load: TileLoad, num_kv_heads: int, target: int, min_blocks: int) -> NDArray[np.int64]:
    """Number of splits of each row's tiles, [rows], over all rows, tiles and KV heads no more than the target.

    They are of one size at most, the first of these with which that holds: what the target gives if every tile could be
    cut anywhere, up to twice as much. With twice as much it does: a row that is longer has no more splits of that size,
    begun ones included, than of half of it.
    """
    splits: NDArray[np.int64] = _num_splits(load, num_kv_heads, np.array([target]), min_blocks)[0]
    return splits


def _num_splits(load: TileLoad, num_kv_heads: int, targets: NDArray[np.int64], min_blocks: int) -> Any:
    """`num_splits` of several targets at once, [targets, rows]."""
    even = np.maximum(min_blocks, -(-int(load.tiles @ load.blocks) * num_kv_heads // targets))
    sizes = -(-even[:, None] * _EIGHTHS // 8)
    most = np.maximum(load.blocks // min_blocks, 1)
    splits = np.maximum(np.minimum(-(-load.blocks // sizes[:, :, None]), most), 1)  # [targets, sizes, rows]
    fits = (splits * (splits > 1)) @ load.tiles * num_kv_heads <= targets[:, None]
    first = np.where(fits.any(1), fits.argmax(1), len(SIZES) - 1)
    return splits[np.arange(len(targets)), first]


def split_target(
    load: TileLoad, num_kv_heads: int, num_programs: int, tile: SplitTile, decodes: float = 0.0
) -> tuple[int, float]:
    """The target with which rows take the least time, and that time, with the decodes'; 0: nothing is split.

    Args:
        decodes: what the step's decodes take, as times here. They run beside a prefill whose tiles are whole, and
            behind one whose keys are split.
    """
    all_busy = busy_time(load, num_kv_heads, num_programs, tile) + decodes
    best, least = 0, least_time(load, num_kv_heads, num_programs, tile, all_busy)
    if all_busy + tile.of_the_join >= least:
        return best, 0.0
    targets = tried_targets(num_programs)
    of_each = _num_splits(load, num_kv_heads, np.array(targets), tile.min_blocks)
    times = _split_times(load, num_kv_heads, num_programs, of_each, tile) + serial_time(decodes)
    has_splits = ((of_each > 1) & (load.tiles > 0)).any(1)
    for target, taken, is_split in zip(targets, times.tolist(), has_splits.tolist(), strict=True):
        if is_split and taken <= least:
            best, least = target, taken
    return best, least if best else 0.0


def least_time(load: TileLoad, num_kv_heads: int, num_programs: int, tile: SplitTile, all_busy: float) -> float:
    """The time beneath which keys are split: some less than whole rows take, which is `all_busy` at least."""
    of_whole = max(_whole_time(load, num_kv_heads, num_programs, tile), all_busy)
    least_saved = max(_LEAST_SAVED_OF_LONG, _LEAST_SAVED * min(1.0, _LONG / 2 / of_whole)) if of_whole else 0.0
    return (1 - least_saved) * of_whole


def tried_targets(num_programs: int) -> list[int]:
    """Numbers of splits of all tiles and KV heads, of which the one serves with which rows take the least time."""
    return [max(1, num_programs * quarters // 4) for quarters in _QUARTERS]


def serial_time(decodes: float) -> float:
    """What decodes take behind a prefill, where beside it they take so long."""
    return max(decodes, _OF_A_LAUNCH) if decodes else 0.0


def time_of(load: TileLoad, num_kv_heads: int, num_programs: int, target: int, tile: SplitTile) -> float:
    """What rows take with a target, in blocks of the usual tile that a program reads; 0 is that of whole rows."""
    if not target:
        whole = _whole_time(load, num_kv_heads, num_programs, tile)
        return max(whole, reading_time(load, num_kv_heads, num_programs, tile))
    splits = num_splits(load, num_kv_heads, target, tile.min_blocks)
    return split_time(load, num_kv_heads, num_programs, splits, tile)


def _whole_time(load: TileLoad, num_kv_heads: int, num_programs: int, tile: SplitTile) -> float:
    """What whole rows take, but for reading."""
    of_a_block = tile.block_time(int(load.tiles.sum()) * num_kv_heads, num_programs)
    return whole_time(load, num_kv_heads, num_programs, tile.of_a_tile, of_a_block)


def whole_time(
    load: TileLoad, num_kv_heads: int, num_programs: int, of_a_tile: float = OF_A_TILE, of_a_block: float = 1.0
) -> float:
    """What rows take whose keys are not split, with what a tile takes beside its blocks."""
    return _longest(of_a_block * load.blocks + of_a_tile, load.tiles * num_kv_heads, num_programs)


def split_time(
    load: TileLoad, num_kv_heads: int, num_programs: int, splits: NDArray[np.int64], tile: SplitTile
) -> float:
    """What rows take in so many splits each, with their join."""
    return float(_split_times(load, num_kv_heads, num_programs, splits[None], tile)[0])


def _split_times(load: TileLoad, num_kv_heads: int, num_programs: int, splits: Any, tile: SplitTile) -> Any:
    """`split_time` of several [ways, rows] at once."""
    counts = load.tiles * num_kv_heads * splits
    num_items = counts.sum(1)
    of_a_block = np.where(num_items * tile.beside <= num_programs, tile.alone, 1.0) * tile.of_a_block
    size = of_a_block[:, None] * -(-load.blocks // splits) + tile.of_a_tile
    if size.shape[1] > 1:  # the longest are taken first, as `_longest` has it, which is sooner done for one way
        order = np.arange(len(size))[:, None], np.argsort(-size, 1)
        longest = (-(-counts[order].cumsum(1) // num_programs) * size[order]).max(1)
    else:
        longest = (-(-counts // num_programs) * size).sum(1)
    all_busy = (size * counts).sum(1) / num_programs
    # Whole tiles come behind all splits, and may be longer: the longest begins once so many rounds of these are over.
    split = np.where(splits > 1, counts, 0)
    rounds = split.sum(1) // num_programs
    begins = rounds * (size * split).sum(1) / np.maximum(split.sum(1), 1)
    longest = np.maximum(longest, begins + np.where((splits == 1) & (counts > 0), size, 0).max(1, initial=0))
    joined = (counts * load.used * (splits > 1)).sum(1) / num_programs
    read = reading_time(load, num_kv_heads, num_programs, tile)
    return np.maximum(np.maximum(longest, all_busy), read) + tile.of_the_join + tile.of_all_splits * joined


def _longest(size: NDArray[np.floating[Any]], count: NDArray[np.int64], num_programs: int) -> float:
    """What the program takes that takes longest, where the longest of so many of each size are taken first. Of the few
    sizes that there are Python's own numbers are sooner worked out than arrays."""
    counts: dict[float, int] = {}
    for each, number in zip(size.tolist(), count.tolist(), strict=True):
        counts[each] = counts.get(each, 0) + number
    longest = all_taken = 0.0
    taken = 0
    for each in sorted(counts, reverse=True):
        taken += counts[each]
        longest = max(longest, -(-taken // num_programs) * each)  # one has so many of those that are as long as this
        all_taken += each * counts[each]
    return max(longest, all_taken / num_programs)

"""Prefill's tiles in waves, as many as a GPU works on at a time: when a last one that leaves programs idle has its keys
split, and when the longest rows, or the longest tiles of all rows, are to come first.

All are by the list that `list_kernel.list_kernel` makes. As measured at tuning seeds 123 to 132 and 200 to 207.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_backends.kernels.prefill.split_tiles import OF_A_TILE, SplitTile
from attn_backends.kernels.prefill.splits import (
    FEW_ROWS,
    TileLoad,
    most_tile_splits,
    num_splits,
    serial_time,
    split_time,
)
from attn_backends.spec import AttentionSpec

_LEAST_OF_A_WAVE = 0.045  # part of the time, below which a last wave is not split, and rows come as they are
_MOST_WAVES = 22  # of whole tiles, behind which a last one that leaves multiprocessors idle costs little
_MOST_IN_ORDER = 32  # waves of tiles that are ordered: of more the host works it out for long, and little is gained
_LEAST_IDLE = 0.15  # part of the time, above which sections of heads leave programs idle: at tuning seeds 380 to 469
_MOST_BY_LENGTH = 2048  # tiles of a KV head that are sorted for it
_SHORT = 8  # blocks of a tile in the mean, up to which one is sooner counted than looked up in a list


class _Waves:
    """Tiles in the order in which they are listed: those that fill all programs some times over, and the rest.

    Args:
        step: blocks that a row's tile has less than the next one's.
    """

    def __init__(self, load: TileLoad, num_kv_heads: int, num_programs: int, step: float, tile: SplitTile) -> None:
        order = np.argsort(-load.blocks, kind="stable")
        order = order[load.tiles[order] > 0]
        tiles, blocks = load.tiles[order], load.blocks[order]
        self._num_kv_heads, self._num_programs = num_kv_heads, num_programs
        self._of_each, self._step, self._tile = num_kv_heads / num_programs, step, tile
        self._before, self._blocks = np.cumsum(tiles) - tiles, blocks
        self._shortest = np.minimum.accumulate(blocks - step * np.maximum(tiles - 1, 0))  # of this and longer rows
        count = int(tiles.sum())
        self.count = count * self._of_each  # of waves
        self.num_whole = count * num_kv_heads // num_programs * num_programs // num_kv_heads  # tiles of a KV head
        whole = np.clip(self.num_whole - self._before, 0, tiles)
        used = np.broadcast_to(load.used, load.tiles.shape)[order]
        self.rest = TileLoad(tiles - whole, blocks, used)
        self.whole_taken = self._taken(whole, blocks - step * np.maximum(whole - 1, 0) / 2)
        self.rest_taken = self._taken(self.rest.tiles, blocks - step * (whole + np.maximum(tiles - whole - 1, 0) / 2))
        self._num_tiles, self._num_rest = count, count - self.num_whole

    def _taken(self, tiles: NDArray[np.int64], blocks: NDArray[np.floating[Any]]) -> float:
        """What all programs take that work as long as each other."""
        return float(tiles @ self._time(blocks)) * self._of_each

    def tile(self, nth: int) -> float:
        """What the nth tile of a KV head takes."""
        row = int(np.searchsorted(self._before, nth, side="right")) - 1
        blocks = float(self._blocks[row]) - self._step * (nth - int(self._before[row]))
        return float(self._time(blocks))

    def _in_rounds(self) -> float:
        """What they take where some program has one tile more than so many: each is as long as the shortest of these at
        least. Of the longest row, whose tiles come by length, that one begins once all programs have worked off what is
        in front, but for the second of a program, which is behind the shortest."""
        rounds = np.arange(1, min(int(self.count), _MOST_IN_ORDER) + 1)
        items = rounds * self._num_programs
        nth = items // self._num_kv_heads  # tile, some head's of which is that one
        rounds, items, nth = (each[nth < self._num_tiles] for each in (rounds, items, nth))
        if not len(nth):
            return 0.0
        row = np.searchsorted(self._before, nth, side="right") - 1
        blocks = self._blocks[row] - self._step * (nth - self._before[row])
        shortest = np.where(row > 0, np.minimum(blocks, self._shortest[row - 1]), blocks)
        in_rounds = (rounds + 1) * self._time(shortest)
        of_longest = self._time(blocks)
        in_front = nth * self._time(self._blocks[0] - self._step * (nth - 1) / 2) * self._of_each
        in_front += (items - nth * self._num_kv_heads) * of_longest / self._num_programs
        return float(np.where((row == 0) & (rounds > 1), in_front + of_longest, in_rounds).max())

    def _time(self, blocks: Any) -> Any:
        return _time_of_tiles(self._tile, blocks)

    def whole_time(self) -> float:
        """What all take where none is split: each of the rest behind one of the shortest of those before."""
        longest, even = max(self.tile(0), self._in_rounds()), self.whole_taken + self.rest_taken
        if not (self._num_rest and self.num_whole):
            return max(longest, even)
        if self.count < 2:
            last, end = self.num_whole - 1, self.num_whole + self._num_rest - 1
            pairs = self.tile(last) + self.tile(last + 1), self.tile(max(last + 1 - self._num_rest, 0)) + self.tile(end)
            return max(longest, even, *pairs)
        idle = -self.count % 1.0
        return max(longest, even + idle * self.rest_taken / (self._num_rest * self._of_each))


def blocks_between(spec: AttentionSpec, tile: SplitTile) -> float:
    """Blocks that a row's tile has less than the next one's, where no window hides those before it."""
    return tile.rows / tile.group_size / tile.keys if spec.causal else 0.0


def in_waves_time(load: TileLoad, num_kv_heads: int, num_programs: int, tile: SplitTile, step: float) -> float:
    """What rows take whose tiles are whole, the longest first.

    Args:
        step: blocks that a row's tile has less than the next one's.
    """
    if not load.tiles.any():
        return 0.0
    return _Waves(load, num_kv_heads, num_programs, step, tile).whole_time()


def last_wave(
    load: TileLoad, num_kv_heads: int, num_programs: int, tile: SplitTile, step: float, decodes: float = 0.0,
    by_length: float | None = None,
) -> tuple[int, int]:  # fmt: skip
    """How many tiles of a KV head are whole, and the target for the splits of those behind them, which would leave
    programs idle; two 0 where it takes no less time.

    Args:
        step: blocks that a row's tile has less than the next one's.
        decodes: as of `split_target`.
        by_length: what whole tiles take in the order of their own lengths, if that is theirs; None: they are by rows.
    """
    if not num_programs <= int(load.tiles.sum()) * num_kv_heads < _MOST_WAVES * num_programs:
        return 0, 0
    waves = _Waves(load, num_kv_heads, num_programs, step, tile)
    all_busy = waves.whole_taken + waves.rest_taken + decodes
    whole = waves.whole_time() if by_length is None else min(waves.whole_time(), by_length)
    best, least = (0, 0), (1 - _LEAST_OF_A_WAVE) * max(whole, all_busy)
    if not waves.rest.tiles.any() or all_busy + tile.of_the_join >= least:
        return best
    for target in range(num_programs, most_tile_splits(num_programs) + 1, num_programs):
        splits = num_splits(waves.rest, num_kv_heads, target, tile.min_blocks)
        rest_taken = split_time(waves.rest, num_kv_heads, num_programs, splits, tile)
        taken = max(waves.tile(0), waves.whole_taken + rest_taken) + serial_time(decodes)
        if taken < least and (splits[waves.rest.tiles > 0] > 1).any():
            best, least = (waves.num_whole, target), taken
    return best


def tile_times(load: TileLoad, step: float, tile: SplitTile) -> NDArray[np.floating[Any]]:
    """What each tile takes, row by row, of a row the last one first."""
    before = np.cumsum(load.tiles) - load.tiles
    nth = np.arange(int(load.tiles.sum())) - np.repeat(before, load.tiles)
    times: NDArray[np.floating[Any]] = _time_of_tiles(tile, np.repeat(load.blocks, load.tiles) - step * nth)
    return times


def _time_of_tiles(tile: SplitTile, blocks: Any) -> Any:
    """What tiles of so many blocks take, of which each has one at least."""
    return tile.of_a_block * np.maximum(blocks, 1.0) + tile.of_a_tile


def by_length_time(times: NDArray[np.floating[Any]], num_kv_heads: int, num_programs: int) -> float:
    """What tiles of a KV head that take such times take for all heads, the longest first."""
    times = np.sort(times)[::-1]
    wave = max(1, num_programs // num_kv_heads)
    even, later = float(times.sum()) * num_kv_heads / num_programs, times[wave:]
    if not len(later):
        return max(float(times[0]), even)
    if len(later) <= wave:  # each behind one of the shortest of those before
        return max(float(times[0]), even, float((later + times[wave - 1 :: -1][: len(later)]).max()))
    return max(float(times[0]), even + float(times[-1]) / 2)


def faster_by_length(
    load: TileLoad, num_kv_heads: int, num_programs: int, tile: SplitTile, step: float
) -> float | None:
    """What tiles that are whole take in the order of their own lengths, if that is less than with the last rows first,
    as they come else; None: it is not. Nor is it for short ones, which gain more where those of a row, which read the
    same keys, are side by side.

    Args:
        step: as of `last_wave`.
    """
    is_some_waves = num_programs <= int(load.tiles.sum()) * num_kv_heads < _MOST_IN_ORDER * num_programs
    may_be_ordered = step > 0 and len(load.tiles) <= FEW_ROWS and int((load.tiles > 0).sum()) > 1
    if not (is_some_waves and may_be_ordered):
        return None
    load = TileLoad(load.tiles[::-1], load.blocks[::-1])
    times = tile_times(load, step, tile)
    # One begins once all programs have worked off what is in front of it.
    as_they_come = float(((np.cumsum(times) - times) * num_kv_heads / num_programs + times).max())
    is_short = float(times.mean()) <= tile.of_a_block * _SHORT + tile.of_a_tile
    by_length = by_length_time(times, num_kv_heads, num_programs)
    return None if is_short or by_length >= (1 - _LEAST_OF_A_WAVE) * as_they_come else by_length


def leaves_idle_in_sections(
    load: TileLoad, num_kv_heads: int, num_programs: int, section: int, tile: SplitTile, step: float
) -> bool:  # fmt: skip
    """Whether tiles that are whole leave programs idle for longer as they come else than in the order of their lengths:
    one section of KV heads behind the other, so that the longest of the last one begin when nearly all others have
    ended.

    Args:
        section: KV heads.
        step: as of `last_wave`.
    """
    of_each = num_kv_heads / num_programs
    whole = float(load.tiles @ _time_of_tiles(tile, load.blocks - step * np.maximum(load.tiles - 1, 0) / 2)) * of_each
    count = int(load.tiles.sum())
    if count > _MOST_BY_LENGTH or count * num_kv_heads < num_programs:
        return False
    if _time_of_tiles(tile, float(load.blocks.max())) <= _LEAST_IDLE * whole:
        return False
    times = tile_times(TileLoad(load.tiles[::-1], load.blocks[::-1]), step, tile)
    of_last = num_kv_heads - (num_kv_heads - 1) // section * section
    by_length = np.sort(times)[::-1]  # of which the last one to begin is as long as the shortest at least
    in_order = max(_idle_time(by_length, of_each), float(by_length[-1]), float(by_length[0]) - whole)
    return _idle_time(times, of_last / num_programs) - in_order > _LEAST_IDLE * whole


def _idle_time(times: NDArray[np.floating[Any]], of_each: float) -> float:
    """For how long programs are idle at most, which work through tiles in this order: each tile begins once all have
    worked off what is in front of it.

    Args:
        times: of tiles of a KV head.
        of_each: KV heads whose tiles come at the end, divided by the number of programs.
    """
    return float((times - np.cumsum(times[::-1])[::-1] * of_each).max())


def is_faster_in_order(load: TileLoad, num_kv_heads: int, num_programs: int, step: float) -> bool:
    """Whether tiles that are whole take less time with the longest rows first than with the last rows first, as they
    come else: whether the last programs are busy with long tiles then. A list of one KV head's tiles is itself slower:
    there they have to be longer than the last ones of the list.

    Args:
        step: as of `last_wave`.
    """
    has_tiles = load.tiles > 0
    load = TileLoad(load.tiles[has_tiles], load.blocks[has_tiles])
    num_tiles, wave = int(load.tiles.sum()), num_programs / num_kv_heads
    if len(load.blocks) < 2 or not wave <= num_tiles < _MOST_IN_ORDER * wave:
        return False
    shortest = np.maximum(load.blocks - step * load.tiles, 0)
    mean, least = float(load.tiles @ (load.blocks + shortest)) / 2 / num_tiles, float(shortest.min())
    if num_kv_heads == 1:
        order = np.argsort(load.blocks, kind="stable")
        least = _longest_of(TileLoad(load.tiles[order], load.blocks[order]), wave, step)
    saved = (_longest_of(load, wave, step) - least) / 2
    return mean > _SHORT and saved > _LEAST_OF_A_WAVE * (mean + OF_A_TILE) * num_tiles / wave


def _longest_of(load: TileLoad, count: float, step: float) -> float:
    """Blocks of the longest of the first so many tiles; of a row the first ones are the shortest."""
    before = np.cumsum(load.tiles) - load.tiles
    longest = load.blocks - step * np.maximum(load.tiles - (count - before), 0)
    return float(longest[before < count].max())

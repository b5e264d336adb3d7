"""Which rows the portable prefill kernel serves in place of the one for Hopper: those that see few keys, for which that
one's first tile takes longer than all of them do here."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from attn_backends.backends.triton.rules import reads_pages_on_hopper
from attn_backends.backends.triton.tuning import TritonOptions
from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.launch import num_multiprocessors
from attn_backends.kernels.prefill.faster_tile import mean_keys, seen_by_tiles
from attn_backends.kernels.prefill.launch import HOPPER_ROWS, num_hopper_tiles
from attn_backends.kernels.prefill.tiles import ShortTile, count_tiles, half_tile
from attn_backends.spec import AttentionSpec, KVCacheSpec

_FEW_ROWS, _MANY_ROWS = 16, 64  # queries of a tile
SHORT_TILES = (ShortTile(_MANY_ROWS, 64, 4, 2), ShortTile(_MANY_ROWS, 32, 4, 3))
_TOGETHER = 3  # programs of such a tile that a multiprocessor holds, about
_NARROW, _MIDDLE = 64, 128  # head dims up to which tiles of long blocks are the faster ones: of many tiles, and of few
# Keys that tiles may see, by the widest head dim: the longest where all begin at once, and the mean of more tiles;
# twice as many in the mean where no row has more queries than one of these, which is half of one for Hopper. Beside
# the kernel for Hopper with tiles of half the size more tiles never are faster. As measured at tuning seeds 24 to 26,
# 35 to 38, and 100 to 102, and beside half the size at 150 to 161, without decodes; of the widest heads at 435 to 469,
# where rows of no more than a block have tiles of their own.
_FEW_KEYS = {64: (512, 400), 128: (256, 72), 256: (128, 128)}
_FEW_BESIDE_HALF = {64: (80, 0), 128: (64, 0), 256: (32, 0)}
_FEW_OF_8_BITS = {64: (512, 400), 128: (640, 72), 256: (256, 128)}  # which that one reads more slowly: at 197 and 198
_FEWEST = 32  # keys, of one short block


class _OneBlock(NamedTuple):
    """A tile whose block holds all keys of a row, and where it is the fastest."""

    tile: ShortTile
    dims: range  # of heads
    programs: float  # of a multiprocessor, up to which it is
    fewest: int = 1  # keys


def _block(rows: int, keys: int, dims: range, programs: float, fewest: int = 1, warps: int = 4) -> _OneBlock:
    return _OneBlock(ShortTile(rows, keys, warps, 1, is_one_block=True), dims, programs, fewest)


_ALL_DIMS, _NARROW_DIMS, _MIDDLE_DIMS = range(1, 257), range(1, _NARROW + 1), range(_NARROW + 1, _MIDDLE + 1)
# The first one that suits serves. Where programs are few, those of 16 queries are more, and sooner done. As measured at
# 124 shapes of tuning seeds 435 to 469, and 34 over 8 bits, of which the kernel for Hopper makes 16 first.
_ONE_BLOCK = (
    _block(_FEW_ROWS, 32, _NARROW_DIMS, 1.0),
    _block(_FEW_ROWS, 32, range(_NARROW + 1, 257), 2.0),
    _block(_MANY_ROWS, 32, _ALL_DIMS, math.inf),
    _block(_FEW_ROWS, 64, _ALL_DIMS, 1.6),
    _block(_MANY_ROWS, 64, _NARROW_DIMS, 8.0),
    _block(_MANY_ROWS, 64, range(_NARROW + 1, 193), 2.5),
    _block(_MANY_ROWS, 64, range(193, 257), 1.0),
    _block(_FEW_ROWS, 128, range(1, _MIDDLE + 1), 1.0, 65),
    _block(_FEW_ROWS, 128, range(_MIDDLE + 1, 257), 0.75, 65, warps=8),
    _block(_MANY_ROWS, 128, _NARROW_DIMS, 2.5, 65),
)
_ONE_BLOCK_OF_8_BITS = (
    *_ONE_BLOCK[:3],
    _block(_FEW_ROWS, 64, _ALL_DIMS, 2.0),
    _block(_MANY_ROWS, 64, _ALL_DIMS, 8.0),
    _block(_FEW_ROWS, 128, _ALL_DIMS, 2.0, 65),
    _block(_MANY_ROWS, 128, _NARROW_DIMS, 4.0, 65),
    _block(_MANY_ROWS, 128, _MIDDLE_DIMS, 1.5, 65),
)
# Tiles of few queries to one of many, up to which they serve however many they are, rows of up to so many keys.
_SPARSE, _SPARSE_KEYS = 1.3, 64
_MOST_WITH_DECODES = 4.0  # programs of a multiprocessor


@lru_cache(maxsize=64)
def _of_one_block(spec: AttentionSpec) -> tuple[_OneBlock, ...]:
    table = _ONE_BLOCK if spec.cache_dtype is spec.dtype else _ONE_BLOCK_OF_8_BITS
    return tuple(one for one in table if spec.head_dim in one.dims)


def _one_block(
    spec: AttentionSpec, query_lens: IntArray, seq_lens: IntArray, num_sms: int, most_programs: float
) -> ShortTile | None:  # fmt: skip
    """The tile whose block holds all keys of a row, where it is the fastest; with so many programs of a multiprocessor
    at most."""

    def programs_of(rows: int) -> float:
        return int(count_tiles(query_lens, spec.group_size, rows).sum()) * spec.num_kv_heads / num_sms

    longest = int(seq_lens.max(initial=0))
    can_be_sparse = longest <= _SPARSE_KEYS and spec.head_dim <= _MIDDLE
    for tile, _, most, fewest in _of_one_block(spec):
        if fewest <= longest <= tile.keys and (count := programs_of(tile.rows)) <= most_programs:
            is_sparse = can_be_sparse and tile.rows == _FEW_ROWS and count <= _SPARSE * programs_of(_MANY_ROWS)
            if count <= most or is_sparse:
                return tile
    return None


def short_tiles(
    spec: AttentionSpec, cache: KVCacheSpec, options: TritonOptions | None, device: torch.device
) -> tuple[ShortTile, ...]:
    """The portable kernel's tiles for rows that see few keys: where all begin at once, for more of them, and those
    whose block holds all keys. None where it serves all prefills anyway."""
    has_tile = options is not None and options.prompt_tile is not None
    if has_tile or not reads_pages_on_hopper(spec, cache, options, device):
        return ()
    usual = SHORT_TILES[spec.head_dim > _MIDDLE], SHORT_TILES[spec.head_dim > _NARROW]
    return *usual, *(one.tile for one in _of_one_block(spec))


def short_tile(
    spec: AttentionSpec, tiles: tuple[ShortTile, ...], query_lens: IntArray, seq_lens: IntArray, device: torch.device,
    has_decodes: bool = False, for_graph: bool = False,
) -> ShortTile | None:  # fmt: skip
    """The one of `short_tiles` for rows that see so few keys that it is faster than the kernel for Hopper, of which a
    multiprocessor works on one tile at a time, and waits for its first keys; None: it is not, as where one row would
    take much longer than all together.

    Args:
        query_lens, seq_lens: [rows], or upper bounds of the latter.
        has_decodes: some rows are of few tokens, and would else run beside the kernel for Hopper: only where all begin
            at once, or are not many of one block, are they as fast in this one.
        for_graph: the kernel for Hopper has tiles of half the size for rows of few queries alone then.
    """
    if not tiles:
        return None
    num_sms = num_multiprocessors(device)
    if one := _one_block(spec, query_lens, seq_lens, num_sms, _MOST_WITH_DECODES if has_decodes else math.inf):
        return one
    most = int(seen_by_tiles(spec, seq_lens).max(initial=0))
    num_tiles = num_hopper_tiles(spec, query_lens)
    has_half = not (for_graph or has_decodes) and half_tile(spec) is not None
    few_keys = _FEW_BESIDE_HALF if has_half else _FEW_KEYS
    if spec.cache_dtype is not spec.dtype:
        few_keys = _FEW_OF_8_BITS
    longest, mean = next((few for head_dim, few in few_keys.items() if spec.head_dim <= head_dim), (0, 0))
    if int(num_tiles.sum()) * spec.num_kv_heads <= num_sms:
        return tiles[most <= _FEWEST] if most <= longest else None
    if has_decodes:
        return None
    keys = int(num_tiles @ mean_keys(spec, HOPPER_ROWS // spec.group_size, query_lens, seq_lens))
    even = keys * spec.num_kv_heads // (_TOGETHER * num_sms)  # of a program
    mean *= 2 if int(query_lens.max()) * spec.group_size <= tiles[1].rows else 1
    return tiles[1] if most <= max(2 * longest, even) and keys <= mean * int(num_tiles.sum()) else None

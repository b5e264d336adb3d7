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
from attn_backends.kernels.prefill.tiles import PrefillTile, count_tiles, half_tile
from attn_backends.spec import AttentionSpec, KVCacheSpec

SHORT_TILES = (PrefillTile(64, 64, 4, 2), PrefillTile(64, 32, 4, 3))
_TOGETHER = 3  # programs of such a tile that a multiprocessor holds, about
_NARROW, _MIDDLE = 64, 128  # head dims up to which tiles of long blocks are the faster ones: of many tiles, and of few
# Keys that tiles may see, by the widest head dim: the longest where all begin at once, and the mean of more tiles;
# twice as many in the mean where no row has more queries than one of these, which is half of one for Hopper. Beside
# the kernel for Hopper with tiles of half the size more tiles never are faster. As measured at tuning seeds 24 to 26,
# 35 to 38, and 100 to 102, and beside half the size at 150 to 161, without decodes.
_FEW_KEYS = {64: (512, 400), 128: (256, 72), 256: (128, 128)}
_FEW_BESIDE_HALF = {64: (80, 0), 128: (64, 0), 256: (64, 32)}
_FEW_OF_8_BITS = {64: (512, 400), 128: (640, 72), 256: (256, 128)}  # which that one reads more slowly: at 197 and 198
_FEWEST = 32  # keys, of one short block


class _OneBlock(NamedTuple):
    """A tile whose block holds all keys of a row, and where it is the fastest."""

    tile: PrefillTile
    programs: float  # of a multiprocessor, up to which it is
    dims: range  # of heads
    fewest: int = 1  # keys


# The first one that suits serves. Where programs are few, those of 16 queries are more, and sooner done. As measured at
# 45 shapes of tuning seeds 296 to 329, over 16 bits.
_ONE_BLOCK = (
    _OneBlock(PrefillTile(16, 32, 4, 1), 2.5, range(_NARROW + 1, 257)),
    _OneBlock(PrefillTile(64, 32, 4, 1), 4.0, range(1, 257)),
    _OneBlock(PrefillTile(16, 64, 4, 2), 1.3, range(1, 257)),
    _OneBlock(PrefillTile(16, 128, 4, 1), 0.75, range(1, _MIDDLE + 1), 65),
    _OneBlock(PrefillTile(64, 128, 4, 1), 1.0, range(1, _NARROW + 1), 65),
)


@lru_cache(maxsize=64)
def _of_one_block(spec: AttentionSpec) -> tuple[_OneBlock, ...]:
    if spec.cache_dtype is not spec.dtype:
        return ()
    return tuple(one for one in _ONE_BLOCK if spec.head_dim in one.dims and spec.group_size <= one.tile.rows)


def _one_block(
    spec: AttentionSpec, query_lens: IntArray, seq_lens: IntArray, num_sms: int, most_programs: float
) -> PrefillTile | None:  # fmt: skip
    """The tile whose block holds all keys of a row, where it is the fastest; with so many programs of a multiprocessor
    at most."""
    longest = int(seq_lens.max(initial=0))
    for tile, programs, _, fewest in _of_one_block(spec):
        if fewest <= longest <= tile.keys:
            count = int(count_tiles(query_lens, spec.group_size, tile.rows).sum()) * spec.num_kv_heads
            if count <= min(programs, most_programs) * num_sms:
                return tile
    return None


def short_tiles(
    spec: AttentionSpec, cache: KVCacheSpec, options: TritonOptions | None, device: torch.device
) -> tuple[PrefillTile, ...]:
    """The portable kernel's tiles for rows that see few keys: where all begin at once, for more of them, and those
    whose block holds all keys. None where it serves all prefills anyway."""
    has_tile = options is not None and options.prompt_tile is not None
    if has_tile or not reads_pages_on_hopper(spec, cache, options, device):
        return ()
    usual = SHORT_TILES[spec.head_dim > _MIDDLE], SHORT_TILES[spec.head_dim > _NARROW]
    return *usual, *(one.tile for one in _of_one_block(spec))


def short_tile(
    spec: AttentionSpec, tiles: tuple[PrefillTile, ...], query_lens: IntArray, seq_lens: IntArray, device: torch.device,
    has_decodes: bool = False, for_graph: bool = False,
) -> PrefillTile | None:  # fmt: skip
    """The one of `short_tiles` for rows that see so few keys that it is faster than the kernel for Hopper, of which a
    multiprocessor works on one tile at a time, and waits for its first keys; None: it is not, as where one row would
    take much longer than all together.

    Args:
        query_lens, seq_lens: [rows], or upper bounds of the latter.
        has_decodes: some rows are of few tokens, and would else run beside the kernel for Hopper: only where all begin
            at once are they as fast in this one.
        for_graph: the kernel for Hopper has tiles of half the size for rows of few queries alone then.
    """
    if not tiles:
        return None
    num_sms = num_multiprocessors(device)
    if one := _one_block(spec, query_lens, seq_lens, num_sms, 1.0 if has_decodes else math.inf):
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

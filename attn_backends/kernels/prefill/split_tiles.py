"""What the prefill kernels read at a time, and how long that takes, from which splits and tiles follow."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.prefill.tiles import HopperTile, all_tiles, count_tiles, hopper_tiles, tile_tokens
from attn_backends.spec import AttentionSpec

SLOT_QUERIES = 128  # of the largest tile
LEAST_KEYS = 128  # of a split: fewer are not worth joining
# In blocks of a kernel's usual tile.
OF_A_TILE = 1.0  # what a tile, or a split of one, takes beside its blocks, where its kernel gives no other
OF_THE_JOIN = 3.0  # what the join takes, where its kernel gives no other


class SplitTile(NamedTuple):
    """What a kernel reads at a time."""

    group_size: int  # query heads of a KV head
    rows: int  # queries of a tile: query tokens times these heads
    keys: int  # of a block
    keys_alike: int = 0  # of a block of narrower heads that takes as long; 0: as many as it has
    beside: int = 0  # tiles that a multiprocessor works on at a time; 0: with as many queries as largest tiles have
    of_a_tile: float = OF_A_TILE
    of_a_block: float = 1.0  # what a block takes
    alone: float = 1.0  # the part of that where a tile has a multiprocessor to itself
    of_the_join: float = OF_THE_JOIN  # what the join takes at least
    of_all_splits: float = 0.0  # what it and storing splits take more, where each program has one of a full tile
    of_a_read: float = 0.0  # what reading a block from memory takes at least, where all programs read
    of_another: float = 0.0  # the same of one that another tile of its row reads too, from the L2

    @property
    def tokens(self) -> int:
        """Query tokens that a tile has queries of, at most."""
        return tile_tokens(self.rows, self.group_size)

    def num_tiles(self, query_lens: IntArray) -> NDArray[np.int64]:
        """Tiles of each row, for one KV head."""
        return count_tiles(query_lens, self.group_size, self.rows)

    def most_tiles(self, num_tokens: int, num_rows: int) -> int:
        """Most tiles that rows of so many query tokens in all can have."""
        return most_tiles(num_tokens * self.group_size, num_rows, self.rows)

    @property
    def min_blocks(self) -> int:
        """Blocks of a split at least."""
        return max(1, LEAST_KEYS // (self.keys_alike or self.keys))

    def num_programs(self, num_sms: int) -> int:
        """Number of tiles that a GPU works on at a time."""
        return num_sms * self.beside if self.beside else max(1, num_sms * SLOT_QUERIES // self.rows)

    def block_time(self, count: int, num_programs: int) -> float:
        """What a block takes where there are so many tiles and splits."""
        return self.of_a_block * (self.alone if count * self.beside <= num_programs else 1.0)


def most_tiles(num_queries: int, num_rows: int, tile_queries: int) -> int:
    """Most tiles that so many rows of so many queries in all can have (see `rows_of`); of one row, what it has."""
    return (num_queries + num_rows * (tile_queries - 1)) // tile_queries


# `of_a_read` and `of_another` of the usual tile, over 16 bits, by the same head dims: 4.1 and 9 TB/s, at which those of
# tuning seeds 291 to 294 come out that have a row's keys read once, and by many tiles.
_READS = ((0.94, 0.43), (1.28, 0.58), (1.26, 0.58), (1.35, 0.62))
_WIDE_BLOCK = 128  # keys of its blocks up to head dim 128; wider heads have as many products in a block
# `SplitTile` from `of_a_tile` on, in blocks of the usual tile: of that one, and of half the size. Of heads of up to 64,
# of up to 128, and of up to 192, as measured at tuning seeds 159 to 195, and of 256, at 237 to 241; what usual tiles
# take beside their blocks, but for up to 192, at 276 to 290.
_TIMES = (
    ((2.0, 1.0, 1.0, 2.0, 5.1), (0.7, 0.6, 0.85, 2.1, 4.0)),
    ((2.0, 1.0, 1.0, 1.8, 5.4), (1.0, 0.53, 0.8, 1.4, 4.8)),
    ((6.2, 1.0, 1.0, 3.0, 16.6), (2.1, 0.75, 1.0, 2.8, 7.1)),
    ((4.3, 1.0, 1.0, 2.6, 13.5), (1.8, 0.65, 1.0, 2.6, 7.5)),
)
# The same over 8 bits, from 34 shapes of tuning seed 197; what splits cost is what they cost of 16 bits by then. The
# smaller tile is counted as if two of its size were as fast as the usual one, whose second group of warps has nothing
# of few queries. Of heads of up to 64 divided by 1.66, which a block of 128 keys takes to one of 64 that they were
# measured with: by a chunk alone.
_TIMES_OF_8_BITS = (
    ((1.5, 1.0, 1.0, 1.2, 3.1), (1.5, 0.66, 1.0, 1.2, 3.1)),
    ((2.5, 1.0, 1.0, 1.8, 5.4), (2.5, 1.1, 1.0, 1.8, 5.4)),
    ((4.0, 1.0, 1.0, 3.0, 16.6), (4.0, 0.65, 1.0, 3.0, 7.1)),
    ((4.0, 1.0, 1.0, 3.0, 16.6), (4.0, 0.65, 1.0, 3.0, 7.1)),
)


def hopper_tile(spec: AttentionSpec, tile: HopperTile | None = None) -> SplitTile:
    """What the prefill kernel for Hopper reads at a time, by one of its tiles, the usual one if none is given."""
    # A tile may be of the layer over keys of 16 bits, which are made of its cache's.
    of_kind = all_tiles(spec) if tile is None else hopper_tiles(spec.head_dim, spec.head_dim_vo, tile.raw_stages > 0)
    usual = of_kind[0]
    return _hopper_tile(spec.head_dim, spec.head_dim_vo, spec.group_size, tile or usual, usual)


@lru_cache(maxsize=256)
def _hopper_tile(
    head_dim: int, head_dim_vo: int, group_size: int, tile: HopperTile, usual: HopperTile
) -> SplitTile:  # fmt: skip
    widths = 0 if head_dim <= 64 else 1 if head_dim_vo <= 128 else 2 if head_dim <= 192 else 3
    times = (_TIMES_OF_8_BITS if tile.raw_stages else _TIMES)[widths]
    share = 0.0 if tile.raw_stages else tile.keys * tile.beside / (usual.keys * usual.beside)
    of_a_read, of_another = (share * read for read in _READS[widths])
    return SplitTile(
        group_size, tile.rows, tile.keys, _WIDE_BLOCK, tile.beside, *times[tile.groups < usual.groups],
        of_a_read=of_a_read, of_another=of_another,
    )  # fmt: skip

"""Tiles of the prefill kernels: of the portable one for keys one behind the other, where no table has one that was
measured, and of the one for Hopper; and which KV heads they read at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.tiles import block_bytes, block_dims, fitted
from attn_backends.spec import AttentionSpec

MARGIN = 3 << 10  # bytes of a program, beside its queries and blocks
_L2_BYTES = 32 << 20  # that the keys and values of a section of heads may take
_LEAST_ROWS = 16  # of a tile, which a product takes at least
_WIDE = 256  # columns of values from which on four warps cannot hold their sums


def tile_tokens(num_queries: int, group_size: int) -> int:
    """Query tokens that a tile has queries of, at most: where it is no multiple of a token's, it begins and ends within
    one."""
    return num_queries // group_size if num_queries % group_size == 0 else (num_queries - 2) // group_size + 2


def count_tiles(query_lens: IntArray, group_size: int, tile_queries: int) -> NDArray[np.int64]:
    """Tiles of so many queries that each row has, for one KV head."""
    return -(-query_lens.astype(np.int64) * group_size // tile_queries)


@dataclass(frozen=True)
class PrefillTile:
    """How prefill is tiled: over pages, and over keys that lie one behind the other."""

    rows: int  # of a tile: query tokens times the query heads of a KV head
    keys: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        if self.rows < _LEAST_ROWS or self.rows & (self.rows - 1):
            raise ValueError(
                f"rows is {self.rows}, queries of a tile of prefill; give a power of two from {_LEAST_ROWS} on, as 64"
            )


@dataclass(frozen=True)
class ShortTile(PrefillTile):
    """The same of rows that see few keys."""

    is_one_block: bool = False  # a block holds all keys that a tile sees: they are asked for at once, and nothing loops


_HALF_OF_REGISTERS = 128  # of a multiprocessor, for each thread of a program of eight warps
GROUP_QUERIES = 64  # of a group of warps of the kernel for Hopper


class HopperTile(NamedTuple):
    """How prefill is tiled by the kernel for Hopper."""

    groups: int  # of warps that attend, 1 to 3
    keys: int  # of a block
    stages: int  # blocks of keys in shared memory, and of values if there are no more of these
    q_stages: int = 2  # tiles of queries there: this one and the next, where both fit
    beside: int = 1  # programs that a multiprocessor holds at a time, 1 or 2
    raw_stages: int = 0  # blocks of 8 bits in shared memory, of which 16 are made there; 0: the cache has 16
    value_stages: int = 0  # blocks of values in shared memory; 0: as many as of keys
    in_turns: bool = False  # two groups ask for products in turns

    @property
    def rows(self) -> int:
        """Query tokens times the query heads of a KV head."""
        return self.groups * GROUP_QUERIES

    @property
    def blocks_of_values(self) -> int:
        """In shared memory."""
        return self.value_stages or self.stages

    @property
    def most_registers(self) -> int | None:
        """Registers of a thread, with which these have room side by side; None: as many as it wants."""
        return _HALF_OF_REGISTERS if self.beside == 2 else None

    def tokens(self, group_size: int) -> int:
        """Query tokens that a tile has queries of, at most."""
        return tile_tokens(self.rows, group_size)


def hopper_tiles(head_dim: int, head_dim_vo: int, is_8_bit: bool = False) -> tuple[HopperTile, ...]:
    """The tiles of a layer's heads. The first is the usual one. The second is faster where tiles see few keys, and
    where rows have few queries: it has half the size, so that a multiprocessor works on two at a time, where these have
    room; of MLA's heads it has blocks of half the size instead. The third, of narrow heads, has one more group of
    warps, for many tiles that see many keys, and splits none. The first one of heads of 65 to 128 columns, and of more
    than 192, has room for one more block of values, which are asked for behind keys; groups of the former take turns.
    Over 8 bits the second has the largest blocks that have room, and two groups of the widest heads would have too few
    registers."""
    if is_8_bit:
        if head_dim <= 64:
            return HopperTile(2, 128, 2, raw_stages=4), HopperTile(1, 128, 2, raw_stages=3)
        if head_dim <= 128:
            return HopperTile(2, 64, 3, raw_stages=4), HopperTile(1, 128, 2, raw_stages=2)
        if head_dim_vo <= 192:
            return HopperTile(2, 64, 2, q_stages=1, raw_stages=2), HopperTile(1, 64, 2, raw_stages=2)
        return (HopperTile(1, 64, 2, q_stages=1, raw_stages=2),)
    if head_dim <= 64:
        return HopperTile(2, 128, 4), HopperTile(1, 64, 4, beside=2), HopperTile(3, 128, 4)
    if head_dim <= 128:
        return HopperTile(2, 128, 2, value_stages=3, in_turns=True), HopperTile(1, 64, 2, beside=2)
    if head_dim <= 192 and head_dim_vo <= 128:
        return HopperTile(2, 128, 2, q_stages=1), HopperTile(2, 64, 2)
    if head_dim <= 192:
        return HopperTile(2, 64, 2), HopperTile(1, 64, 2)
    return HopperTile(2, 64, 2, q_stages=1, value_stages=3), HopperTile(1, 64, 2)


def all_tiles(spec: AttentionSpec) -> tuple[HopperTile, ...]:
    """The tiles of a layer's heads over its cache."""
    return hopper_tiles(spec.head_dim, spec.head_dim_vo, spec.cache_dtype.itemsize < spec.dtype.itemsize)


def tiles_of(spec: AttentionSpec) -> tuple[HopperTile, ...]:
    """The tiles of `hopper_tiles` that hold a token's queries."""
    return tuple(tile for tile in all_tiles(spec) if spec.group_size <= tile.rows)


def half_tile(spec: AttentionSpec) -> HopperTile | None:
    """The one of half the size that holds a token's queries, if there is one."""
    return next((tile for tile in tiles_of(spec)[1:] if tile.groups == 1), None)


def varlen_tile(spec: AttentionSpec, smem_bytes: int) -> PrefillTile:
    """The largest of its kind whose blocks fit; a program can have `smem_bytes` bytes of shared memory."""
    dim, dim_vo = block_dims(spec)
    is_exact = spec.dtype is torch.float32  # products are of two parts
    query_bytes = (2 if is_exact else 1) * dim * spec.dtype.itemsize

    def need(tile: PrefillTile) -> int:
        return tile.rows * query_bytes + block_bytes(spec, tile.keys, tile.stages, dim + dim_vo) + MARGIN

    warps = 8 if dim_vo >= _WIDE else 4
    return fitted(PrefillTile(64, 32, warps, 2) if is_exact else PrefillTile(64, 64, warps, 3), need, smem_bytes)


def heads_in_l2(spec: AttentionSpec, max_seq_len: int, itemsize: int) -> int:
    """Number of KV heads of a row whose keys and values fit the L2 cache, or one."""
    return max(1, _L2_BYTES // (max(1, max_seq_len) * (spec.head_dim + spec.head_dim_vo) * itemsize))


def section_heads(spec: AttentionSpec, max_seq_len: int, itemsize: int, num_kv_heads: int) -> int:
    """KV heads of a section, whose tiles come behind those of the section before: as many as fit the L2 cache, or
    fewer, so that all sections have nearly as many. The longest tile of a last one of few heads would begin when the
    others end, and end alone.

    Args:
        max_seq_len, itemsize: as `heads_in_l2` takes them.
        num_kv_heads: of a launch.
    """
    num_sections = -(-num_kv_heads // heads_in_l2(spec, max_seq_len, itemsize))
    return -(-num_kv_heads // num_sections)

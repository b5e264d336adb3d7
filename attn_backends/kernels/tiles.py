"""Sizes of a kernel's tiles: what they take of a multiprocessor, and the nearest that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from attn_backends.kernels.launch import power_of_two
from attn_backends.spec import AttentionSpec

SWIZZLED = 64  # columns of 16 bits from which on shared memory holds them in the widest swizzle
SWIZZLED_FLOATS = 32  # the same of float32, and keys of a block: Hopper's products want such values by columns


class Tile(Protocol):
    """Sizes of a kernel's tile, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def keys(self) -> int: ...
    @property
    def stages(self) -> int: ...


TileT = TypeVar("TileT", bound=Tile)


def fitted(tile: TileT, need: Callable[[TileT], int], room: int) -> TileT:
    """The tile, or the nearest whose bytes fit: of fewer blocks under way, then of smaller ones, then of fewer rows.

    One that nothing helps comes back as small as can be: Triton says what it lacks.
    """
    stages = tile.stages
    while need(tile) > room:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > 16:
            tile = replace(tile, keys=tile.keys // 2, stages=stages)
        elif tile.stages > 1:
            tile = replace(tile, stages=1)
        elif getattr(tile, "rows", 0) > 16:
            tile = replace(tile, rows=tile.rows // 2)  # type: ignore[attr-defined]
        else:
            break
    return tile


def block_bytes(spec: AttentionSpec, keys: int, stages: int, dim: int) -> int:
    """Bytes of blocks of keys under way, `dim` wide in all; another dtype than the queries' is converted beside
    them."""
    converted = spec.dtype.itemsize if spec.cache_dtype is not spec.dtype else 0
    return keys * dim * (stages * spec.cache_dtype.itemsize + converted)


def padded(size: int) -> int:
    """A power of two, of at least 16: what a tile of a matrix unit can be."""
    return max(16, power_of_two(size))


def block_dims(spec: AttentionSpec) -> tuple[int, int]:
    """Columns of a block of keys, and of one of values.

    A narrow one is as wide as the other, up to 64. Rows of less than 128 bytes lie in shared memory in another swizzle
    than longer ones, and beside those ptxas 12.8, which Triton 3.6 and 3.7 bring, takes the address of values for a
    product on Hopper from a register that was not set. Blocks of float32 are as wide in bytes, whatever the layer has:
    values lie there by columns, which have a block's keys.
    """
    dim, dim_vo = padded(spec.head_dim), padded(spec.head_dim_vo)
    least = min(SWIZZLED, max(dim, dim_vo, SWIZZLED_FLOATS if spec.dtype is torch.float32 else 0))
    return max(dim, least), max(dim_vo, least)

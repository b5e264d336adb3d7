"""Sizes of a kernel's tiles: what they take of a multiprocessor, and the nearest that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

from attn_backends.kernels.launch import power_of_two
from attn_backends.spec import AttentionSpec


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

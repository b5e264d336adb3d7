"""TRITON_MLA's tiles by dtypes, queries a row, page size and number of rows: measured once and shipped as data.

`triton_tuned.json` is written by benchmarks/tune_triton_mla.py. What is not in it takes the nearest that is.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

from attn_backends.backends.mla.options import MLAOptions
from attn_backends.mla_spec import MLASpec
from attn_backends.spec import KVCacheSpec
from attn_backends.triton_split import block_bytes, fitted, padded

HOPPER_TILE = (64, 128)  # rows and keys of hopper_kernel.py, which not every Triton can import


@dataclass(frozen=True)
class LatentTile:
    """How decode is cut."""

    rows: int  # of a tile at most: query tokens times heads
    keys: int  # of a block
    warps: int
    stages: int  # blocks under way
    programs: int  # a multiprocessor, which the split aims at
    min_keys: int  # of an item: fewer are not worth joining

    @property
    def is_hoppers(self) -> bool:
        """Whether it is for the kernel for Hopper, which has one size."""
        return (self.rows, self.keys) == HOPPER_TILE


class TritonMLAOptions(MLAOptions):
    """The `backend_options` of TRITON_MLA."""

    decode_tile: LatentTile | None = None
    """How decode is cut; None takes the nearest that was measured."""


def decode_tile(
    spec: MLASpec, cache: KVCacheSpec, num_rows: int, queries: int, options: TritonMLAOptions | None, room: int,
    hopper: bool = False,
) -> LatentTile:  # fmt: skip
    """For a batch of `num_rows` rows of `queries` queries each, token times head. The wider dtype, of queries or cache,
    decides first. A program can have `room` bytes of shared memory. `hopper`: the kernel for Hopper can serve."""
    if options is not None and options.decode_tile is not None:
        return options.decode_tile
    cached, widest = spec.cache_dtype.itemsize, max(spec.dtype.itemsize, spec.cache_dtype.itemsize)
    asked = {"bits": 8 * widest, "cache_bits": 8 * cached, "queries": queries, "page_size": cache.page_size,
             "rows": num_rows}  # fmt: skip
    weights = {"bits": 256, "cache_bits": 64, "queries": 8, "page_size": 2, "rows": 1}

    def distance(row: dict[str, Any]) -> float:
        return sum(weight * abs(math.log2(row[name] / asked[name])) for name, weight in weights.items())

    def need(tile: LatentTile) -> int:
        rows = min(padded(queries), tile.rows)
        width = padded(spec.kv_lora_rank) + padded(spec.qk_rope_head_dim)
        weights = rows * tile.keys * spec.dtype.itemsize
        return rows * width * spec.dtype.itemsize + block_bytes(spec, tile.keys, tile.stages, width) + weights

    rows = [row for row in _table() if hopper or not LatentTile(**row["tile"]).is_hoppers]
    tile = LatentTile(**min(rows, key=distance)["tile"])
    return tile if tile.is_hoppers else fitted(tile, need, room)


@cache
def _table() -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath("triton_tuned.json").read_text()
    rows: list[dict[str, Any]] = json.loads(text)["decode"]
    return rows


@dataclass(frozen=True)
class Cut:
    """What follows from the shape of a batch of decode rows alone, whatever their lengths."""

    tile: LatentTile
    num_rows: int
    queries: int  # of a row, token times head
    num_sms: int
    hopper: bool = False  # whether the kernel for Hopper can serve

    @property
    def for_hopper(self) -> bool:
        return self.hopper and self.tile.is_hoppers

    @cached_property
    def tile_rows(self) -> int:
        return self.tile.rows if self.for_hopper else min(padded(self.queries), self.tile.rows)

    @property
    def tiles(self) -> int:
        """Of a row."""
        return -(-self.queries // self.tile_rows)

    @property
    def target(self) -> int:
        """Items that fill the GPU: each is a program for every tile."""
        return max(1, self.num_sms * self.tile.programs // self.tiles)

    @property
    def num_items(self) -> int:
        return self.num_rows + self.target

    @property
    def places(self) -> int:
        """Parts that rows can be cut into, times the queries of each: see `triton_split.schedule_kernel`."""
        return -(-4 * self.target // 3) * self.tiles * self.tile_rows

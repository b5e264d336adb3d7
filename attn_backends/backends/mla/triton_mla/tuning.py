"""TRITON_MLA's tiles by dtypes, queries a row, page size and number of rows: measured once and shipped as data.

`tuned.json` is written by benchmarks/tune/tune_triton_mla.py. What is not in it takes the nearest that is.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib import resources
from typing import Any

from attn_backends.backends.mla.options import MLAOptions
from attn_backends.backends.mla.triton_mla.arguments import CombineColumns
from attn_backends.kernels.cut_list import Filling, max_split_items, num_programs
from attn_backends.kernels.split_kv import MAX_SPLITS
from attn_backends.kernels.tiles import block_bytes, fitted, padded
from attn_backends.spec import KVCacheSpec, MLASpec

# See `cut_list.Filling`: of the kernel for Hopper as measured on an H100; the other loads few queries at a time.
_ROW_KEYS, _MUCH_ALIKE = {True: 512, False: 64}, 1
_LEAST_SPREAD = 4  # programs of a split that combine its row's queries
_MOST_COMBINING = 16, 8  # programs that combine, for each multiprocessor: where rows are few, and where they are not
HOPPER_TILE = (64, 128, 8, 1)  # rows, keys, warps and stages of decode_hopper_kernel.py, which has no other


@dataclass(frozen=True)
class LatentTile:
    """How decode is tiled and split."""

    rows: int  # of a tile at most: query tokens times heads
    keys: int  # of a block
    warps: int
    stages: int  # blocks under way
    programs: int  # a multiprocessor, which the split aims at
    min_keys: int  # of an item: fewer are not worth joining
    hopper: bool = False  # for the kernel that is written for Hopper, where that can serve

    def __post_init__(self) -> None:
        size = (self.rows, self.keys, self.warps, self.stages)
        if self.hopper and size != HOPPER_TILE:
            raise ValueError(
                f"a tile of (rows, keys, warps, stages) {size} for Hopper: its kernel takes {HOPPER_TILE}; give these, "
                "or leave `hopper` out"
            )


class TritonMLAOptions(MLAOptions):
    """The `backend_options` of TRITON_MLA."""

    decode_tile: LatentTile | None = None
    """How decode is cut; None takes the nearest that was measured."""


def decode_tile(
    spec: MLASpec, cache: KVCacheSpec, num_rows: int, queries: int, options: TritonMLAOptions | None, smem_bytes: int,
    hopper: bool = False,
) -> LatentTile:  # fmt: skip
    """The tile for a batch of `num_rows` rows of `queries` queries each, token times head. The wider dtype, of queries
    or cache, decides first. A program can have `smem_bytes` bytes of shared memory. `hopper`: the kernel for Hopper can
    serve."""
    if options is not None and options.decode_tile is not None:
        if options.decode_tile.hopper and not hopper:
            raise ValueError(
                "backend_options.decode_tile of TRITON_MLA is for its kernel for Hopper, which serves latents of 512 "
                "and rope keys of 64 in the queries' dtype of 16 bits or in 8, from pages of a multiple of 16, on "
                f"Hopper with Triton 3.6 or 3.7; this layer has {spec.kv_lora_rank} and {spec.qk_rope_head_dim} in "
                f"{spec.dtype}, a cache in {spec.cache_dtype} and pages of {cache.page_size}: leave `hopper` out of "
                "the tile"
            )
        return options.decode_tile
    return _fitted(_nearest(spec, cache, num_rows, queries, hopper), spec, queries, smem_bytes)


@lru_cache(maxsize=64)
def decode_tiles(
    spec: MLASpec, cache: KVCacheSpec, most_rows: int, queries: int, options: TritonMLAOptions | None, smem_bytes: int,
    hopper: bool = False,
) -> frozenset[LatentTile]:  # fmt: skip
    """Every tile that `decode_tile` gives for 1 to `most_rows` rows."""
    if options is not None and options.decode_tile is not None:
        return frozenset({decode_tile(spec, cache, most_rows, queries, options, smem_bytes, hopper)})
    nearest = {_nearest(spec, cache, num_rows, queries, hopper) for num_rows in range(1, most_rows + 1)}
    return frozenset(_fitted(tile, spec, queries, smem_bytes) for tile in nearest)


def _fitted(tile: LatentTile, spec: MLASpec, queries: int, smem_bytes: int) -> LatentTile:
    def need(tile: LatentTile) -> int:
        rows = min(padded(queries), tile.rows)
        width = sum(block_dims(spec))
        weights = rows * tile.keys * spec.dtype.itemsize
        return rows * width * spec.dtype.itemsize + block_bytes(spec, tile.keys, tile.stages, width) + weights

    return tile if tile.hopper else fitted(tile, need, smem_bytes)


def _nearest(spec: MLASpec, cache: KVCacheSpec, num_rows: int, queries: int, hopper: bool) -> LatentTile:
    cached, widest = spec.cache_dtype.itemsize, max(spec.dtype.itemsize, spec.cache_dtype.itemsize)
    distances = _distances(8 * widest, 8 * cached, queries, cache.page_size, hopper)
    return min(distances, key=lambda row: row[0] + abs(math.log2(row[1] / num_rows)))[2]


@lru_cache(maxsize=256)
def _distances(
    bits: int, cache_bits: int, queries: int, page_size: int, hopper: bool
) -> list[tuple[float, int, LatentTile]]:
    """How far each row of the table is but for its number of rows, that number, and its tile."""
    asked = {"bits": bits, "cache_bits": cache_bits, "queries": queries, "page_size": page_size}
    weights = {"bits": 256, "cache_bits": 64, "queries": 8, "page_size": 2}

    def distance(row: dict[str, Any]) -> float:
        return sum(weight * abs(math.log2(row[name] / asked[name])) for name, weight in weights.items())

    rows = [row for row in _table() if hopper or not row["tile"].get("hopper")]
    return [(distance(row), row["rows"], LatentTile(**row["tile"])) for row in rows]


def block_dims(spec: MLASpec) -> tuple[int, int]:
    """Latents and rope keys as blocks have them: their even and their odd columns alone are wide enough for a product
    too, as an 8-bit cache has them."""
    return 2 * padded((spec.kv_lora_rank + 1) // 2), 2 * padded((spec.qk_rope_head_dim + 1) // 2)


@cache
def _table() -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["decode"]
    return rows


@dataclass(frozen=True)
class SplitPlan:
    """What follows from the shape of a batch of decode rows alone, whatever their lengths."""

    tile: LatentTile
    num_rows: int
    queries: int  # of a row, token times head
    num_sms: int

    @cached_property
    def tile_rows(self) -> int:
        return self.tile.rows if self.tile.hopper else min(padded(self.queries), self.tile.rows)

    @property
    def tiles(self) -> int:
        """Number of tiles of a row's queries."""
        return -(-self.queries // self.tile_rows)

    @property
    def target(self) -> int:
        """Number of cuts that fill the GPU: each is a program for every tile."""
        return min(max(1, self.num_sms * self.tile.programs // self.tiles), int(MAX_SPLITS.value) // 2)

    @property
    def filling(self) -> Filling:
        return Filling(
            few_cuts=self.target, long_cut=0, heads=self.tiles, num_sms=self.num_sms, resident=self.tile.programs,
            row_keys=_ROW_KEYS[self.tile.hopper], much_alike=_MUCH_ALIKE,
        )  # fmt: skip

    def combine_spread(self, block_rank: int) -> int:
        """Number of programs of a split that combine its row's queries, in a launch of their own: so many that none has
        more than some columns of one, where rows of one length are split, and where a long row among short ones is; but
        no more than start soon."""
        columns = CombineColumns.of(block_rank)

        def programs(num_splits: int) -> int:
            return -(-self.queries * block_rank // columns.columns(num_splits) // num_splits)

        alike = self.target // self.num_rows
        most = (
            _MOST_COMBINING[4 * self.num_rows > self.target] * self.num_sms // num_programs(self.num_rows, self.target)
        )
        return max(_LEAST_SPREAD, min(most, max(programs(alike) if alike > 1 else 1, programs(self.target))))

    @property
    def num_partial_slots(self) -> int:
        """Number of partial slots that rows can be split into, times the queries of each."""
        return max_split_items(self.target) * self.tiles * self.tile_rows

    def need(self, spec: MLASpec) -> tuple[int, int]:
        """Floats of accumulators, and of maxima and sums, that a launch writes at most, whatever the lengths."""
        return self.num_partial_slots * block_dims(spec)[0], self.num_partial_slots * 2

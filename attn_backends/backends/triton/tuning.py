"""Tile sizes: of decode by a rule over the bytes of a key, of all else measured once and shipped as data.

`tuned.json` is written by benchmarks/tune/tune_triton.py, by head dim, group, page size, bits of the cache and, for
decode with more than a tile of few queries, their number and that of the rows; prefill's over 8 bits are from trials at
random shapes. What is not in it takes the nearest that is.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from attn_backends.kernels.prefill.tiles import MARGIN, PrefillTile
from attn_backends.kernels.tiles import SWIZZLED, SWIZZLED_FLOATS, block_bytes, block_dims, fitted
from attn_backends.spec import AttentionSpec, KVCacheSpec

KINDS = ("decode", "prefill", "prompt")
_SCRATCH = 2 << 10  # of a decode program, beside its blocks and its queries: page ids, and where warps meet
_MMA_WARPS = 4
_MMA_ROWS = 64  # queries from which on Hopper's matrix units want four warps for one product
_HELD = 160  # numbers of a thread, counted so: with more, compiled kernels keep some in memory
_MOST_WARPS = 8
_FEW_QUERIES = 16  # of a tile: what a product takes at least
_FEW_PAIRS = 32  # of a row and a KV head
_WIDE_KEY_BYTES = 768  # of a key and its value in 16 bits
_NARROW_KEY_BYTES = 128  # of a key and its value in 8 bits


@dataclass(frozen=True)
class DecodeTile:
    """How decode is tiled and split."""

    keys: int  # of a block
    warps: int
    stages: int  # blocks under way
    programs: int  # a multiprocessor, which the split aims at
    min_keys: int  # of an item: fewer are not worth joining
    joined: int = 8  # splits up to which one program combines all, of 64 queries at most; a power of two from 2 on

    def __post_init__(self) -> None:
        if self.joined < 2 or self.joined & (self.joined - 1):
            raise ValueError(
                f"joined is {self.joined}, up to how many splits one program combines; give a power of two, as 8"
            )


class TritonOptions(BaseModel):
    """`backend_options` of TRITON. Tiles are looked up in the shipped table unless they are given here.

    Those of prefill and of prompts are the portable kernel's: where one is given, that serves on Hopper too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_tile: DecodeTile | None = None
    prefill_tile: PrefillTile | None = None
    prompt_tile: PrefillTile | None = None
    upcast_bytes: Annotated[int, Field(ge=0)] = 128 << 20
    """Room in the state for keys and values that are made 16 bits, for prefills over a cache of 8 bits on Hopper: of as
    many KV heads at a time as fit in, or of some rows where those of all rows do not fit in for one head. Where not one
    row's do, and where that is no slower, they are read as they are."""


def decode_tile(
    spec: AttentionSpec, cache: KVCacheSpec, num_rows: int, query_rows: int, options: TritonOptions | None,
    smem_bytes: int,
) -> DecodeTile:  # fmt: skip
    """Args: query_rows: of a tile of queries; smem_bytes: bytes of shared memory that a program can have."""
    if options is not None and options.decode_tile is not None:
        return options.decode_tile
    return _fitted_decode_tile(_wished(spec, cache, num_rows, query_rows), spec, query_rows, smem_bytes)


@lru_cache(maxsize=64)
def decode_tiles(
    spec: AttentionSpec, cache: KVCacheSpec, most_rows: int, query_rows: int, options: TritonOptions | None,
    smem_bytes: int,
) -> frozenset[DecodeTile]:  # fmt: skip
    """Every tile that `decode_tile` gives for 1 to `most_rows` rows."""
    if options is not None and options.decode_tile is not None:
        return frozenset({options.decode_tile})
    wished = {_wished(spec, cache, num_rows, query_rows) for num_rows in range(1, most_rows + 1)}
    return frozenset(_fitted_decode_tile(tile, spec, query_rows, smem_bytes) for tile in wished)


def _wished(spec: AttentionSpec, cache: KVCacheSpec, num_rows: int, query_rows: int) -> DecodeTile:
    if not goes_by_rule(spec, query_rows):
        return DecodeTile(**_nearest("decode", spec, cache, num_rows, query_rows))
    key_bytes = (spec.head_dim + spec.head_dim_vo) * spec.cache_dtype.itemsize
    return _rule(key_bytes, spec.cache_dtype.itemsize, num_rows * spec.num_kv_heads)


def goes_by_rule(spec: AttentionSpec, query_rows: int) -> bool:
    """Whether a layer's decode, of tiles of so many queries, is in no table."""
    return query_rows <= _FEW_QUERIES and spec.dtype is not torch.float32


def _rule(key_bytes: int, itemsize: int, num_pairs: int) -> DecodeTile:
    """The tile of few queries.

    A block of 16 keys is one page's, whose id is one number, and a program of one warp waits for no other: four to
    eight of them keep loads of about 64 KiB under way. Wide keys are too much for one warp. Over 8 bits programs
    compute for longer than they wait, so that there are six; blocks of narrow keys and of wide ones are longer,
    unless pairs of a row and a KV head are few. From trials at random shapes on an H200
    (`benchmarks/tune/decode_trials.py`), of wide keys on an H100 too; `benchmarks/attention/random_shapes.py`
    judges it at others.

    Args:
        key_bytes: of a key and its value.
        num_pairs: of a row and a KV head.
    """
    is_few, is_wide = num_pairs <= _FEW_PAIRS, key_bytes >= _WIDE_KEY_BYTES * itemsize // 2
    if is_wide and (itemsize > 1 or is_few):
        return DecodeTile(keys=16, warps=2, stages=6, programs=4, min_keys=128)
    if itemsize > 1:
        return DecodeTile(keys=16, warps=1, stages=6, programs=max(4, min(8, 2048 // key_bytes)), min_keys=128)
    if is_few or (key_bytes > _NARROW_KEY_BYTES and not is_wide):
        return DecodeTile(keys=16, warps=1, stages=6, programs=6, min_keys=128)
    return DecodeTile(keys=32, warps=1, stages=6, programs=4, min_keys=128)


def _fitted_decode_tile(tile: DecodeTile, spec: AttentionSpec, query_rows: int, smem_bytes: int) -> DecodeTile:
    """The tile, or the nearest that fits in shared memory and registers."""
    dim, dim_vo = block_dims(spec)

    def need(tile: DecodeTile) -> int:
        # Page ids come two blocks ahead of their keys: half of the stages, less those, hold keys.
        blocks = block_bytes(spec, tile.keys, max(1, (tile.stages - 1) // 2), dim + dim_vo)
        row = (dim + tile.keys) * spec.dtype.itemsize  # a query, and its weights
        if query_rows >= _MMA_ROWS and tile.warps >= _MMA_WARPS:  # sums and logits go through it too
            row += 4 * dim_vo + 8 * tile.keys
        if spec.dtype is torch.float32:  # in two parts
            row *= 2
        return blocks + query_rows * row + _SCRATCH

    if spec.dtype is torch.float32 and query_rows >= _MMA_ROWS:
        tile = replace(tile, keys=max(tile.keys, SWIZZLED_FLOATS))
    while tile.keys > 64 and need(tile) > smem_bytes:  # rather than fewer blocks under way
        tile = replace(tile, keys=tile.keys // 2, warps=max(1, tile.warps // 2))
    # A product of float32 is three, of parts that are kept as well.
    num_products = 3 if spec.dtype is torch.float32 else 1
    tile = in_registers(tile, query_rows, num_products * (dim + dim_vo))
    lies_in_halves = spec.cache_dtype.itemsize == 1 and spec.dtype.itemsize == 2
    if lies_in_halves and dim_vo < 2 * SWIZZLED:  # whose rows are too short for Hopper's matrix units, see `block_dims`
        tile = replace(tile, warps=min(tile.warps, _MMA_WARPS // 2))
    return fitted(tile, need, smem_bytes)


def in_registers(tile: DecodeTile, query_rows: int, width: int) -> DecodeTile:
    """With so many warps that a thread can hold its queries, its sums, and where it loads 16 bytes at a time; programs
    become fewer by as much. `width`: columns of keys and of values together."""
    warps = tile.warps
    while warps < _MOST_WARPS and width * (query_rows + tile.keys // 8) > _HELD * 32 * warps:
        warps *= 2
    return replace(tile, warps=warps, programs=max(1, tile.programs * tile.warps // warps))


def prefill_tile(
    spec: AttentionSpec, cache: KVCacheSpec, options: TritonOptions | None, smem_bytes: int, kind: str = "prefill"
) -> PrefillTile:
    """Args: smem_bytes: bytes of shared memory that a program can have; kind: "prompt" for keys that are read as they
    came, "prefill" for those in pages."""
    given: PrefillTile | None = getattr(options, f"{kind}_tile", None)
    if given is not None:
        return given

    if kind == "prompt":  # whose keys are of the queries' dtype, whatever the cache has
        spec = replace(spec, cache_dtype=spec.dtype)
    dim, dim_vo = block_dims(spec)

    def need(tile: PrefillTile) -> int:
        queries = tile.rows * dim * spec.dtype.itemsize
        if spec.dtype is torch.float32:  # in two parts
            queries *= 2
        return queries + block_bytes(spec, tile.keys, tile.stages, dim + dim_vo) + MARGIN

    return fitted(PrefillTile(**_nearest(kind, spec, cache, 1)), need, smem_bytes)


def upcast_heads(spec: AttentionSpec, num_keys: int, num_bytes: int) -> int:
    """KV heads whose keys and values, made 16 bits, have room in so many bytes: as many at a time as divide all, since
    kernels are compiled for their number."""
    head_bytes = num_keys * (spec.head_dim + spec.head_dim_vo) * spec.dtype.itemsize
    most = min(spec.num_kv_heads, num_bytes // head_bytes) if head_bytes else 0
    return next((heads for heads in range(most, 0, -1) if spec.num_kv_heads % heads == 0), 0)


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    return {kind: rows for kind, rows in json.loads(text).items() if kind in KINDS}


def _nearest(kind: str, spec: AttentionSpec, cache: KVCacheSpec, num_rows: int, query_rows: int = 0) -> dict[str, int]:
    """The tile of the row that differs least; what decides its size in bytes counts most."""
    shape = (8 * spec.cache_dtype.itemsize, spec.head_dim, spec.group_size, cache.page_size, query_rows)
    distances = _distances(kind, *shape)
    return dict(min(distances, key=lambda row: row[0] + abs(math.log2(row[1] / num_rows)) if row[1] else row[0])[2])


@lru_cache(maxsize=256)
def _distances(
    kind: str, bits: int, head_dim: int, group: int, page_size: int, queries: int
) -> list[tuple[float, int, dict[str, int]]]:
    """How far each row of the table is but for its number of rows, that number (0: it has none), and its tile."""
    asked = {"bits": bits, "head_dim": head_dim, "group": group, "page_size": page_size, "queries": queries}
    weights = {"bits": 64, "head_dim": 16, "queries": 8, "page_size": 4, "group": 4}

    def distance(row: dict[str, Any]) -> float:
        return sum(weights[name] * abs(math.log2(row[name] / asked[name])) for name in row if name in weights)

    return [(distance(row), row.get("rows", 0), row["tile"]) for row in _table()[kind]]

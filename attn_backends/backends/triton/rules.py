"""TRITON's rules: how prefills and decodes share a GPU, when prefills split keys, which tiles they have, and which rows
decode; `upcasting` has those for keys of 8 bits.

Side by side prefills make products while decodes read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from attn_backends.backends.triton.tuning import TritonOptions, prefill_tile
from attn_backends.backends.triton.workspace import DECODE_TOKENS, least_decode_tokens
from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.launch import num_multiprocessors, shared_memory
from attn_backends.kernels.prefill.launch import (
    HOPPER_ROWS,
    num_hopper_tiles,
    num_visible_keys,
    portable_tile,
    suits_hopper_kernel,
)
from attn_backends.kernels.prefill.split_tiles import SplitTile, hopper_tile
from attn_backends.kernels.prefill.splits import (
    FEW_ROWS,
    PrefillSplits,
    TileLoad,
    busy_time,
    least_time,
    serial_time,
    split_target,
    time_of,
)
from attn_backends.kernels.prefill.tile_splits import split_by_tile, tile_keys
from attn_backends.kernels.prefill.tiles import heads_in_l2, section_heads
from attn_backends.kernels.prefill.waves import (
    blocks_between,
    faster_by_length,
    is_faster_in_order,
    last_wave,
    leaves_idle_in_sections,
)
from attn_backends.kernels.split_kv import HOPPER_PAGE
from attn_backends.spec import AttentionSpec, KVCacheSpec


@lru_cache(maxsize=64)
def of_fresh_keys(spec: AttentionSpec) -> AttentionSpec:
    """The layer over keys of its queries' dtype: as a step brings them, or as a cache's are made."""
    return spec if spec.cache_dtype is spec.dtype else replace(spec, cache_dtype=spec.dtype)


def can_upcast(spec: AttentionSpec, options: TritonOptions, device: torch.device) -> bool:
    """Whether prefills over the cache may have its keys made 16 bits, for the kernel for Hopper."""
    has_tile = options.prefill_tile is not None or options.prompt_tile is not None
    if spec.cache_dtype.itemsize > 1 or has_tile:
        return False
    return suits_hopper_kernel(of_fresh_keys(spec), device)


_PRODUCTS_A_BYTE = 30.0  # of numbers of a head: as many as are made for prefill while a byte is read for decode
_KEYS_BESIDE = 128  # what a tile takes beside its keys, in keys
_PRODUCTS_A_READ_BYTE = 60.0  # the same of decodes that have the GPU for themselves
# As measured (benchmarks/rules/sharing.py). With half of the GPU prefills are so fast that decodes lose nothing by it,
# as they have all of it afterwards. Where prefills take most of the time decodes get what those leave at their end.
_LEAST, _MOST = 0.5, 0.75


def prefill_share(spec: AttentionSpec, query_lens: IntArray, seq_lens: IntArray, num_decodes: int) -> float:
    """Part of the multiprocessors for the rows behind the decodes: so that both take about as long, but half at least.

    Args:
        query_lens, seq_lens: [rows], or upper bounds of the latter; the first `num_decodes` are decodes.
    """
    read = int(num_visible_keys(spec, seq_lens[:num_decodes]).sum(dtype=np.int64)) * spec.cache_dtype.itemsize
    tokens, keys = query_lens[num_decodes:], seq_lens[num_decodes:]
    seen = num_visible_keys(spec, keys - tokens // 2 if spec.causal else keys) + _KEYS_BESIDE
    products = HOPPER_ROWS * int(num_hopper_tiles(spec, tokens) @ seen)
    even = products / (products + _PRODUCTS_A_BYTE * read)
    return 1.0 if even > _MOST else max(even, _LEAST)


_FEW_BESIDE = 0.5  # multiprocessors of prefills to each that they leave, up to which decodes gain by it
_SAME_CUTS = 4  # multiprocessors, so that steps which are nearly alike have the same cuts


def decode_sms(
    spec: AttentionSpec, tile: SplitTile, query_lens: IntArray, seq_lens: IntArray, num_decodes: int, share: float,
    device: torch.device,
) -> int | None:  # fmt: skip
    """Multiprocessors that the tiles of the rows behind the decodes leave free, where decodes that are cut for as many
    are sooner done than with programs for all: some of those begin once a tile, or another one, has ended. None: they
    are not.

    Args:
        tile: of the kernel for Hopper.
        query_lens, seq_lens: [rows], or upper bounds of the latter; the first `num_decodes` are decodes.
        share: see `prefill_share`.
    """
    num_sms = num_multiprocessors(device)
    load = TileLoad.of(spec, tile, query_lens[num_decodes:], seq_lens[num_decodes:])
    most = math.ceil(share * tile.num_programs(num_sms))
    taken = min(int(load.tiles.sum()) * spec.num_kv_heads, most)  # each a multiprocessor's, while there are such
    free = (num_sms - taken) // _SAME_CUTS * _SAME_CUTS
    if taken >= _FEW_BESIDE * free:
        return None
    prefills = time_of(load, spec.num_kv_heads, most, 0, tile)
    decodes = decode_time(spec, tile, seq_lens[:num_decodes], device)
    return free if taken * decodes < _FEW_BESIDE * free * prefills else None


def reads_pages_on_hopper(
    spec: AttentionSpec, cache: KVCacheSpec, options: TritonOptions | None, device: torch.device
) -> bool:
    """Whether the kernel for Hopper serves prefills over the cache as it is."""
    has_tile = options is not None and options.prefill_tile is not None
    return not has_tile and cache.page_size % HOPPER_PAGE == 0 and suits_hopper_kernel(spec, device)


def split_tile(
    spec: AttentionSpec, cache: KVCacheSpec, options: TritonOptions | None, device: torch.device, *, is_paged: bool,
    is_upcast: bool,
) -> SplitTile:  # fmt: skip
    """What the prefill kernel that is to serve reads at a time.

    Args:
        is_paged: keys are read from pages, or else as the step brings them.
        is_upcast: keys in pages are made 16 bits first.
    """
    if is_upcast or not is_paged:
        spec = of_fresh_keys(spec)
    if is_upcast:
        return hopper_tile(spec)
    given = options or TritonOptions()
    has_tile = (given.prefill_tile if is_paged else given.prompt_tile) is not None
    if has_tile or (is_paged and cache.page_size % HOPPER_PAGE) or not suits_hopper_kernel(spec, device):
        kind = "prefill" if is_paged else "prompt"
        return portable_tile(spec, prefill_tile(spec, cache, options, shared_memory(device), kind))
    return hopper_tile(spec)


def prefill_splits(
    spec: AttentionSpec, tile: SplitTile, query_lens: IntArray, seq_lens: IntArray, num_decodes: int,
    device: torch.device,
) -> PrefillSplits | None:  # fmt: skip
    """How the rows behind the decodes are split, and that the longest are first; None: they are not split, and come as
    they are.

    Args:
        query_lens, seq_lens: [rows], or upper bounds of the latter; the first `num_decodes` are decodes.
    """
    given = spec, tile, query_lens, seq_lens, num_decodes, device
    return splits_of_all(*given) or splits_of_a_wave(*given)


_FEW_DECODED = 0.02  # of the time of the prefills, up to which decodes are as if there were none


def splits_of_a_wave(
    spec: AttentionSpec, tile: SplitTile, query_lens: IntArray, seq_lens: IntArray, num_decodes: int,
    device: torch.device,
) -> PrefillSplits | None:  # fmt: skip
    """Splits of `prefill_splits`, of a last wave of tiles alone, or of none with the longest rows first; None: rows
    come as they are."""
    num_programs = tile.num_programs(num_multiprocessors(device))
    decodes = decode_time(spec, tile, seq_lens[:num_decodes], device)
    load = TileLoad.of(spec, tile, query_lens[num_decodes:], seq_lens[num_decodes:])
    of_split = spec.num_kv_heads, num_programs, tile
    is_hidden, longest = hides_keys_before(spec, seq_lens), int(seq_lens.max(initial=0))
    step = 0.0 if is_hidden else blocks_between(spec, tile)
    are_alike = reads_alike(spec, load, longest, num_programs)
    if not are_alike:
        has_decodes = decodes > _FEW_DECODED * busy_time(load, *of_split)
        if has_decodes or num_programs < _FEWEST_BESIDE * spec.num_kv_heads:
            return None
    by_length = faster_by_length(load, *of_split, step)
    num_whole, target = (0, 0) if is_hidden else last_wave(load, *of_split, step, decodes, by_length)
    if target:
        return PrefillSplits(target, tile, num_whole)
    is_faster = are_alike and (by_length is not None or is_faster_in_order(load, *of_split[:2], step))
    read = spec.dtype if _reads_fresh_keys(spec, tile) else spec.cache_dtype
    section = section_heads(spec, longest, read.itemsize, spec.num_kv_heads)
    may_be_idle = section < spec.num_kv_heads and not num_decodes
    if is_faster or (may_be_idle and leaves_idle_in_sections(load, *of_split[:2], section, tile, step)):
        return PrefillSplits(0, tile, by_length=by_length is not None)
    return None


def hides_keys_before(spec: AttentionSpec, seq_lens: IntArray) -> bool:
    """Whether a window or chunks hide any keys before a query, of rows of such lengths, or upper bounds of them."""
    longest = int(seq_lens.max(initial=0))
    return 0 <= spec.window_left < longest - 1 or (spec.chunk_size is not None and spec.chunk_size < longest)


def splits_of_all(
    spec: AttentionSpec, tile: SplitTile, query_lens: IntArray, seq_lens: IntArray, num_decodes: int,
    device: torch.device, for_graph: bool = False,
) -> PrefillSplits | None:  # fmt: skip
    """Splits of `prefill_splits`, of any tile; None: that takes no less time. A graph serves rows of unequal lengths
    too: where the longest ones fill the GPU, one of them among short ones is split all the same."""
    return timed_splits(spec, tile, query_lens, seq_lens, num_decodes, device, for_graph)[0]


# Part of the time, below which tiles are not split by their own lengths, but as many times as others of their row.
_LEAST_SAVED_BY_TILE = 0.05


def timed_splits(
    spec: AttentionSpec, tile: SplitTile, query_lens: IntArray, seq_lens: IntArray, num_decodes: int,
    device: torch.device, for_graph: bool = False,
) -> tuple[PrefillSplits | None, float | None]:  # fmt: skip
    """`splits_of_all`, and what the rows take with them, decodes included, in blocks of the usual tile; None: that is
    not known."""
    num_programs = tile.num_programs(num_multiprocessors(device))
    decodes = decode_time(spec, tile, seq_lens[:num_decodes], device)
    load = TileLoad.of(spec, tile, query_lens[num_decodes:], seq_lens[num_decodes:])
    of_split = spec.num_kv_heads, num_programs, tile
    target, taken = split_target(load, *of_split, decodes)
    has_room = 0 < int(load.tiles.sum()) * spec.num_kv_heads < num_programs and len(load.tiles) <= FEW_ROWS
    if has_room and spec.causal and not (for_graph or hides_keys_before(spec, seq_lens)):
        if target:
            least = (1 - _LEAST_SAVED_BY_TILE) * taken
        else:
            least = least_time(load, *of_split, busy_time(load, *of_split) + decodes)
        keys = tile_keys(tile, query_lens[num_decodes:], seq_lens[num_decodes:])
        found = split_by_tile(load, keys, *of_split, least - serial_time(decodes))
        if found:
            most = found.num_splits * spec.num_kv_heads
            splits = PrefillSplits(most, tile, by_length=True, split_blocks=found.blocks)
            return splits, found.taken + serial_time(decodes)
    if target:
        return PrefillSplits(target, tile), taken
    if for_graph and len(query_lens) > 1 and num_programs >= 2 * spec.num_kv_heads:
        return PrefillSplits(num_programs, tile), None
    return None, None


# Tiles that read a head's keys at a time, so that the L2 need not hold them, and the fewest with which memory is fast
# enough where programs are else idle.
_TILES_BESIDE, _FEWEST_BESIDE = 12, 3


def reads_alike(spec: AttentionSpec, load: TileLoad, max_seq_len: int, num_programs: int) -> bool:
    """Whether tiles of all KV heads in turn, as a list has them, read keys no more often from memory than those of one
    section of heads after the other."""
    beside = num_programs // spec.num_kv_heads
    has_few = beside >= min(_TILES_BESIDE, int(load.tiles.max(initial=0)))
    return has_few or heads_in_l2(spec, max_seq_len, spec.dtype.itemsize) >= spec.num_kv_heads


def mixed_splits(
    spec: AttentionSpec, cache: KVCacheSpec, options: TritonOptions | None, device: torch.device
) -> PrefillSplits:  # fmt: skip
    """How a graph of mixed batches splits rows that are not decoded: for as many programs as a GPU works on."""
    tile = split_tile(spec, cache, options, device, is_paged=True, is_upcast=False)
    return PrefillSplits(tile.num_programs(num_multiprocessors(device)), tile)


def decode_time(spec: AttentionSpec, tile: SplitTile, seq_lens: IntArray, device: torch.device) -> float:
    """What reading the decodes' keys takes, in blocks of the usual tile that a program of prefill reads."""
    tile = _usual_tile(spec, tile)
    read = int(num_visible_keys(spec, seq_lens).sum(dtype=np.int64)) * spec.cache_dtype.itemsize
    num_programs = tile.num_programs(num_multiprocessors(device))
    return _PRODUCTS_A_READ_BYTE * read / (tile.rows * tile.keys) * spec.num_kv_heads / num_programs


def _usual_tile(spec: AttentionSpec, tile: SplitTile) -> SplitTile:
    """The usual one of the kernel that a tile is of; keys of 8 bits may be made 16 first."""
    return tile if not tile.beside or _reads_fresh_keys(spec, tile) else hopper_tile(spec)


def _reads_fresh_keys(spec: AttentionSpec, tile: SplitTile) -> bool:
    """Whether a tile is the usual one of the kernel for Hopper over keys of the queries' dtype, as a cache's are made
    first."""
    return tile.beside > 0 and tile == hopper_tile(of_fresh_keys(spec))


def decode_tokens(
    spec: AttentionSpec, cache: KVCacheSpec, options: TritonOptions | None, device: torch.device
) -> int:  # fmt: skip
    """Most query tokens of a row that the decode kernel serves. With more queries for each KV head than one of its
    small tiles takes, prefill's kernel for Hopper reads keys faster; over 8 bits, of which it makes 16, with more than
    three take."""
    reads = reads_pages_on_hopper(spec, cache, options, device)
    by_prefill = reads or can_upcast(spec, options or TritonOptions(), device)
    return least_decode_tokens(spec) if by_prefill else DECODE_TOKENS

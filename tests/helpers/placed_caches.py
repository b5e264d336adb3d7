"""The same cache in other places: between NaN, with keys and values in one tensor, or far apart."""

from __future__ import annotations

import math
import mmap
from dataclasses import replace

import torch

from attn_backends import get_backend
from attn_backends.cache.kv_cache import KVCache
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.harness import assert_matches, make_layer

PLACES = ("together", "apart", "interleaved", "interleaved apart")
_ELEMENTS = 1 << 32  # of a large cache
_BETWEEN = 32  # columns of NaN behind every head's: rows stay multiples of 16 bytes, of 8 bits too


def placed(cache: KVCache, place: str) -> KVCache:
    """A cache [pages, slots, heads, dim] of the same numbers and layout.

    Args:
        place: of PLACES. "apart": NaN lies behind each head's columns. "interleaved": a head's keys and values lie in
            one row, as wide as the wider of both.
    """
    if place == "together":
        return cache
    between = _BETWEEN if "apart" in place else 0
    if "interleaved" not in place:
        return KVCache(*(_within_nan(tensor, tensor.shape[-1] + between) for tensor in cache))
    width = max(tensor.shape[-1] for tensor in cache) + between
    both = torch.stack([_within_nan(tensor, width, whole=True) for tensor in cache], dim=-2)
    rows = _like(both.flatten(-2), cache.key)
    return KVCache(*(rows[..., i * width : i * width + t.shape[-1]] for i, t in enumerate(cache)))


def check_placed(batch: Batch, place: str, options: object = None) -> None:
    """What TRITON gives over the batch's cache in that place is right, with LSEs and without.

    Args:
        options: of the backend; None: its own.
    """
    layer, expected = make_layer(get_backend("TRITON"), batch, options=options), batch.expected()
    for want_lse in (True, False):
        kv_cache = placed(batch.fresh_pool(), place)
        found = layer.forward(batch, layer.begin(batch), want_lse=want_lse, kv_cache=kv_cache)
        assert_matches(found, batch, str(batch.spec), expected)


def far_apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, of which the later half by the first dimension begins beyond what 31 bits can count."""
    by = _ELEMENTS // tensor.numel()
    return _spread(tensor, by)[::by]


def in_large_cache(batch: Batch) -> tuple[Batch, KVCache]:
    """The batch, and its cache in one of 2^32 elements, of which half begin beyond what 31 bits can count."""
    assert batch.pool is not None
    by = _ELEMENTS // max(tensor.numel() for tensor in batch.pool)
    data = [replace(row.data, pages=[by * page for page in row.data.pages or ()]) for row in batch.rows]
    rows = tuple(replace(row, data=each) for row, each in zip(batch.rows, data, strict=True))
    cache = replace(batch.cache, num_pages=by * batch.cache.pages)
    return replace(batch, rows=rows, cache=cache), KVCache(*(_spread(tensor, by) for tensor in batch.pool))


def _spread(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """As many times the pages, of which one after so many is the tensor's, and no other takes memory.

    As many elements as 31 bits count lie in front: an offset that wraps around finds zeros there.
    """
    without_memory = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    room = mmap.mmap(-1, (_ELEMENTS // 2 + max(1, by * tensor.numel())) * tensor.itemsize, flags=without_memory)
    whole = torch.frombuffer(room, dtype=torch.uint8).view(tensor.dtype)
    placed = whole.as_strided((by * len(tensor), *tensor.shape[1:]), tensor.stride(), _ELEMENTS // 2)
    placed[::by].copy_(tensor)
    return placed


def _within_nan(tensor: torch.Tensor, width: int, whole: bool = False) -> torch.Tensor:
    wide = tensor.new_full((*tensor.shape[:-1], width), math.nan)
    wide[..., : tensor.shape[-1]] = tensor
    return wide if whole else _like(wide, tensor)[..., : tensor.shape[-1]]


def _like(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The rows with heads before slots, if that tensor's are."""
    heads_first = tensor.stride(2) > tensor.stride(1)
    return rows.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else rows.contiguous()

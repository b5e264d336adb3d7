"""The same cache in other places: between NaN, or with keys and values in one tensor."""

from __future__ import annotations

import math

import torch

from attn_backends.cache.kv_cache import KVCache

PLACES = ("together", "apart", "interleaved", "interleaved apart")
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


def _within_nan(tensor: torch.Tensor, width: int, whole: bool = False) -> torch.Tensor:
    wide = tensor.new_full((*tensor.shape[:-1], width), math.nan)
    wide[..., : tensor.shape[-1]] = tensor
    return wide if whole else _like(wide, tensor)[..., : tensor.shape[-1]]


def _like(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The rows with heads before slots, if that tensor's are."""
    heads_first = tensor.stride(2) > tensor.stride(1)
    return rows.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else rows.contiguous()

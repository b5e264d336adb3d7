"""The KV pool of engines that think in tokens: a slot a token, slot 0 for whatever nobody wants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from attn_backends.adapters.req_to_token.layers import AttentionLayer, LayerKind
from attn_backends.cache.kv_cache import KVCache, allocate_kv_cache, write_slots
from attn_backends.interface import AttentionBackend
from attn_backends.spec import KVCacheSpec


class KVPool(Protocol):
    """What the adapter asks of a pool; an engine's own will do. Slot 0 is a dummy: padding is written there."""

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_slots + 1, num_kv_heads, head_dim] and values [num_slots + 1, num_kv_heads, v_head_dim]."""

    def set_kv_buffer(self, layer_id: int, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k [num_tokens, num_kv_heads, head_dim] and v to slots `indices` [num_tokens]."""


def page_size_of(pool: KVPool | None, default: int = 1) -> int:
    """Slots of a pool's pages; `default` without a pool, and of one that says nothing of pages."""
    return int(getattr(pool, "page_size", default))


class TokenKVPool:
    """Every layer's keys and values, from one allocation, zeroed.

    Args:
        num_slots: tokens that the pool holds; their slots are `page_size` to `num_slots + page_size - 1`, and those
            before are for padding.
        layers: their heads and dims are read.
        dtype: what keys and values are stored in.
        page_size: slots of a page, of which `num_slots` is a multiple.
    """

    def __init__(
        self, num_slots: int, layers: Iterable[AttentionLayer], dtype: torch.dtype, device: torch.device | str,
        page_size: int = 1,
    ) -> None:  # fmt: skip
        self.num_slots, self.page_size = num_slots, page_size
        specs = {layer.layer_id: LayerKind.of(layer).spec(torch.float32, dtype) for layer in layers}
        self.pool = allocate_kv_cache(
            AttentionBackend, specs, KVCacheSpec(num_slots // page_size + 1, page_size), device
        )

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views: [num_slots + page_size, num_kv_heads, head_dim] and the same of v_head_dim.

        Raises:
            ValueError: the pool has no such layer.
        """
        cache = self._cache(layer_id)
        return cache.key.flatten(0, 1), cache.value.flatten(0, 1)

    def set_kv_buffer(self, layer_id: int, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write tokens to their slots, on the device. Slots may repeat where it does not matter which write wins: 0.

        Raises:
            ValueError: the pool has no such layer.
        """
        write_slots(k, v, self._cache(layer_id), indices.long())

    def _cache(self, layer_id: int) -> KVCache:
        if layer_id not in self.pool.layers:
            known = ", ".join(map(str, self.pool.layers))
            raise ValueError(f"layer {layer_id} is not in the pool, which has {known}: make the pool with this layer")
        return self.pool.layers[layer_id]

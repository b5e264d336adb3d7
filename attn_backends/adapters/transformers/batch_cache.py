"""`PagedAttentionCache` of transformers' continuous batching, whose inside has changed from version to version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from attn_backends.adapters.transformers.layers import LayerCall
from attn_backends.adapters.transformers.refuse import decline
from attn_backends.cache.kv_cache import KVCache
from attn_backends.layer_kinds import FULL, SLIDING


class KeysPlace(NamedTuple):
    """Where a layer's keys are."""

    kind: str  # FULL or SLIDING
    group: int  # in `read_index` and `write_index`
    page_size: int
    pages: KVCache | None  # views of the cache; None: a ring


def place_of(cache: Any, call: LayerCall) -> KeysPlace:
    """Where a layer's keys are.

    Raises:
        Unsupported: the ring is of another length than the layer's window, or pages are of other heads than its keys.
    """
    index = call.module.layer_idx
    place, window = _in_5_17(cache, index) if hasattr(cache, "key_cache") else _in_allocator(cache, index)
    if place.kind == SLIDING and window != call.spec.window_left + 1:
        decline("window", f"layer {index} sees {call.spec.window_left + 1} keys, and its cache keeps {window}",
                "layers that see what is kept", "Load this model with sdpa.")  # fmt: skip
    if place.pages is not None:
        brought, kept = (call.key.shape[1], call.key.shape[3]), (*place.pages.key.shape[2:],)
        if brought != kept:
            decline("keys", f"{brought[0]} heads of {brought[1]} at layer {index}, whose cache keeps {kept[0]} of "
                    f"{kept[1]}", "layers that bring what their cache keeps",
                    "Use generate() in the place of generate_batch().")  # fmt: skip
    return place


def _in_allocator(cache: Any, index: Any) -> tuple[KeysPlace, int | None]:
    """From 5.18 on: page ids count over the pages of all layers, and keys and values are views that begin at theirs."""
    allocator = cache.layer_to_allocator[index]
    ring: int | None = getattr(allocator, "sliding_window", None)
    if ring is not None:
        return KeysPlace(SLIDING, allocator.index, allocator.tokens_per_page, None), ring
    pages = KVCache(*allocator.get_cache_for_block_table(index))
    return KeysPlace(FULL, allocator.index, allocator.tokens_per_page, pages), None


def _in_5_17(cache: Any, index: Any) -> tuple[KeysPlace, int | None]:
    """5.17: a tensor of slots for each layer of a group; layers of other groups share it."""
    group, at = cache.layer_index_to_group_indices[index]
    if type(cache.group_cache_managers[group]).__name__.startswith("Sliding"):
        return KeysPlace(SLIDING, group, cache.block_size, None), cache.sliding_windows[index]
    keys, values = (slots[at].unflatten(0, (-1, cache.block_size)) for slots in (cache.key_cache, cache.value_cache))
    return KeysPlace(FULL, group, cache.block_size, KVCache(keys, values)), None


def gathered(given: Mapping[str, Any], call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer with a window sees of a step, as transformers gathers it, and writes what is new to the ring.

    Returns:
        Keys and values: [num_keys or more, num_kv_heads, dim] each.
    """
    cache, index = given["cache"], call.module.layer_idx
    code = type(cache).update.__code__
    if "read_index" in code.co_varnames[: code.co_argcount]:  # up to 5.18; then all keyword arguments
        keys, values = cache.update(call.key, call.value, index, given["read_index"], given["write_index"])
    else:
        keys, values = cache.update(call.key, call.value, index, dict(given))
    return _rows(keys), _rows(values)


def _rows(packed: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim], as `update` returns them from 5.19 on, as [tokens, heads, dim]."""
    return packed[0].transpose(0, 1) if packed.dim() == 4 else packed

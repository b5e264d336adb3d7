"""The paged cache: allocate a pool once, write new keys and values by slot, copy and swap pages.

Every cache tensor is indexed `[page, offset in page, KV head, dim]`, whatever its layout: HND differs in strides alone.
Values are stored divided by their scale, and rounded: real value = stored value * scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol

import torch

from attn_backends.machine import HAS_TRITON
from attn_backends.spec import FP8_DTYPES, AttentionSpec, KVCacheSpec, LayerT, Layout


class CacheGeometry(Protocol):
    """The two questions that a pool asks a backend class (`AttentionBackend` answers them)."""

    @staticmethod
    def get_kv_cache_shapes(spec: AttentionSpec, cache: KVCacheSpec) -> tuple[tuple[int, ...], ...]: ...
    @staticmethod
    def get_kv_cache_stride_order(layout: Layout) -> tuple[int, ...]: ...


class KVCache(NamedTuple):
    """One layer's cache. In MLA `key` holds the latent rows, and `value` has no columns: values are part of them."""

    key: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim]; MLA: [num_pages, page_size, latent_dim]
    value: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_vo]; MLA: [num_pages, page_size, 0]


@dataclass(frozen=True)
class KVCachePool(Generic[LayerT]):
    """Every layer's cache, cut from one allocation that never grows."""

    buffer: torch.Tensor  # [num_bytes] u8
    layers: dict[LayerT, KVCache]

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel()


def get_kv_cache_layout(layouts: Collection[Layout], wish: Layout | None = None) -> Layout:
    """The layout of a pool: the one wished for, used or refused; without a wish NHD where it can be had.

    Args:
        layouts: what the backend serves, `Capabilities.layouts`. For a pool that backends share, what all of them do.

    Raises:
        ValueError: the wish is not among them, or there are none.
    """
    served = sorted(layouts, reverse=True)  # NHD first: new tokens are written there in one piece
    if not served or (wish is not None and wish not in served):
        raise ValueError(
            f"layout is {wish!r}; served here: {', '.join(served) or 'none'}. Set cache.layout to one that is, or "
            "choose another backend"
        )
    return wish or served[0]


def page_bytes(backend: CacheGeometry, specs: Mapping[LayerT, AttentionSpec], cache: KVCacheSpec) -> int:
    """Bytes that one page takes over all layers."""
    return sum(
        math.prod(shape[1:]) * spec.cache_dtype.itemsize
        for spec in specs.values()
        for shape in backend.get_kv_cache_shapes(spec, cache)
    )


def allocate_kv_cache(
    backend: CacheGeometry,
    specs: Mapping[LayerT, AttentionSpec],
    cache: KVCacheSpec,
    device: torch.device | str,
    *,
    pin_memory: bool = False,
) -> KVCachePool[LayerT]:
    """Allocate the pool, zeroed, with the shapes and stride order that the backend asks for.

    `pin_memory` makes a host pool that `swap_pages` copies to and from without a detour.
    """
    total = page_bytes(backend, specs, cache) * cache.pages
    buffer = torch.zeros(total, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    order = backend.get_kv_cache_stride_order(cache.layout)
    inverse = [order.index(dim) for dim in range(len(order))]
    start = 0
    layers: dict[LayerT, KVCache] = {}
    # Wide dtypes first: then every tensor starts at a multiple of its own item size.
    for layer, spec in sorted(specs.items(), key=lambda item: -item[1].cache_dtype.itemsize):
        tensors = []
        for shape in backend.get_kv_cache_shapes(spec, cache):
            num_bytes = math.prod(shape) * spec.cache_dtype.itemsize
            flat = buffer[start : start + num_bytes].view(spec.cache_dtype)
            tensors.append(flat.view([shape[dim] for dim in order]).permute(inverse))
            start += num_bytes
        layers[layer] = KVCache(*tensors)
    return KVCachePool(buffer, {layer: layers[layer] for layer in specs})


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_vo]
    kv_cache: KVCache,
    slot_mapping: torch.Tensor,  # [num_tokens] i64, or longer; -1 is never written
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    next_waits: bool = False,  # the kernel behind it may start before it ends, and waits for it by itself
) -> None:
    """Write tokens to their slots, wherever padding stands, without a read of the device.

    A scatter has no "nowhere" to send padding to, so padding repeats the write of some real token, byte for byte. With
    no real token at all it writes back what slot 0 holds.
    """
    if not (key.shape[0] and slot_mapping.shape[0]):
        return
    if _has_kernel(kv_cache.key, key):
        from attn_backends.cache.kernels import launch_write_kv

        launch_write_kv(key, value, *kv_cache, slot_mapping, k_scale, v_scale, next_waits)
        return
    slot_mapping = slot_mapping[: key.shape[0]]
    live = slot_mapping >= 0
    some = live.to(torch.uint8).argmax(0, keepdim=True)  # [1], a real token if there is one
    slots = torch.where(live, slot_mapping, slot_mapping[some].clamp(min=0))
    for new, cached, scale in ((key, kv_cache.key, k_scale), (value, kv_cache.value, v_scale)):
        stored = _bits(quantise(new, cached.dtype, scale))
        stored = torch.where(live[:, None, None], stored, stored[some])
        _scatter(torch.where(live[some], stored, _bits(gather_slots(cached, slots))), cached, slots)


def _has_kernel(*tensors: torch.Tensor) -> bool:
    """Whether one kernel of ours, which divides in float32, takes all of these: caches, and what is written to them."""
    return HAS_TRITON and all(tensor.is_cuda and tensor.dtype is not torch.float64 for tensor in tensors)


def write_latent(
    latent: torch.Tensor,  # [num_tokens, kv_lora_rank]
    rope_key: torch.Tensor,  # [num_tokens, qk_rope_head_dim]
    latent_cache: torch.Tensor,  # [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] i64; -1 is never written
    scale: float = 1.0,
) -> None:
    """`write_kv` for a latent cache: the two parts of a row are keys and values of one head, side by side."""
    rank = latent.shape[1]
    parts = KVCache(latent_cache[:, :, None, :rank], latent_cache[:, :, None, rank:])
    write_kv(latent[:, None], rope_key[:, None], parts, slot_mapping, scale, scale)


def has_padding(slots: torch.Tensor) -> bool:
    """Whether some token has no slot. Reads the tensor."""
    return bool((slots < 0).any())


def write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: KVCache,
    slots: torch.Tensor,  # [num_tokens] i64, all of them live
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`write_kv` for a mapping without padding: a plain scatter."""
    for new, cached, scale in ((key, kv_cache.key, k_scale), (value, kv_cache.value, v_scale)):
        _scatter(_bits(quantise(new, cached.dtype, scale)), cached, slots)


def _scatter(stored: torch.Tensor, cached: torch.Tensor, slots: torch.Tensor) -> None:
    if cached.is_contiguous():
        _bits(cached).flatten(0, 1).index_copy_(0, slots, stored)
    else:
        page_size = cached.shape[1]
        _bits(cached)[slots // page_size, slots % page_size] = stored


def quantise(tensor: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Real values to what a cache of `dtype` stores: `tensor / scale`, saturated for fp8.

    The division is done in the wider of both dtypes, in float32 at least.
    """
    is_fp8 = dtype in FP8_DTYPES
    if is_fp8 and scale == 1.0 and tensor.dim() == 3 and tensor.numel() and _has_kernel(tensor):
        from attn_backends.cache.kernels import to_fp8

        return to_fp8(tensor, dtype)
    if not is_fp8 and scale == 1.0:
        return tensor.to(dtype)
    least = torch.float32 if is_fp8 else torch.promote_types(dtype, torch.float32)
    quotient = tensor.to(torch.promote_types(tensor.dtype, least)) / scale
    if is_fp8:
        limit = torch.finfo(dtype).max
        quotient = quotient.clamp(-limit, limit)
    return quotient.to(dtype)


def dequantise(stored: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What a cache stores to real values of `dtype`: `stored * scale`, computed in float32 or wider if it is not 1."""
    if scale == 1.0:
        return stored.to(dtype)
    return (stored.to(torch.promote_types(dtype, torch.float32)) * scale).to(dtype)


def copy_pages(caches: Sequence[KVCache], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole pages (source, destination) within each layer's cache, as when a shared page is about to change.

    All sources are read before any page is written: (1, 2) and (2, 3) put what page 2 held before into page 3.

    Raises:
        ValueError: a page that a cache does not have, or one that is written twice; nothing is copied then.
    """
    tensors = [tensor for cache in caches for tensor in cache if tensor.numel()]
    if not pairs or not tensors:
        return
    num_pages = min(len(tensor) for tensor in tensors)
    _check_pairs(pairs, num_pages, num_pages)
    sources, destinations = zip(*pairs, strict=True)
    in_any_order = set(sources).isdisjoint(destinations)
    if in_any_order and all(map(_has_kernel, tensors)):
        from attn_backends.cache.kernels import can_copy, launch_copy_pages

        if all(map(can_copy, tensors)):
            launch_copy_pages(tensors, pairs)
            return
    source, destination = torch.tensor(pairs, dtype=torch.int64, device=tensors[0].device).unbind(1)
    for tensor in tensors:
        _bits(tensor)[destination] = _bits(tensor)[source]


def swap_pages(sources: Sequence[KVCache], destinations: Sequence[KVCache], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pages (source, destination) from one pool to another, such as device to host and back, and wait for them.

    Raises:
        ValueError: see `copy_pages`; or pages of both pools are not alike.
    """
    if not pairs or not sources:
        return
    num_pages = (min(len(cache.key) for cache in caches) for caches in (sources, destinations))
    _check_pairs(pairs, *num_pages)
    source, destination = torch.tensor(pairs, dtype=torch.int64, device="cpu").unbind(1)
    for from_cache, to_cache in zip(sources, destinations, strict=True):
        for from_tensor, to_tensor in zip(from_cache, to_cache, strict=True):
            if from_tensor.shape[1:] != to_tensor.shape[1:] or from_tensor.dtype is not to_tensor.dtype:
                both = (f"{tuple(each.shape[1:])} in {each.dtype}" for each in (from_tensor, to_tensor))
                raise ValueError(
                    f"pages of {' are copied to pages of '.join(both)}: give the same layers of both pools"
                )
            moved = _bits(from_tensor)[source.to(from_tensor.device)].to(to_tensor.device)
            _bits(to_tensor)[destination.to(to_tensor.device)] = moved


def _check_pairs(pairs: Sequence[tuple[int, int]], num_sources: int, num_destinations: int) -> None:
    """Torch would read page -1 as the last one, a kernel beyond the cache, and of two writes any may be the last."""
    written: dict[int, int] = {}
    for source, destination in pairs:
        for page, count in ((source, num_sources), (destination, num_destinations)):
            if not 0 <= page < count:
                raise ValueError(f"copy of page {source} to {destination}: page {page} is not one of 0 to {count - 1}")
        if destination in written:
            raise ValueError(
                f"pages {written[destination]} and {source} are both copied to page {destination}: name each "
                "destination once"
            )
        written[destination] = source


def gather_pages(cached: torch.Tensor, pages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Pages of one cache tensor in order, as tokens: [len(pages) * page_size, num_kv_heads, dim], stored dtype.

    `out`, of that shape, is filled if it is given. A cache that is not contiguous ignores it.
    """
    room = None if out is None or not cached.is_contiguous() else _bits(out).view(-1, *cached.shape[1:])
    gathered = torch.index_select(_bits(cached), 0, pages, out=room)
    return gathered.reshape(-1, *cached.shape[2:]).view(cached.dtype)


def gather_slots(cached: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens of one cache tensor by slot: [len(slots), num_kv_heads, dim], stored dtype.

    `out` as in `gather_pages`; it may be longer.
    """
    bits, page_size = _bits(cached), cached.shape[1]
    if cached.is_contiguous():
        room = None if out is None else _bits(out)[: len(slots)]
        return torch.index_select(bits.flatten(0, 1), 0, slots, out=room).view(cached.dtype)
    # An index counts from the end where it is negative, and index_select's does not: made huge, it is refused likewise.
    pages = (slots & torch.iinfo(slots.dtype).max) // page_size
    return bits[pages, slots % page_size].view(cached.dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: torch has no indexing for fp8 on every device."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor

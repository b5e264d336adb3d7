"""Caches that an engine has allocated in its own way, as ours."""

from __future__ import annotations

import torch

from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import AttentionSpec, KVCacheSpec, Layout, MLASpec


def as_kv_cache(kv_cache: torch.Tensor, layout: Layout = "NHD") -> KVCache:
    """One layer's cache over a tensor that holds keys and values of each page, as FlashInfer and vLLM allocate it.

    The two are views: nothing is copied, and what is written through them stands in the tensor.

    Args:
        kv_cache: NHD: [num_pages, 2, page_size, num_kv_heads, head_dim]; HND: [num_pages, 2, num_kv_heads, page_size,
            head_dim]. `[:, 0]` holds keys, `[:, 1]` values. Any strides, but for the last dimension's.

    Raises:
        ValueError: it is none of these.
    """
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2 or layout not in ("NHD", "HND"):
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)} in layout {layout!r}; needed: [num_pages, 2, page_size, "
            "num_kv_heads, head_dim] in NHD, or [num_pages, 2, num_kv_heads, page_size, head_dim] in HND"
        )
    key, value = kv_cache.unbind(1)
    return KVCache(key, value) if layout == "NHD" else KVCache(key.transpose(1, 2), value.transpose(1, 2))


def layer_cache(kv_cache: torch.Tensor, spec: AttentionSpec, cache: KVCacheSpec) -> KVCache:
    """`as_kv_cache` of a tensor in the pool's layout, whose pages, heads and dtype are a layer's.

    Raises:
        ValueError: they are not, or the layer's keys and values have no such tensor: MLA's, and those of unequal dims.
    """
    if isinstance(spec, MLASpec) or spec.head_dim != spec.head_dim_vo:
        what = "MLA caches one latent row a token" if isinstance(spec, MLASpec) else "keys and values have unequal dims"
        raise ValueError(f"kv_cache is one tensor, and {what}: pass a KVCache of two")
    slots = (cache.page_size, spec.num_kv_heads) if cache.layout == "NHD" else (spec.num_kv_heads, cache.page_size)
    inner = (2, *slots, spec.head_dim)
    if tuple(kv_cache.shape[1:]) != inner or kv_cache.dtype is not spec.cache_dtype:
        needed = ", ".join(map(str, inner))
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)} in {kv_cache.dtype}; this layer needs [num_pages, {needed}] "
            f"({cache.layout}) in {spec.cache_dtype}, or a KVCache: as_kv_cache makes one of another layout"
        )
    return as_kv_cache(kv_cache, cache.layout)

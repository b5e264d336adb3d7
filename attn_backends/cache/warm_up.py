"""The launches of the cache's kernels, listed so that they are compiled before they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import torch

from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, MLASpec


def list_writes(spec: AttentionSpec, cache: KVCacheSpec, lets_start: Sequence[bool] = (False,)) -> None:
    """The launches that write to the cache: new tokens, whatever its scales, and copies of its pages.

    Args:
        lets_start: whether what comes behind starts early.
    """
    from attn_backends.cache.kernels import launch_copy_pages, launch_write_kv
    from attn_backends.kernels.examples import PAGES, caches, distinct, empty, new_latents, new_tokens

    tokens = new_latents(spec) if isinstance(spec, MLASpec) else [tuple(new[1:]) for new in new_tokens(spec)]
    ways = product(distinct(tokens), distinct(caches(spec, cache)), (1.0, 0.5), lets_start)
    for (key, value), cached, scale, next_waits in ways:
        slots = empty(key.shape[0], dtype=torch.int64)
        launch_write_kv(key, value, *cached, slots, scale, scale, next_waits=next_waits)
    launch_copy_pages([empty(PAGES, 1, dtype=torch.int32)], [(0, 1)])


def list_cache_writes(specs: Iterable[AttentionSpec], cache: KVCacheSpec) -> None:
    """The launches that write new tokens, or latent rows, to the cache, and copy its pages."""
    for spec in specs:
        if spec.attention_type is not AttentionType.ENCODER and spec.cache_dtype is not torch.float64:
            list_writes(spec, cache)


def list_quantised_queries(specs: Iterable[AttentionSpec]) -> None:
    """The launches that make queries what an fp8 cache holds."""
    from attn_backends.cache.kernels import to_fp8
    from attn_backends.kernels.examples import new_tokens

    for spec in specs:
        for new in new_tokens(spec):
            to_fp8(new.query, spec.cache_dtype)

"""Random batches: seeded numbers in shuffled pages, over a pool that is poisoned wherever nothing is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from attn_backends.batch.common import SequenceData
from attn_backends.cache.kv_cache import CacheGeometry, KVCache, allocate_kv_cache
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, KVCacheSpec, Layout, MLASpec, new_kv_shapes
from attn_backends.testing.cases.batches import Batch, MLABatch, Row, as_bits
from attn_backends.testing.reference import sees

SPARE_PAGES = 3  # pages that no request owns; page 0 is one of them, as tables are padded with zeros


def random_batch(
    backend: CacheGeometry,
    spec: AttentionSpec,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    page_size: int = 16,
    layout: Layout = "NHD",
    device: torch.device | str = "cpu",
    seed: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    poison: float = 7.0,
    shared_prefix_len: int = 0,
    lookahead: int = 0,
    cached: bool = True,
    new_kv_lens: Sequence[int] | None = None,
    num_pages: int | None = None,
    fp8_queries: bool = False,
) -> Batch:
    """A batch of normal random numbers; the same seed gives the same batch.

    Args:
        seq_lens, query_lens: one a request. For cross attention `seq_lens` are the encoder's lengths.
        k_scale, v_scale: as the Impl takes them; latent rows of MLA have the first alone.
        poison: fills every slot that holds no cached key: unused pages, page tails and the slots still to be written.
        shared_prefix_len: leading keys that all requests share, in the same pages; a multiple of the page size.
        lookahead: pages that each request owns beyond its need.
        cached: False for a profile run, without pages or pool. Encoder attention never has them.
        new_kv_lens: for cross attention, keys each request writes: all (None) or 0. Elsewhere they are the queries'.
        num_pages: size of the pool; the need of this batch and a few more if None.
        fp8_queries: the backend's `Capabilities.fp8_queries`; for an fp8 cache alone.
    """
    generator = torch.Generator().manual_seed(seed)
    cached = cached and spec.attention_type is not AttentionType.ENCODER
    lists, needed = _page_lists(seq_lens, page_size, shared_prefix_len, lookahead, generator, num_pages)
    rows: list[Row] = []
    for i, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        pages = lists[i] if cached else None
        if spec.attention_type is AttentionType.CROSS:
            new = seq_len if new_kv_lens is None else new_kv_lens[i]
            data = SequenceData(0, query_len, pages, seq_len=seq_len, new_kv_len=new)
        else:
            data = SequenceData(seq_len - query_len, query_len, pages)
        rows.append(_random_row(spec, data, rows[0] if rows else None, shared_prefix_len, generator))
    sinks = _normal((spec.num_qo_heads,), generator).to(device) if spec.sinks else None
    cache = KVCacheSpec(needed, page_size, layout)
    rounded = fp8_queries and cached and spec.cache_dtype in FP8_DTYPES
    batch = Batch(spec, cache, torch.device(device), tuple(rows), None, sinks, k_scale, v_scale, rounded)
    if isinstance(spec, MLASpec):
        width = spec.num_qo_heads * (spec.qk_nope_head_dim + spec.head_dim_vo)
        own = torch.Generator().manual_seed(width)  # the weight is the layer's, whatever the batch
        weight = _normal((width, spec.kv_lora_rank), own) * spec.kv_lora_rank**-0.5
        given = {**vars(batch), "v_scale": 1.0, "kv_b_proj": weight.to(spec.dtype).to(device)}
        batch = MLABatch(**given)
    return with_pool(batch, backend, poison) if cached else batch


def _normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Float32 on the host, whatever torch's defaults are."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def _random_row(
    spec: AttentionSpec, data: SequenceData, first: Row | None, shared_len: int, generator: torch.Generator
) -> Row:
    key_shape, value_shape = new_kv_shapes(spec)
    shapes = (
        (data.query_len, spec.num_qo_heads, spec.head_dim),
        (data.seq_len, *key_shape),
        (data.seq_len, *value_shape),
    )
    query, key, value = (_normal(shape, generator).to(spec.dtype) for shape in shapes)
    if first is not None:
        key[:shared_len], value[:shared_len] = first.key[:shared_len], first.value[:shared_len]
    return Row(data, query, key, value)


def with_pool(batch: Batch, backend: CacheGeometry, poison: float = 7.0) -> Batch:
    """The batch over a new pool: poison everywhere, then what is cached before the step."""
    pool = allocate_kv_cache(backend, {0: batch.spec}, batch.cache, batch.device).layers[0]
    fill_pool(pool, poison)
    for row in batch.rows:
        batch.store(pool, row, 0, row.num_cached)
    return replace(batch, pool=pool)


def with_freed_pages(batch: Batch) -> Batch:
    """The batch after an engine has freed the pages that no query sees, which a window or chunks hide: page 0, which is
    no request's, stands in their place."""
    rows = []
    for row in batch.rows:
        oldest = int(sees(batch.spec, row.data.context_len, torch.arange(row.data.seq_len, device="cpu")).nonzero()[0])
        num_freed = oldest // batch.cache.page_size
        pages = [0] * num_freed + list(row.data.pages or ())[num_freed:]
        rows.append(replace(row, data=replace(row.data, pages=pages)))
    return replace(batch, rows=tuple(rows))


def fill_pool(pool: KVCache, value: float) -> None:
    """A finite number or NaN in every slot."""
    for tensor in pool:
        as_bits(tensor).fill_(as_bits(torch.tensor(value, dtype=torch.float32, device="cpu").to(tensor.dtype)).item())


def _page_lists(
    seq_lens: Sequence[int],
    page_size: int,
    shared_prefix_len: int,
    lookahead: int,
    generator: torch.Generator,
    num_pages: int | None,
) -> tuple[list[list[int]], int]:
    """Shuffled pages for every request, the first ones shared, and the size of the pool they are from."""
    if shared_prefix_len % page_size:
        raise ValueError(f"shared_prefix_len ({shared_prefix_len}) must be a multiple of the page size ({page_size})")
    shared = shared_prefix_len // page_size
    own = [-(-seq_len // page_size) - shared + lookahead for seq_len in seq_lens]
    num_pages = max(shared + sum(own) + SPARE_PAGES, num_pages or 0)
    shuffled = [1 + page for page in torch.randperm(num_pages - 1, generator=generator, device="cpu").tolist()]
    prefix, free = shuffled[:shared], shuffled[shared:]
    edges = np.cumsum([0, *own]).tolist()
    return [prefix + free[start:stop] for start, stop in pairwise(edges)], num_pages

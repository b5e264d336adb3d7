"""One backend's layer at one load: checked against float64 at a small batch, then a call to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import KVCache, allocate_kv_cache
from attn_backends.graphs.recorder import CudaRecorder
from attn_backends.interface import AttentionBackend, CudaGraphSupport, Plans
from attn_backends.spec import FP8_DTYPES, AttentionSpec, KVCacheSpec, Limits, new_kv_shapes
from attn_backends.testing.bench.loads import LoadCase
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, run_backend

Run = Callable[[], object]
CHECKED = {"decode": ((33, 70, 5), (1, 1, 1)), "prefill": ((33, 40, 5), (33, 17, 5))}  # lengths, and query lengths


def check(backend: type[AttentionBackend], spec: AttentionSpec, cache: KVCacheSpec, device: torch.device,
          phase: str) -> None:  # fmt: skip
    """A small batch of the layer equals the float64 reference.

    Raises:
        AssertionError: it does not; says by how much.
    """
    seq_lens, query_lens = CHECKED[phase]
    batch = random_batch(
        backend, spec, seq_lens, query_lens, page_size=cache.page_size, layout=cache.layout, device=device,
        fp8_queries=backend.capabilities().fp8_queries,
    )  # fmt: skip
    assert_matches(run_backend(backend, batch), batch, f"{phase} rows")


def make_run(
    backend: type[AttentionBackend], spec: AttentionSpec, cache: KVCacheSpec, device: torch.device, case: LoadCase
) -> Run:
    """A call that attends and writes the new keys, planned before; on a GPU the replay of a CUDA graph of it."""
    num_requests, num_keys = case.load
    pages = -(-num_keys // cache.page_size)
    pool = replace(cache, num_pages=num_requests * pages)
    limits = Limits(num_requests, num_requests * case.query_len, num_keys)
    plans = Plans(backend, {0: spec}, pool, limits, device)
    kv_cache = allocate_kv_cache(backend, {0: spec}, pool, device).layers[0]
    _fill(kv_cache)
    plans.bind(0, **random_batch(backend, spec, (1,), (1,), page_size=cache.page_size, layout=cache.layout,
                                 device=device).weights)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_requests * pages, generator=generator).view(num_requests, pages)
    rows = [SequenceData(num_keys - case.query_len, case.query_len, list_) for list_ in order.numpy()]
    groups = [SequenceGroup(str(i), (row,)) for i, row in enumerate(rows)]
    common = CommonAttentionMetadata.from_sequence_groups(groups, cache.page_size, device)
    query, key, value = _inputs(spec, common.num_tokens, device)
    if device.type == "cuda" and case.phase == "decode" and _has_graphs(backend, plans, common):
        plans.state.hold_graph_buffers(num_requests)
        common = replace(common, for_graph=True)
    steps = plans.plan(common)
    output = plans.forward(0, query, key, value, kv_cache, steps)

    def run() -> torch.Tensor:
        return plans.forward(0, query, key, value, kv_cache, steps, output)

    return CudaRecorder().capture(run, [plans, steps, kv_cache, output]).replay if device.type == "cuda" else run


def _has_graphs(backend: type[AttentionBackend], plans: Plans[Any], common: CommonAttentionMetadata) -> bool:
    return backend.capabilities().cuda_graph > CudaGraphSupport.NEVER and plans.can_run_in_cudagraph(common)


def _fill(kv_cache: KVCache) -> None:
    for cached in kv_cache:
        if cached.dtype in FP8_DTYPES:
            cached.view(torch.uint8).random_(0, 0x40)  # finite, and no larger than a normal number
        else:
            cached.normal_()


def _inputs(spec: AttentionSpec, num_tokens: int, device: torch.device) -> list[torch.Tensor]:
    """Queries, keys and values of a step."""
    shapes = ((spec.num_qo_heads, spec.head_dim), *new_kv_shapes(spec))
    return [torch.randn(num_tokens, *shape, dtype=spec.dtype, device=device) for shape in shapes]

"""What steps would compile or load when they first need it, before they do: kernels of ours that backends launch beside
their libraries', and batches of every kind for libraries that choose kernels as they plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from attn_backends.batch import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.devices import HAS_TRITON, Progress
from attn_backends.interface import AttentionState
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, PlanGroup


def compile_listed(device: torch.device, list_launches: Callable[[], None], progress: Progress | None) -> None:
    """Compile what a function launches over tensors without memory; nothing where kernels are not compiled."""
    if device.type != "cuda" or not HAS_TRITON:
        return
    from attn_backends.triton_launch import machine_of
    from attn_backends.triton_variants import compile_variants, listing

    with listing(machine_of(device)) as found:
        list_launches()
    compile_variants(found.variants.values(), device, progress)


def list_cache_writes(specs: Iterable[AttentionSpec], cache: KVCacheSpec) -> None:
    """The launches that write new tokens, or latent rows, to the cache, and copy its pages."""
    from attn_backends.triton_examples import list_writes

    for spec in specs:
        if spec.attention_type is not AttentionType.ENCODER and spec.cache_dtype is not torch.float64:
            list_writes(spec, cache)


def list_prefix_pages(max_num_requests: int, page_size: int) -> None:
    """The launches that leave pages out of a batch's CSR (see `csr_triton`)."""
    from attn_backends.csr_triton import csr_of
    from attn_backends.triton_examples import empty, powers_of_two

    for num_rows in powers_of_two(max_num_requests):
        table, lens = empty(num_rows, 2, dtype=torch.int32), empty(num_rows, dtype=torch.int32)
        csr_of(table, lens, page_size, 0, lens)


def list_quantised_queries(specs: Iterable[AttentionSpec]) -> None:
    """The launches that make queries what an fp8 cache holds."""
    from attn_backends.kv_write_triton import to_fp8
    from attn_backends.triton_examples import new_tokens

    for spec in specs:
        for new in new_tokens(spec):
            to_fp8(new.query, spec.cache_dtype)


def list_merges(specs: Iterable[AttentionSpec], dtype: torch.dtype | None = None) -> None:
    """The launches that join attention over two sets of keys.

    Args:
        dtype: of what is joined; None: the layer's.
    """
    from attn_backends.lse_merge_triton import merge
    from attn_backends.triton_examples import empty

    for spec in specs:
        size = (2, spec.num_qo_heads, spec.head_dim_vo)
        more, lse = empty(*size, dtype=spec.dtype), empty(*size[:2], dtype=torch.float32)
        merge(empty(*size, dtype=dtype or spec.dtype), lse, more, lse)


def plan_all_kinds(
    state: AttentionState[Any],
    query_lens: Iterable[int],
    plan: Callable[[PlanGroup[Any], CommonAttentionMetadata], None],
    progress: Progress | None,
) -> None:
    """Plan the batches of `batches_to_plan` for each of a state's groups, so that a library chooses its kernels, and
    loads or compiles them. Steps may begin on another stream afterwards."""
    for done, group in enumerate(state.groups):
        for batch in batches_to_plan(group.spec, state.cache, state.limits, state.device, query_lens):
            plan(group, batch)
        if progress is not None:
            progress(done + 1, len(state.groups), f"first plans, heads of {group.spec.head_dim}")
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


def batches_to_plan(
    spec: AttentionSpec, cache: KVCacheSpec, limits: Limits, device: torch.device, query_lens: Iterable[int]
) -> Iterator[CommonAttentionMetadata]:
    """A batch of one row of each kind that a layer can be given within the limits: with keys in the cache and without,
    of each of some query lengths. Rows have the pool's first pages."""
    longest = limits.max_model_len
    if spec.attention_type is not AttentionType.ENCODER:
        longest = min(longest, cache.num_pages * cache.page_size)
    for query_len in query_lens:
        if query_len > min(limits.max_num_tokens, longest):
            continue
        pages = range(-(-min(longest, query_len + 1) // cache.page_size))
        rows = [SequenceData(0, query_len, None)]  # a prompt, before there is a cache
        if spec.attention_type is AttentionType.CROSS:
            rows = [SequenceData(0, query_len, pages, seq_len=1, new_kv_len=new) for new in (0, 1)]
        elif spec.attention_type is AttentionType.DECODER:
            contexts = (0, 1) if query_len < longest else (0,)
            rows += [SequenceData(context, query_len, pages) for context in contexts]
        for row in rows:
            yield CommonAttentionMetadata.from_sequence_groups([SequenceGroup("", (row,))], cache.page_size, device)

"""Batches of every kind that a state can be given, for libraries that choose kernels as they plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.interface.state import AttentionState
from attn_backends.machine import Progress
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, PlanGroup


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
        longest = longest if cache.num_pages is None else min(longest, cache.num_slots)
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

"""One backend over a pool of token slots: rows of a step → what the layers receive.

Adapters of one device share a float workspace, as engines of this convention have one for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from attn_backends.adapters.req_to_token.batch import ForwardMode, StepRows
from attn_backends.adapters.req_to_token.table import SharedBuffers, TokenTable
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionState, AttentionStep
from attn_backends.interface.plans import Plans
from attn_backends.registry import select_backend, validate_options
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits

_SHARED: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()  # it goes with the last who reads it


@dataclass(frozen=True)
class PlannedStep:
    """What the layers of a step receive."""

    mode: ForwardMode
    num_tokens: int
    steps: Mapping[int, AttentionStep[Any]]  # by the layers' kind; none if idle


class TokenPlans:
    """A backend's plans over a pool of token slots.

    Args:
        name: a backend's name, used or refused; or AUTO.
        specs: one a kind of layers.
        num_slots: slots of the pool, those for padding included.
        table: whose `page_size` is the pool's.
        options: the backend's own.

    Raises:
        Unsupported: the backend refuses a layer; the reasons say why.
    """

    def __init__(
        self, name: str, specs: Sequence[AttentionSpec], num_slots: int, limits: Limits, table: TokenTable,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.table, device = table, table.req_to_token.device
        cache = KVCacheSpec(num_slots // table.page_size, table.page_size)
        selection = select_backend(name, specs, cache, device, options=options)
        valid = validate_options(selection.name, options)
        self.plans = Plans(selection.backend, dict(enumerate(specs)), cache, limits, device, valid)
        for kind in self.plans.specs:
            self.plans.bind(kind)

    def check_buffers(self, key: torch.Tensor, value: torch.Tensor, kind: int) -> None:
        """Refuse a layer's pool that is not what the backend reads for its kind."""
        spec, cache = self.plans.specs[kind], self.plans.cache
        shapes = self.plans.backend.get_kv_cache_shapes(spec, cache)
        found = [(tuple(as_pages(tensor, cache.page_size).shape[1:]), tensor.dtype) for tensor in (key, value)]
        if found != [(shape[1:], spec.cache_dtype) for shape in shapes]:
            raise ValueError(
                f"get_kv_buffer gives {list(key.shape)} {key.dtype} and {list(value.shape)} {value.dtype}; "
                f"{self.plans.backend.get_name()} reads pages of {cache.page_size} slots, {shapes} {spec.cache_dtype}: "
                "make the pool with the layers' heads and kv_cache_dtype"
            )

    def plan(self, mode: ForwardMode, rows: StepRows, buffers: SharedBuffers) -> PlannedStep:
        """Build and plan a step for every kind; a graph's buffers are filled here.

        Raises:
            ValueError: more than the limits, lengths that the backend needs and nobody gave, or a step that it cannot
                run in a graph.
        """
        self._check(rows)
        batches = {AttentionType.DECODER: self.table.self_attention(rows, buffers)}
        if any(spec.attention_type is AttentionType.CROSS for spec in self.plans.specs.values()):
            batches[AttentionType.CROSS] = self.table.cross_attention(rows)

        def batch_of(spec: AttentionSpec) -> CommonAttentionMetadata:
            return batches[spec.attention_type]

        if rows.for_graph and not self.plans.can_run_in_cudagraph(batch_of):
            longest = ", ".join(f"{kind.value} attention {batch.max_seq_len}" for kind, batch in batches.items())
            raise ValueError(
                f"{self.plans.backend.get_name()} cannot run this step in a CUDA graph (most keys of a row: "
                f"{longest}): run it eager, or see the backend's options"
            )
        return PlannedStep(mode, rows.num_tokens, self.plans.plan(batch_of))

    def _check(self, rows: StepRows) -> None:
        num_rows, num_tokens, limits = len(rows.query_lens), rows.num_tokens, self.plans.limits
        if num_rows > limits.max_num_requests or num_tokens > limits.max_num_tokens:
            raise ValueError(
                f"a step of {num_rows} rows and {num_tokens} tokens: this adapter was made for up to "
                f"{limits.max_num_requests} rows (max_req_pool_size) and {limits.max_num_tokens} tokens "
                "(max_num_tokens); raise these, or split the step"
            )
        if rows.are_upper_bounds and self.plans.needs_exact_lengths:
            raise ValueError(
                f"seq_lens_cpu is missing, and {self.plans.backend.get_name()} plans with lengths on the host: pass "
                "seq_lens_cpu, one length a row, or choose a backend that reads lengths on the device"
            )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: int, planned: PlannedStep
    ) -> torch.Tensor:
        """[T, num_qo_heads, head_dim_vo]: one layer over its pool, in which the step's own keys are already."""
        page_size = self.table.page_size
        cache = KVCache(as_pages(key, page_size), as_pages(value, page_size))
        return self.plans.forward(kind, query, None, None, cache, planned.steps)


def as_pages(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """A layer's buffer [num_slots, heads, dim] as pages [num_pages, page_size, heads, dim], a view."""
    num_pages = len(buffer) // page_size
    pages: torch.Tensor = buffer[: num_pages * page_size].unflatten(0, (num_pages, page_size))
    return pages


def share_workspace(state: AttentionState[Any]) -> None:
    """Let a state take the workspace of its device; if that is too small, its own is shared from now on.

    Those who share one run their steps one after the other, on one stream. A state that cannot take another's keeps its
    own.
    """
    reset = getattr(state, "reset_workspace_buffer", None)
    own: torch.Tensor | None = getattr(state, "float_workspace", None)
    if reset is None or own is None:
        return
    shared = _SHARED.get(own.device)
    if shared is None or shared.numel() < own.numel():
        _SHARED[own.device] = own
    else:
        reset(shared)

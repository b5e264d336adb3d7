"""One backend, its state, and a plan for each group of layers: rows of a step → what the layers receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.adapters.req_to_token.batch import ForwardMode, StepRows
from attn_backends.adapters.req_to_token.table import SharedBuffers, TokenTable
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionState, AttentionStep
from attn_backends.registry import select_backend, validate_options
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, plan_groups


@dataclass(frozen=True)
class PlannedStep:
    """What the layers of a step receive."""

    mode: ForwardMode
    num_tokens: int
    steps: tuple[AttentionStep[Any], ...]  # by plan group; none if idle


class TokenPlans:
    """A backend over a token-granular pool.

    Args:
        name: a backend's name, used or refused; or AUTO.
        specs: one a plan group.
        num_slots: slots of the pool, slot 0 included.
        options: the backend's own.

    Raises:
        Unsupported: the backend refuses a layer; the reasons say why.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[AttentionSpec],
        num_slots: int,
        limits: Limits,
        table: TokenTable,
        options: Mapping[str, Any],
    ) -> None:
        self.limits, self.table = limits, table
        device, cache = table.req_to_token.device, KVCacheSpec(num_slots, page_size=1)
        selection = select_backend(name, specs, cache, device, options=options)
        self.backend, valid = selection.backend, validate_options(selection.name, options)
        self.groups = plan_groups(dict(enumerate(specs)))
        builder, impl, place = self.backend.get_builder_cls(), self.backend.get_impl_cls(), (cache, limits, device)
        self.state = self.backend.get_state_cls()(self.groups, *place, options=valid)
        self.builders = [builder(group, *place, options=valid) for group in self.groups]
        self.impls = [impl(group.spec, cache, device, options=valid) for group in self.groups]
        self._has_cross = any(spec.attention_type is AttentionType.CROSS for spec in specs)
        self._needs_exact = any(builder.needs_exact_lengths for builder in self.builders)

    def check_buffers(self, key: torch.Tensor, value: torch.Tensor, group: int) -> None:
        """Refuse a layer's pool that is not what the backend reads for its group."""
        spec = self.groups[group].spec
        shapes = self.backend.get_kv_cache_shapes(spec, self.builders[group].cache)
        found = [(tuple(pages(tensor).shape), tensor.dtype) for tensor in (key, value)]
        if found != [(shape, spec.cache_dtype) for shape in shapes]:
            raise ValueError(
                f"get_kv_buffer gives {list(key.shape)} {key.dtype} and {list(value.shape)} {value.dtype}; "
                f"{self.backend.get_name()} reads pages of one slot, {shapes} {spec.cache_dtype}: make the pool with "
                "the layers' heads and kv_cache_dtype"
            )

    def plan(
        self, state: AttentionState[Any], mode: ForwardMode, rows: StepRows, buffers: SharedBuffers
    ) -> PlannedStep:
        """Build and plan a step for every group; in a graph's state, its buffers are filled here.

        Raises:
            ValueError: more than the limits, lengths that the backend needs and nobody gave, or a step that it cannot
                run in a graph.
        """
        self._check(rows)
        common = {AttentionType.DECODER: self.table.self_attention(rows, buffers)}
        if self._has_cross:
            common[AttentionType.CROSS] = self.table.cross_attention(rows)
        steps = []
        for group, builder in zip(self.groups, self.builders, strict=True):
            batch = common[group.spec.attention_type]
            if rows.for_graph and not builder.can_run_in_cudagraph(batch):
                raise ValueError(
                    f"{self.backend.get_name()} cannot run {group.spec.attention_type.value} attention over "
                    f"{batch.max_seq_len} keys a row in a CUDA graph: run this step eager, or see the backend's options"
                )
            steps.append(state.begin_forward(builder.build(0, batch)))
        return PlannedStep(mode, len(rows.slots), tuple(steps))

    def _check(self, rows: StepRows) -> None:
        num_rows, num_tokens, limits = len(rows.query_lens), len(rows.slots), self.limits
        if num_rows > limits.max_num_requests or num_tokens > limits.max_num_tokens:
            raise ValueError(
                f"a step of {num_rows} rows and {num_tokens} tokens: this adapter was made for up to "
                f"{limits.max_num_requests} rows (max_req_pool_size) and {limits.max_num_tokens} tokens "
                "(max_num_tokens); raise these, or split the step"
            )
        if rows.are_upper_bounds and self._needs_exact:
            raise ValueError(
                f"seq_lens_cpu is missing, and {self.backend.get_name()} plans with lengths on the host: pass "
                "seq_lens_cpu, one length a row, or choose a backend that reads lengths on the device"
            )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: int, planned: PlannedStep
    ) -> torch.Tensor:
        """[T, num_qo_heads, head_dim_vo]: one layer over its pool, in which the step's own keys are already."""
        cache = KVCache(pages(key), pages(value))
        return self.impls[group].forward(query, None, None, cache, planned.steps[group])


def pages(buffer: torch.Tensor) -> torch.Tensor:
    """A layer's buffer [num_slots, heads, dim] as pages of one slot, a view."""
    return buffer.unsqueeze(1)

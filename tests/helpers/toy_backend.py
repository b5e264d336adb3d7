"""TOY: masked paged decode attention over plain tensors, with all that a graph's state can have: persistent buffers, a
plan per group as FlashInfer's, and one workspace that the groups share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
    AttentionStep,
)
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport
from attn_backends.spec import AttentionSpec
from attn_backends.step.buffers import StepBuffers

NUM_SPLITS = 2  # every row's keys are attended in two parts, which are merged


@dataclass(frozen=True)
class ToyMetadata(AttentionMetadata):
    page_table: torch.Tensor  # [R, max_pages] i32
    seq_lens: torch.Tensor  # [R] i32; 0 for padding
    seq_lens_cpu: torch.Tensor  # [R] i32
    num_pages_to_read: int  # of every row: a launch bound


class ToyMetadataBuilder(AttentionMetadataBuilder[ToyMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ToyMetadata:
        common = common_attn_metadata
        self.check_batch(common)
        longest = self.limits.max_model_len if common.for_graph else common.max_seq_len
        own = {
            "page_table": common.page_table,
            "seq_lens": common.seq_lens,
            "seq_lens_cpu": common.seq_lens_cpu,
            "num_pages_to_read": -(-longest // self.cache.page_size),
        }
        if common.for_graph:
            return ToyMetadata.of_graph(
                self.group.index, common.slot_mapping, common.num_reqs, common.num_tokens, **own
            )
        return ToyMetadata.of_batch(common, self.group.index, common.num_actual_reqs, **own)


@dataclass(frozen=True)
class ToyStep(AttentionStep[ToyMetadata]):
    plan: torch.Tensor  # [R, NUM_SPLITS, 2] i32: first key of each part, and the one behind its last
    partial: torch.Tensor  # [R, NUM_SPLITS, num_qo_heads, head_dim_vo + 1] f32: outputs, and the LSE behind


@dataclass(frozen=True)
class ToyBuffers:
    """What a captured graph reads, for as many rows as it has."""

    page_table: torch.Tensor  # [R, max_pages] i32
    seq_lens: torch.Tensor  # [R] i32
    slot_mapping: torch.Tensor  # [R] i64
    plans: list[torch.Tensor]  # one a group, [R, NUM_SPLITS, 2] i32

    def first(self, rows: int) -> ToyBuffers:
        return ToyBuffers(
            self.page_table[:rows], self.seq_lens[:rows], self.slot_mapping[:rows], [p[:rows] for p in self.plans]
        )


class ToyGraphState(AttentionState[ToyMetadata]):
    """The state of one captured size."""

    backend_name = "TOY"

    def __init__(self, state: ToyState, buffers: ToyBuffers) -> None:
        super().__init__(state.groups, state.cache, state.limits, state.device)
        self.state = state
        self.buffers = buffers

    def begin_forward(self, metadata: ToyMetadata) -> ToyStep:
        buffers = self.get_graph_input_buffers(metadata)
        self.prepare_graph_input_buffers(buffers, metadata)
        plan = buffers.pop("plan")
        plan.copy_(plan_of(metadata.seq_lens_cpu))
        return self.state.step_over(replace(metadata, **buffers), plan)

    def get_graph_input_buffers(self, metadata: ToyMetadata) -> dict[str, torch.Tensor]:
        names = ("page_table", "seq_lens", "slot_mapping")
        return {**{n: getattr(self.buffers, n) for n in names}, "plan": self.buffers.plans[metadata.group_index]}

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: ToyMetadata) -> None:
        width = metadata.page_table.shape[1]
        buffers["page_table"][:, :width].copy_(metadata.page_table)
        buffers["page_table"][:, width:].zero_()
        buffers["seq_lens"].copy_(metadata.seq_lens)
        buffers["slot_mapping"].copy_(metadata.slot_mapping)


class ToyState(AttentionState[ToyMetadata]):
    """Owns the workspace for parts of outputs, as large as the group that needs most.

    Its graphs check nothing, so that mutants are found by the simulator, and not refused.
    """

    backend_name = "TOY"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = self.limits.max_num_requests
        self.workspace = torch.empty(max(math.prod(_partial_shape(group.spec, rows)) for group in self.groups))
        self.room: ToyBuffers | None = None

    def begin_forward(self, metadata: ToyMetadata) -> ToyStep:
        return self.step_over(metadata, plan_of(metadata.seq_lens_cpu))

    def step_over(self, metadata: ToyMetadata, plan: torch.Tensor) -> ToyStep:
        shape = _partial_shape(self.groups[metadata.group_index].spec, len(metadata.seq_lens))
        return ToyStep(metadata, plan, self.workspace[: math.prod(shape)].view(shape))

    @contextmanager
    def graph_capture(self, max_batch_size: int, inputs: StepBuffers | None = None) -> Iterator[None]:
        max_pages = -(-self.limits.max_model_len // self.cache.page_size)
        self.room = ToyBuffers(
            torch.zeros(max_batch_size, max_pages, dtype=torch.int32),
            torch.zeros(max_batch_size, dtype=torch.int32),
            torch.full((max_batch_size,), -1, dtype=torch.int64),
            [torch.zeros(max_batch_size, NUM_SPLITS, 2, dtype=torch.int32) for _ in self.groups],
        )
        yield

    def graph_clone(self, batch_size: int, query_len: int = 1) -> ToyGraphState:
        assert self.room is not None
        return ToyGraphState(self, self.room.first(batch_size))


class ToyImpl(AttentionImpl[ToyStep]):
    step_cls = ToyStep

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, step: ToyStep) -> None:
        for new, cached in ((key, kv_cache.key), (value, kv_cache.value)):
            _write(new, cached, step.metadata.slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: ToyStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        assert kv_cache is not None
        self._attend_parts(query, kv_cache, step)
        out, part_lse = step.partial[..., :-1], step.partial[..., -1]  # [R, NUM_SPLITS, Hq, D], [R, NUM_SPLITS, Hq]
        merged = (part_lse.softmax(1)[..., None] * out).sum(1)
        output.copy_(merged.masked_fill((step.metadata.seq_lens == 0)[:, None, None], 0.0))

    def _attend_parts(self, query: torch.Tensor, kv_cache: KVCache, step: ToyStep) -> None:
        spec, page_size = self.spec, self.cache.page_size
        pages = step.metadata.page_table[:, : step.metadata.num_pages_to_read].long()
        position = torch.arange(pages.shape[1] * page_size)
        slots = (pages[:, position // page_size] * page_size + position % page_size).flatten()
        keys, values = (
            cached.flatten(0, 1).index_select(0, slots).view(len(query), len(position), *cached.shape[2:])
            .repeat_interleave(spec.group_size, 2)
            for cached in kv_cache
        )  # fmt: skip
        logits = torch.einsum("rhd,rkhd->rhk", query, keys) * spec.scale
        for part in range(NUM_SPLITS):
            first, stop = step.plan[:, part, :, None].unbind(1)  # [R, 1] each
            seen = (position >= first) & (position < stop)  # [R, keys]
            part_logits = logits.masked_fill(~seen[:, None], -torch.inf)
            weights = part_logits.softmax(-1).nan_to_num(0.0)
            live_values = values.masked_fill(~seen[..., None, None], 0.0)
            step.partial[:, part, :, :-1] = torch.einsum("rhk,rkhd->rhd", weights, live_values)
            step.partial[:, part, :, -1] = part_logits.logsumexp(-1)


def _write(new: torch.Tensor, cached: torch.Tensor, slots: torch.Tensor) -> None:
    """Padded rows write what the first row writes, where it does; if that is padded too, what is there already."""
    rows = cached.flatten(0, 1)
    live, target = slots >= 0, slots[:1].clamp_min(0)
    first = torch.where(live[:1, None, None], new[:1], rows.index_select(0, target))
    rows.index_copy_(0, torch.where(live, slots, target), torch.where(live[:, None, None], new, first))


def plan_of(seq_lens_cpu: torch.Tensor) -> torch.Tensor:
    """[R, NUM_SPLITS, 2] i32, from lengths on the host."""
    middle = (seq_lens_cpu + 1) // 2
    ends = [(torch.zeros_like(middle), middle), (middle, seq_lens_cpu)]
    return torch.stack([torch.stack(part, 1) for part in ends], 1).to(torch.int32)


def _partial_shape(spec: AttentionSpec, rows: int) -> Sequence[int]:
    return rows, NUM_SPLITS, spec.num_qo_heads, spec.head_dim_vo + 1


class ToyBackend(AttentionBackend):
    """Decode rows of one token, float32, NHD."""

    contract = (1, 0)
    name = "TOY"
    impl_cls = ToyImpl
    metadata_cls = ToyMetadata
    builder_cls = ToyMetadataBuilder
    state_cls = ToyState

    @staticmethod
    def capabilities() -> Capabilities:
        f32 = frozenset({torch.float32})
        return Capabilities(frozenset({"cpu"}), f32, f32, cuda_graph=CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)

"""What outlives a step: the context workspace, plans, and the tensors that captured graphs read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attn_backends.backends.mla.metadata import DecodeRows, MLAMetadata, MLAMetadataBuilder, RaggedRows
from attn_backends.backends.mla.options import workspace_tokens
from attn_backends.cache.warm_up import list_cache_writes
from attn_backends.graphs.inputs import GraphInputs
from attn_backends.interface import AttentionState, AttentionStep, GraphState
from attn_backends.kernels.streams import OneStream
from attn_backends.kernels.warm_up import compile_listed, list_merges
from attn_backends.machine import HAS_TRITON, Progress
from attn_backends.spec import MLASpec, PlanGroup

if TYPE_CHECKING:
    from attn_backends.backends.mla.prefill import VarlenPlan, VarlenPrefill


@dataclass(frozen=True)
class MLAStep(AttentionStep[MLAMetadata]):
    """A step with what the state planned for its rows, and room for a chunk of context."""

    plan: Any  # of the decode rows; None without any
    prefill_plans: tuple[Any, ...]  # of `prefill.new`, then of each chunk; empty without prefill rows
    workspace: torch.Tensor  # [tokens, latent_dim] of the cache's dtype


class MLAGraphState(GraphState[MLAMetadata, MLAStep]):
    """The state of one captured size: views of shared buffers, and a plan a group, made when its graph is captured."""

    inputs: GraphInputs

    def __init__(self, parent: MLAState, num_rows: int, query_len: int) -> None:
        super().__init__(parent, num_rows, query_len)
        self.parent = parent
        idle = torch.ones(self.num_tokens, dtype=torch.bool, device=self.device)
        self._tensors = self.inputs.of(num_rows, self.num_tokens) | {"idle": idle}
        self._rows = DecodeRows(
            num_rows=num_rows,
            query_len=query_len,
            page_table=self._tensors["page_table"],
            seq_lens=self._tensors["seq_lens"],
            seq_lens_cpu=torch.zeros(num_rows, dtype=torch.int32, device="cpu"),
            idle=idle,
        )
        self._plans: dict[int, Any] = {}

    def idle_metadata(self, group_index: int) -> MLAMetadata:
        slots, size = self._tensors["slot_mapping"], (self.num_rows, self.num_tokens)
        return self.parent.metadata_cls.of_graph(group_index, slots, *size, decode=self._rows, prefill=None)

    def begin_forward(self, metadata: MLAMetadata) -> MLAStep:
        self.parent.stream.check()
        return super().begin_forward(metadata)

    def replan(self, metadata: MLAMetadata) -> MLAStep:
        group, given = metadata.group_index, metadata.decode
        assert given is not None  # it was filled in
        planned_for = replace(self._rows, seq_lens_cpu=given.seq_lens_cpu)
        self._plans[group] = self.parent.plan_decode(self.parent.specs[group], planned_for, self._plans.get(group))
        return self.parent.step(self.idle_metadata(group), self._plans[group])

    def get_graph_input_buffers(self, metadata: MLAMetadata) -> dict[str, torch.Tensor]:
        return self._tensors

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: MLAMetadata) -> None:
        rows = metadata.decode
        if rows is None or rows.idle is None:
            raise ValueError("this metadata is for eager steps: build it with for_graph=True")
        buffers["idle"].copy_(rows.idle)
        self.inputs.fill(buffers, metadata.slot_mapping, rows.seq_lens, rows.page_table)


class MLAState(AttentionState[MLAMetadata]):
    """One workspace for all layers, as they run one after the other. A backend that plans overrides `plan_…`.

    Steps and graphs share workspaces, so all begin on one stream (see `move_to_current_stream`).
    """

    graph_cls = MLAGraphState
    metadata_cls: ClassVar[type[MLAMetadata]] = MLAMetadata
    step_cls: ClassVar[type[MLAStep]] = MLAStep  # what `begin_forward` returns
    starts_early: ClassVar[bool] = False  # the impl's

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.specs = {group.index: mla_spec(group) for group in self.groups}
        self._num_tokens = workspace_tokens(self.options, self.limits)
        row_bytes = max(spec.latent_dim * spec.cache_dtype.itemsize for spec in self.specs.values())
        self.workspace = torch.empty(self._num_tokens * row_bytes, dtype=torch.uint8, device=self.device)
        self.stream = OneStream(self.backend_name, self.device)
        self.prefills = {spec: self.make_prefill(spec) for spec in self.specs.values()}

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> Any:
        """What the kernel wants to know of decode rows before it runs; layers find it in `MLAStep.plan`.

        Args:
            spec: of the layers; no two plan groups have the same.
            rows: in a graph (`rows.idle` is not None) its persistent tensors, filled already. What is planned then may
                take host lengths into account, but no tensor may change its shape.
            held: None for an eager step and before a graph is captured. Else what this returned then: fill its tensors
                in place, and return it.
        """
        return None

    def make_prefill(self, spec: MLASpec) -> VarlenPrefill | None:
        """Launches of ours for the prefills of layers; None where they are attended row by row."""
        if not HAS_TRITON:
            return None
        from attn_backends.backends.mla.prefill import VarlenPrefill, suits_varlen_kernel

        return VarlenPrefill(spec, self.device) if suits_varlen_kernel(spec, self.device) else None

    def plan_prefill(self, spec: MLASpec, rows: RaggedRows) -> VarlenPlan | Any:
        """What attends these rows in `MLAImpl._prefill`, by its `attend(ExpandedTensors)`; None: row by row. Plans of
        one step live side by side."""
        prefill = self.prefills[spec]
        return None if prefill is None else prefill.plan(rows)

    def move_to_current_stream(self) -> None:
        self.stream.move()

    def begin_forward(self, metadata: MLAMetadata) -> MLAStep:
        self.stream.check()
        spec, prefill = self.specs[metadata.group_index], metadata.prefill
        if prefill is not None and (launches := self.prefills[spec]) is not None:
            launches.clear()
        plan = None if metadata.decode is None else self.plan_decode(spec, metadata.decode, None)
        ragged = () if prefill is None else (prefill.new, *(chunk.rows for chunk in prefill.chunks))
        return self.step(metadata, plan, tuple(self.plan_prefill(spec, rows) for rows in ragged))

    def step(self, metadata: MLAMetadata, plan: Any, prefill_plans: tuple[Any, ...] = ()) -> MLAStep:
        spec = self.specs[metadata.group_index]
        num_bytes = self._num_tokens * spec.latent_dim * spec.cache_dtype.itemsize
        workspace = self.workspace[:num_bytes].view(spec.cache_dtype).view(-1, spec.latent_dim)
        return self.step_cls(metadata, plan, prefill_plans, workspace)

    def list_launches(self) -> None:
        """Launch, in a listing, what of ours steps can launch: rows written, products around decodes, prefills, and
        parts of a context joined."""
        from attn_backends.backends.mla.absorption_triton import list_products

        list_cache_writes(self.specs.values(), self.cache)
        list_merges(self.specs.values(), torch.float32)
        longest = self.limits.max_num_requests * MLAMetadataBuilder.decode_threshold
        for spec, prefill in self.prefills.items():
            most_tokens = min(longest, self.limits.max_num_tokens)
            list_products(spec, most_tokens, self.device, starts_early=self.starts_early)
            if prefill is not None:
                prefill.list_launches()

    def warm_up(self, progress: Progress | None = None) -> None:
        compile_listed(self.device, self.list_launches, progress)


def mla_spec(group: PlanGroup[Any]) -> MLASpec:
    if not isinstance(group.spec, MLASpec):
        raise TypeError(f"layers {group.layers[:3]} are {type(group.spec).__name__}; this state is for MLASpec")
    return group.spec

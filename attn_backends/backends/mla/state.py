"""What outlives a step: the context workspace, plans, and the tensors that captured graphs read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_backends.backends.mla.metadata import DecodeRows, MLAMetadata, RaggedRows, graph_metadata
from attn_backends.backends.mla.options import workspace_tokens
from attn_backends.cache.warm_up import list_cache_writes
from attn_backends.graphs.inputs import GraphInputs, fill_together
from attn_backends.interface import AttentionState, AttentionStep
from attn_backends.interface.state import CapturingState
from attn_backends.kernels.streams import OneStream
from attn_backends.kernels.warm_up import compile_listed, list_merges
from attn_backends.machine import Progress
from attn_backends.spec import MLASpec, PlanGroup
from attn_backends.step.buffers import StepBuffers


@dataclass(frozen=True)
class MLAStep(AttentionStep[MLAMetadata]):
    """A step with what the state planned for its rows, and room for a chunk of context."""

    plan: Any  # of the decode rows; None without any
    prefill_plans: tuple[Any, ...]  # of `prefill.new`, then of each chunk; empty without prefill rows
    workspace: torch.Tensor  # [tokens, latent_dim] of the cache's dtype


class MLAState(CapturingState[MLAMetadata, "MLAGraphState"]):
    """One workspace for all layers, as they run one after the other. A backend that plans overrides `plan_…`.

    Steps and graphs share workspaces, so all begin on one stream (see `move_to_current_stream`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.specs = {group.index: mla_spec(group) for group in self.groups}
        self._num_tokens = workspace_tokens(self.options, self.limits)
        row_bytes = max(spec.latent_dim * spec.cache_dtype.itemsize for spec in self.specs.values())
        self.workspace = torch.empty(self._num_tokens * row_bytes, dtype=torch.uint8, device=self.device)
        self.stream = OneStream(self.backend_name, self.device)
        self._graphs: _GraphBuffers | None = None  # kept for good once graphs were captured

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

    def plan_prefill(self, spec: MLASpec, rows: RaggedRows) -> Any:
        """The same for `MLAImpl._prefill`, which is given it with these rows. Plans of one step live side by side."""
        return None

    def move_to_current_stream(self) -> None:
        self.stream.move()

    def begin_forward(self, metadata: MLAMetadata) -> MLAStep:
        self.stream.check()
        spec, prefill = self.specs[metadata.group_index], metadata.prefill
        plan = None if metadata.decode is None else self.plan_decode(spec, metadata.decode, None)
        ragged = () if prefill is None else (prefill.new, *(chunk.rows for chunk in prefill.chunks))
        return self.step(metadata, plan, tuple(self.plan_prefill(spec, rows) for rows in ragged))

    def step(self, metadata: MLAMetadata, plan: Any, prefill_plans: tuple[Any, ...] = ()) -> MLAStep:
        spec = self.specs[metadata.group_index]
        num_bytes = self._num_tokens * spec.latent_dim * spec.cache_dtype.itemsize
        workspace = self.workspace[:num_bytes].view(spec.cache_dtype).view(-1, spec.latent_dim)
        return MLAStep(metadata, plan, prefill_plans, workspace)

    def list_launches(self) -> None:
        """Launch, in a listing, what of ours steps can launch: rows written, and parts of a context joined."""
        list_cache_writes(self.specs.values(), self.cache)
        list_merges(self.specs.values(), torch.float32)

    def warm_up(self, progress: Progress | None = None) -> None:
        compile_listed(self.device, self.list_launches, progress)

    # Graphs.

    def hold_inputs(self, max_batch_size: int, inputs: StepBuffers | None) -> None:
        if self._graphs is None or not self._graphs.inputs.serves(max_batch_size, inputs):
            self._graphs = _GraphBuffers(self, max_batch_size, inputs)

    def make_clone(self, batch_size: int, query_len: int) -> MLAGraphState:
        assert self._graphs is not None  # while rows are held
        return MLAGraphState(self, self._graphs, batch_size, query_len)

    def idle_metadata_of(self, clone: MLAGraphState, group_index: int) -> MLAMetadata:
        return clone.metadata(group_index)


def mla_spec(group: PlanGroup[Any]) -> MLASpec:
    if not isinstance(group.spec, MLASpec):
        raise TypeError(f"layers {group.layers[:3]} are {type(group.spec).__name__}; this state is for MLASpec")
    return group.spec


class _GraphBuffers:
    """What captured kernels read of a batch. All sizes and groups share it: one size is replayed at a time, and the
    groups of a model have one page table."""

    def __init__(self, state: MLAState, max_num_rows: int, shared: StepBuffers | None) -> None:
        self.inputs = GraphInputs(state.cache, state.limits, state.device, max_num_rows, shared)
        self.idle = torch.ones(state.limits.max_num_tokens, dtype=torch.bool, device=state.device)


class MLAGraphState(AttentionState[MLAMetadata]):
    """The state of one captured size: views of shared buffers, which every `begin_forward` fills, and a plan a group.

    Columns of the page table beyond a batch's own keep ids of earlier batches: lengths say what is valid.
    """

    def __init__(self, parent: MLAState, buffers: _GraphBuffers, num_rows: int, query_len: int) -> None:
        super().__init__(parent.groups, parent.cache, parent.limits, parent.device, options=parent.options)
        self.parent = parent
        self._inputs = buffers.inputs
        self._slot_mapping = buffers.inputs.slot_mapping[: num_rows * query_len]
        self._rows = DecodeRows(
            num_rows=num_rows,
            query_len=query_len,
            page_table=buffers.inputs.page_table[:num_rows],
            seq_lens=buffers.inputs.seq_lens[:num_rows],
            seq_lens_cpu=torch.zeros(num_rows, dtype=torch.int32),
            idle=buffers.idle[: num_rows * query_len],
        )
        self._plans: dict[int, Any] = {}

    def metadata(self, group_index: int) -> MLAMetadata:
        return graph_metadata(group_index, self._slot_mapping, self._rows)

    def begin_forward(self, metadata: MLAMetadata) -> MLAStep:
        """Fill what the graph reads, and plan over it.

        Raises:
            ValueError: the metadata is of another size, or not of a graph's form.
            RuntimeError: the steps before began on another stream.
        """
        self.parent.stream.check()
        rows, given = self._rows, metadata.decode
        if given is None or given.idle is None or (given.num_rows, given.query_len) != (rows.num_rows, rows.query_len):
            raise ValueError(
                f"this graph was captured for {rows.num_rows} rows of {rows.query_len} tokens, and the metadata has "
                f"{metadata.num_tokens} tokens: pad the batch to the captured size, and build it with for_graph=True"
            )
        self.prepare_graph_input_buffers(self.get_graph_input_buffers(metadata), metadata)
        group = metadata.group_index
        planned_for = replace(rows, seq_lens_cpu=given.seq_lens_cpu)
        self._plans[group] = self.parent.plan_decode(self.parent.specs[group], planned_for, self._plans.get(group))
        return self.parent.step(self.metadata(group), self._plans[group])

    def get_graph_input_buffers(self, metadata: MLAMetadata) -> dict[str, torch.Tensor]:
        return _inputs(self.metadata(metadata.group_index))

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: MLAMetadata) -> None:
        given = _inputs(metadata)
        buffers["idle"].copy_(given.pop("idle"))
        if self._inputs.holds(metadata.slot_mapping):
            return
        table = given["page_table"]
        filled = buffers | {"page_table": buffers["page_table"][:, : table.shape[1]]}
        fill_together([filled[name] for name in given], [*given.values()])


def _inputs(metadata: MLAMetadata) -> dict[str, torch.Tensor]:
    rows = metadata.decode
    if rows is None or rows.idle is None:
        raise ValueError("this metadata is for eager steps: build it with for_graph=True")
    return {"page_table": rows.page_table, "seq_lens": rows.seq_lens, "slot_mapping": metadata.slot_mapping,
            "idle": rows.idle}  # fmt: skip

"""What outlives a step: how decode's work is cut, what its parts leave for the last of them, and graphs' tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from attn_backends.backends.triton.launch import Schedule, SplitPlan
from attn_backends.backends.triton.metadata import TritonMetadata
from attn_backends.backends.triton.rules import can_upcast
from attn_backends.backends.triton.tuning import DecodeTile, TritonOptions, decode_tile
from attn_backends.backends.triton.variants import variants
from attn_backends.backends.triton.workspace import DECODE_TOKENS, Workspace, decode_need, largest_need
from attn_backends.graphs.inputs import GraphInputs, fill_together
from attn_backends.graphs.recorder import CudaRecorder, without_python
from attn_backends.interface import AttentionStep
from attn_backends.interface.state import CapturingState
from attn_backends.kernels.launch import machine_of, num_multiprocessors, shared_memory
from attn_backends.kernels.streams import PerStream
from attn_backends.kernels.variants import Variant, compile_variants
from attn_backends.machine import Progress
from attn_backends.spec import AttentionSpec
from attn_backends.step.buffers import StepBuffers

_SCHEDULES = 128  # of eager steps that are kept, of tens of kilobytes each


@dataclass(frozen=True)
class TritonStep(AttentionStep[TritonMetadata]):
    """A step, and how its decode rows are cut."""

    schedule: Schedule | None  # None: nothing is decoded
    workspace: Workspace


class TritonState(CapturingState[TritonMetadata, "TritonGraphState"]):
    """A workspace for the parts of split rows, sized by the multiprocessors and the layers' heads, not by the context.

    A program leaves (head_dim_vo + 2) * 4 bytes for each of its queries; about 4 / 3 as many programs can have parts
    as the GPU holds at once (see `split_kv.schedule_kernel`). Layers over a cache of 8 bits have room on Hopper for
    keys and values of 16 bits too, `TritonOptions.upcast_bytes` at most.

    A step takes the workspace of the stream on which it began, so steps on several streams do not meet. The first
    stream's is made at once, another's when a step begins there. Captured graphs share one of their own.
    """

    backend_name = "TRITON"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_sms = num_multiprocessors(self.device)
        self._shared_memory = shared_memory(self.device)
        self._specs = {group.index: group.spec for group in self.groups}
        self.workspace = self._make_workspace(self._upcast_bytes())
        self._workspaces = PerStream(self.device, lambda: self._make_workspace(self._upcast_bytes()))
        self._graph_workspace: Workspace | None = None  # kept for good once graphs were captured
        self._schedule = lru_cache(maxsize=_SCHEDULES)(self.make_schedule)  # of eager steps, which repeat their shapes
        self._recorder = CudaRecorder() if self.device.type == "cuda" else None
        self._inputs: GraphInputs | None = None  # kept for good once graphs were captured

    def begin_forward(self, metadata: TritonMetadata) -> TritonStep:
        workspace = self._workspaces.of_current(self.workspace)
        if metadata.num_decode_rows < metadata.num_rows:
            workspace.tiles.zero_()
        if not metadata.num_decode_rows:
            return TritonStep(metadata, None, workspace)
        schedule = self._schedule(metadata.group_index, metadata.num_decode_rows, metadata.max_decode_len, workspace)
        schedule.work_list.fill(metadata.seq_lens, metadata.query_start_loc)
        return TritonStep(metadata, schedule, workspace)

    def make_schedule(self, group: int, num_rows: int, query_len: int, workspace: Workspace) -> Schedule:
        spec = self._specs[group]
        tile = self._tile(spec, num_rows, query_len)
        workspace.check(decode_need(spec, tile, num_rows, query_len, self._num_sms), num_rows, query_len)
        return Schedule(spec, tile, num_rows, query_len, self._num_sms, workspace.counters)

    def _tile(self, spec: AttentionSpec, num_rows: int, query_len: int) -> DecodeTile:
        query_rows = SplitPlan.of(spec, query_len).block_m
        return decode_tile(spec, self.cache, num_rows, query_rows, self.options, self._shared_memory)

    def variants(self) -> list[Variant]:
        """The compiled forms of kernels that steps within the limits ask for."""
        specs = [group.spec for group in self.groups]
        return variants(specs, self.cache, self.limits, self.device, self.options, machine_of(self.device))

    def warm_up(self, progress: Progress | None = None) -> None:
        if self.device.type == "cuda":
            compile_variants(self.variants(), self.device, progress)

    # Graphs.

    def hold_inputs(self, max_batch_size: int, inputs: StepBuffers | None) -> None:
        if self._inputs is None or not self._inputs.serves(max_batch_size, inputs):
            self._inputs = GraphInputs(self.cache, self.limits, self.device, max_batch_size, inputs)
        self._graph_workspace = self._graph_workspace or self._make_workspace(upcast_bytes=0)  # no prefills

    def make_clone(self, batch_size: int, query_len: int) -> TritonGraphState:
        assert self._inputs is not None  # while rows are held
        assert self._graph_workspace is not None
        if query_len > DECODE_TOKENS:
            raise ValueError(
                f"graphs of TRITON serve up to {DECODE_TOKENS} query tokens a row, and {query_len} were asked for: "
                "run longer rows eager"
            )
        return TritonGraphState(self, self._inputs, self._graph_workspace, batch_size, query_len)

    def idle_metadata_of(self, clone: TritonGraphState, group_index: int) -> TritonMetadata:
        return clone.steps[group_index].metadata

    def _make_workspace(self, upcast_bytes: int) -> Workspace:
        specs = self._specs.values()
        need = largest_need(specs, self.cache, self.limits, self.options, self._num_sms, self._shared_memory)
        return Workspace.of(need, upcast_bytes, self.device)

    def _upcast_bytes(self) -> int:
        options = self.options or TritonOptions()
        specs = [spec for spec in self._specs.values() if can_upcast(spec, options, self.device)]
        key_bytes = (spec.num_kv_heads * (spec.head_dim + spec.head_dim_vo) * spec.dtype.itemsize for spec in specs)
        most = self.limits.max_num_requests * self.limits.max_model_len * max(key_bytes, default=0)
        return min(options.upcast_bytes, most) // 16 * 16


class TritonGraphState(TritonState):
    """The state of one captured size: a step a group, over the tensors that all sizes share."""

    def __init__(
        self, parent: TritonState, inputs: GraphInputs, workspace: Workspace, num_rows: int, query_len: int
    ) -> None:
        CapturingState.__init__(self, parent.groups, parent.cache, parent.limits, parent.device, options=parent.options)
        self.num_rows, self.num_tokens = num_rows, num_rows * query_len
        self._inputs = inputs
        self._tensors = {
            "slot_mapping": inputs.slot_mapping[: self.num_tokens],
            "page_table": inputs.page_table[:num_rows],
            "seq_lens": inputs.seq_lens[:num_rows],
        }
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.device) * query_len
        self.steps = {
            group.index: TritonStep(
                self._metadata(group.index, starts, query_len),
                parent.make_schedule(group.index, num_rows, query_len, workspace),
                workspace,
            )
            for group in self.groups
        }
        self._recorder = parent._recorder
        self._relist = {index: self._relister(step) for index, step in self.steps.items()}

    def begin_forward(self, metadata: TritonMetadata) -> TritonStep:
        if not metadata.for_graph or metadata.num_tokens != self.num_tokens or metadata.num_rows != self.num_rows:
            raise ValueError(
                f"this graph was captured for {self.num_rows} rows and {self.num_tokens} tokens, and the metadata has "
                f"{metadata.num_rows} and {metadata.num_tokens}: pad the batch to the captured size, and build it with "
                "for_graph=True"
            )
        step = self.steps[metadata.group_index]
        self.prepare_graph_input_buffers(self._tensors, metadata)
        self._relist[metadata.group_index]()
        return step

    def get_graph_input_buffers(self, metadata: TritonMetadata) -> dict[str, torch.Tensor]:
        return self._tensors

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: TritonMetadata) -> None:
        slots, table, lens = buffers.values()
        given = metadata.page_table
        if given is None:
            raise ValueError("this metadata reads no cache: run it eager, and build graphs' with for_graph=True")
        if self._inputs is not None and self._inputs.holds(metadata.slot_mapping):
            return
        if given.shape[1] != table.shape[1]:
            table = table[:, : given.shape[1]]
            given = given[:, : table.shape[1]]
        fill_together([slots, table, lens], [metadata.slot_mapping, given, metadata.seq_lens])

    def _relister(self, step: TritonStep) -> Callable[[], object]:
        """What lists a group's work anew, in place. Triton's launch of a kernel takes the host longer than a graph."""
        schedule, lens, starts = step.schedule, self._tensors["seq_lens"], step.metadata.query_start_loc
        assert schedule is not None  # as all rows of a graph are decoded

        def again() -> torch.Tensor:
            schedule.work_list.fill(lens, starts)
            return schedule.work_list.work_items

        return without_python(again, [schedule.work_list, lens, starts], self._recorder)

    def _metadata(self, group_index: int, starts: torch.Tensor, query_len: int) -> TritonMetadata:
        num_rows, num_tokens = self.num_rows, self.num_tokens
        return TritonMetadata(
            group_index=group_index,
            num_decodes=num_rows,
            num_decode_tokens=num_tokens,
            num_prefills=0,
            num_prefill_tokens=0,
            common_prefix_len=0,
            is_profile_run=False,
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decode_rows=num_rows,
            num_new_kv=num_tokens,
            num_decode_new_kv=num_tokens,
            max_decode_len=query_len,
            num_upcast_keys=0,
            prefill_share=None,
            prefills_are_prompts=False,
            for_graph=True,
            max_seq_len=self.limits.max_model_len,
            query_start_loc=starts,
            key_start_loc=starts,
            **self._tensors,
        )

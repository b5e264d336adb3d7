"""What outlives a step: workspaces, plans, and the tensors that captured graphs read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Literal, get_args

import torch

from attn_backends.backends.flashinfer.kernel_choice import decodes_on_tensor_cores, reject_options, serves_fa3
from attn_backends.backends.flashinfer.library import Library, Workspaces, WrapperTensors
from attn_backends.backends.flashinfer.metadata import (
    FlashInferGraphInputs,
    FlashInferMetadata,
    FlashInferMetadataBuilder,
    Rows,
    graph_metadata,
    list_prefix_pages,
)
from attn_backends.backends.flashinfer.options import FlashInferOptions
from attn_backends.backends.flashinfer.plans import DecodePlan, Plan, PrefillPlan, RaggedPlan
from attn_backends.backends.flashinfer.workspace import ALIGNMENT, Need, check_workspace, eager_need, graph_need
from attn_backends.cache.warm_up import list_cache_writes
from attn_backends.graphs.inputs import GraphTensors, fill_together
from attn_backends.interface import AttentionState, GraphState, PlannedStep
from attn_backends.interface.capabilities import Rejection, Unsupported
from attn_backends.interface.plans import plan_all_kinds, replaced_plan
from attn_backends.kernels.streams import OneStream
from attn_backends.kernels.warm_up import compile_listed
from attn_backends.machine import Progress, num_multiprocessors, refuse_while_capturing
from attn_backends.spec import AttentionSpec, PlanGroup
from attn_backends.step.staging import HostRing

FA3_MIN_QUERY_LEN = 64  # of the average row: below, fa2 packs a KV head's query heads into its tiles and fa3 does not

Kind = Literal["decode", "prefill fa2", "prefill fa3", "ragged fa2", "ragged fa3", "prefix"]


@dataclass(frozen=True)
class FlashInferStep(PlannedStep[FlashInferMetadata]):
    """A step and its plans, each the one that its wrapper holds; a kind of rows that the step lacks has none."""

    decode: Plan | None
    prefill: Plan | None
    prefix: Plan | None
    _number: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_number", self._plan_number())

    def check_plan(self) -> None:
        if self._plan_number() != self._number:
            raise replaced_plan(FlashInferState.backend_name, self.metadata.group_index)

    def _plan_number(self) -> int:
        """Numbers of plans only grow: their sum is what it was while no wrapper was planned again."""
        decode, prefill, prefix = self.decode, self.prefill, self.prefix
        number = 0 if decode is None else decode.number
        number += 0 if prefill is None else prefill.number
        return number + (0 if prefix is None else prefix.number)


class FlashInferGraphState(GraphState[FlashInferMetadata, FlashInferStep]):
    """The state of one captured size: a plan a group, over the shared buffers that every `begin_forward` fills."""

    inputs: FlashInferGraphInputs

    def __init__(self, parent: FlashInferState, num_rows: int, query_len: int) -> None:
        super().__init__(parent, num_rows, query_len)
        self.is_decode = query_len == 1
        self._stream = parent.stream
        self._inputs_of = {group.index: self.inputs.of_layers(group.spec) for group in self.groups}
        self._starts_cpu = torch.arange(num_rows + 1, dtype=torch.int32, device="cpu") * query_len
        starts, need = self._starts_cpu.to(self.device), parent.make_graph_room(num_rows, query_len)
        kind: Kind = "decode" if self.is_decode else "prefill fa2"
        self._tensors = {group.index: self.inputs.of_group(group, num_rows, starts) for group in self.groups}
        self._plans = {group: parent.make_plan(group, kind, need, tensors) for group, tensors in self._tensors.items()}
        self.steps = {group.index: self._static_step(group) for group in self.groups}

    def begin_forward(self, metadata: FlashInferMetadata) -> FlashInferStep:
        refuse_while_capturing(self.device, self.backend_name)
        self._stream.check()
        return super().begin_forward(metadata)

    def replan(self, metadata: FlashInferMetadata) -> FlashInferStep:
        rows = metadata.decode or metadata.prefill
        assert rows is not None  # they were filled in
        self._plans[metadata.group_index](rows)
        return self.steps[metadata.group_index]

    def get_graph_input_buffers(self, metadata: FlashInferMetadata) -> dict[str, torch.Tensor]:
        csr = self._tensors[metadata.group_index].csr
        return {
            "slot_mapping": self._slots(metadata.group_index), "paged_kv_indptr": csr.indptr,
            "paged_kv_last_page_len": csr.last_page_len, "paged_kv_indices": csr.indices,
        }  # fmt: skip

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: FlashInferMetadata) -> None:
        rows = metadata.decode or metadata.prefill
        if rows is None or rows.csr is None:
            raise ValueError("this metadata is for eager steps: build it with for_graph=True")
        csr, (slots, indptr, last_page_len, indices) = rows.csr, buffers.values()
        filled, given = [], []
        if not self._inputs_of[metadata.group_index].holds(metadata.slot_mapping):
            filled, given = [slots], [metadata.slot_mapping]
        if csr.indptr.data_ptr() != indptr.data_ptr():  # of this group's window, or not of a table
            num_pages = rows.num_pages
            if num_pages > len(indices):
                raise ValueError(f"the batch has {num_pages} pages; graphs were captured for at most {len(indices)}")
            filled += [indptr, last_page_len, indices[:num_pages]]
            given += [csr.indptr, csr.last_page_len, csr.indices[:num_pages]]
        if filled:
            fill_together(filled, given)

    def idle_metadata(self, group_index: int) -> FlashInferMetadata:
        """Full pages, as many a row as its tokens need, to capture with."""
        csr, num_pages = self._tensors[group_index].csr, self._idle_pages
        csr.indptr.copy_(torch.arange(self.num_rows + 1, dtype=torch.int32, device="cpu") * num_pages)
        csr.indices[: self.num_rows * num_pages].zero_()
        csr.last_page_len.fill_(self.cache.page_size)
        return self._idle_metadata(group_index)

    @property
    def _idle_pages(self) -> int:
        """Pages that the tokens of a row fill."""
        return -(-self.query_len // self.cache.page_size)

    def _idle_metadata(self, group_index: int) -> FlashInferMetadata:
        """Over tensors that may hold a batch already, which is left as it is."""
        tensors, num_rows, longest = self._tensors[group_index], self.num_rows, self._idle_pages * self.cache.page_size
        indptr_cpu = torch.arange(num_rows + 1, dtype=torch.int32, device="cpu") * self._idle_pages
        lens = torch.full((num_rows,), longest, dtype=torch.int32, device="cpu")
        starts, csr = (tensors.qo_indptr, self._starts_cpu), tensors.csr
        rows = Rows(self.num_tokens, *starts, csr, csr.indptr, indptr_cpu, lens, longest, num_rows, True)
        return graph_metadata(group_index, self._slots(group_index), rows, self.is_decode)

    def _slots(self, group: int) -> torch.Tensor:
        return self._inputs_of[group].slots(self.num_tokens)

    def _static_step(self, group: PlanGroup[Any]) -> FlashInferStep:
        """The step that every batch is filled into: what layers read is where it stays, and lengths are in the plan."""
        plan = self._plans[group.index]
        decode, prefill = (plan, None) if self.is_decode else (None, plan)
        return FlashInferStep(self._idle_metadata(group.index), group.spec, decode, prefill, None)


class FlashInferState(AttentionState[FlashInferMetadata]):
    """One float workspace for all layers, as they run one after the other; a schedule and a wrapper a plan.

    Args:
        as for every state.

    Raises:
        ValueError: `workspace_bytes` is too small for the limits, or an option that the layers cannot be served with.
    """

    backend_name = "FLASHINFER"
    graph_cls = FlashInferGraphState
    make_library: ClassVar[type[Library]] = Library  # another one in tests

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.library = self.make_library(num_multiprocessors(self.device))
        self.options = options = self.options or FlashInferOptions()
        self._specs = {group.index: group.spec for group in self.groups}
        refused = [each for spec in self._specs.values() for each in reject_options(spec, self.device, options)]
        if refused:
            raise ValueError("; ".join(dict.fromkeys(map(str, refused))))
        split, page_size = self.options.fixed_split_size, self.cache.page_size
        needs = [eager_need(s, self.limits, self.library.num_sms, split, page_size) for s in self._specs.values()]
        self.need = reduce(or_, needs)
        self._kinds = tuple((group, kind) for group in self._specs for kind in get_args(Kind))
        self.float_workspace = self._float_workspace(self.need)
        self._int_workspace: torch.Tensor | None = None  # None: every plan has its own
        self.stream = OneStream(self.backend_name, self.device)
        self._ring = self._host_ring(self.need)
        self._plans: dict[tuple[int, Kind], Plan] = {}

    def begin_forward(self, metadata: FlashInferMetadata) -> FlashInferStep:
        """Plan a step's rows.

        Raises:
            RuntimeError: a graph is being captured: plan before, the graph reads what was planned. Or the steps before
                began on another stream.
        """
        refuse_while_capturing(self.device, self.backend_name)
        self.stream.check()
        return self._plan_step(metadata)

    def _plan_step(self, metadata: FlashInferMetadata) -> FlashInferStep:
        group = metadata.group_index
        decode = prefill = prefix = None
        if metadata.decode is not None:
            decode = self._planned(group, "decode", metadata.decode)
        if metadata.prefill is not None:
            prefill = self._planned(group, self._prefill_kind(self._specs[group], metadata.prefill), metadata.prefill)
        if metadata.prefix is not None:
            prefix = self._planned(group, "prefix", metadata.prefix)
        return FlashInferStep(metadata, self._specs[group], decode, prefill, prefix)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile what is launched beside the library, and plan a batch of every kind but shared prefixes, which take
        the kernels of prefills: that is when the library chooses kernels, and loads or compiles them."""
        compile_listed(self.device, self._list_launches, progress)
        self._choose_kernels(progress)

    def _choose_kernels(self, progress: Progress | None) -> None:
        lens = (1, 2, FA3_MIN_QUERY_LEN)
        plan_all_kinds(self, FlashInferMetadataBuilder, lens, self._plan_step, progress)

    def _list_launches(self) -> None:
        list_cache_writes(self._specs.values(), self.cache)
        list_prefix_pages(self.limits.max_num_requests, self.cache.page_size)

    def move_to_current_stream(self) -> None:
        self.stream.move()

    @property
    def int_workspace_bytes(self) -> int:
        """What `reset_workspace_buffer` needs for schedules: a part for each plan group and kind of rows."""
        return self._int_part_bytes * len(self._kinds)

    def reset_workspace_buffer(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor | None = None) -> None:
        """Use other workspaces, such as those that an engine shares between its libraries. What was planned is lost.

        Args:
            float_workspace: [`need.float_bytes` or more] u8 on the device, for results of parts of a row.
            int_workspace: [`int_workspace_bytes` or more] u8 on the device, for schedules; None: one a plan.

        Raises:
            ValueError: one is smaller than needed, or elsewhere.
            RuntimeError: graphs were captured over the present ones.
        """
        if self.inputs is not None:
            raise RuntimeError("captured graphs read the present workspaces: replace them before graphs are captured")
        check_workspace("float_workspace", float_workspace, self.need.float_bytes, self.device)
        if int_workspace is not None:
            check_workspace("int_workspace", int_workspace, self.int_workspace_bytes, self.device)
            int_workspace = int_workspace.view(torch.uint8).flatten()
        self.float_workspace, self._int_workspace = float_workspace, int_workspace
        for plan in self._plans.values():
            plan.number += 1
        self._plans = {}

    @property
    def _int_part_bytes(self) -> int:
        return -(-self.need.int_bytes // ALIGNMENT) * ALIGNMENT

    def _ints(self, group: int, kind: Kind, need: Need, in_graph: bool) -> torch.Tensor:
        """The int workspace of one plan."""
        if self._int_workspace is None or in_graph:
            return torch.empty(need.int_bytes, dtype=torch.uint8, device=self.device)
        start = self._kinds.index((group, kind)) * self._int_part_bytes
        return self._int_workspace[start : start + need.int_bytes]

    # Graphs.

    def make_inputs(self, max_batch_size: int, shared: GraphTensors | None) -> FlashInferGraphInputs:
        if self.options.fixed_split_size is not None:
            hint = "Leave fixed_split_size out of backend_options, or set graphs.mode to none."
            got = str(self.options.fixed_split_size)
            raise Unsupported(self.backend_name, [Rejection("fixed_split_size", got, "None in CUDA graphs", hint)])
        return FlashInferGraphInputs(self.groups, self.cache, self.limits, self.device, max_batch_size, shared)

    def make_graph_room(self, num_rows: int, query_len: int) -> Need:
        """What plans of one captured size need, for which there is room afterwards."""
        needs = [graph_need(spec, num_rows, query_len, self.library.num_sms) for spec in self._specs.values()]
        need = reduce(or_, needs)
        if need.float_bytes > self.float_workspace.numel():
            # Graphs of earlier sizes go on with the workspace that they have.
            self.float_workspace = self._float_workspace(need)
        if need.int_bytes > self._ring.hosts_cpu[0].numel() * 4:
            self._ring = self._host_ring(need)
        return need

    # Plans.

    def _planned(self, group: int, kind: Kind, rows: Rows) -> Plan:
        plan = self._plans.get((group, kind))
        if plan is None:
            plan = self._plans[group, kind] = self.make_plan(group, kind, self.need)
        plan(rows)
        return plan

    def make_plan(self, group: int, kind: Kind, need: Need, graph: WrapperTensors | None = None) -> Plan:
        """A plan that nothing is planned in yet, for a graph if it is given the tensors that kernels read there."""
        spec, library, cache = self._specs[group], self.library, self.cache
        workspaces = Workspaces(self.float_workspace, self._ints(group, kind, need, graph is not None))
        kernels = "fa3" if kind.endswith("fa3") else "fa2"
        split = self.options.fixed_split_size
        how = (spec, cache.page_size, self._ring, split, graph is not None)
        if kind == "decode":
            wrapper = library.decode_wrapper(workspaces, cache, decodes_on_tensor_cores(spec, self.options), graph)
            return DecodePlan(library, wrapper, *how)
        if kind.startswith("ragged"):
            split = None if split is None else split * cache.page_size  # its pages are keys
            return RaggedPlan(library, library.ragged_wrapper(workspaces, kernels), spec, 1, self._ring, split, False)
        wrapper = library.prefill_wrapper(workspaces, cache, kernels, graph)
        return PrefillPlan(library, wrapper, *how, causal=spec.causal and kind != "prefix")

    def _prefill_kind(self, spec: AttentionSpec, rows: Rows) -> Kind:
        wanted = self.options.prefill_kernels
        if wanted == "auto":
            long = rows.num_tokens >= FA3_MIN_QUERY_LEN * rows.num_rows
            wanted = "fa3" if long and serves_fa3(spec, self.device, rows.csr is not None, self.options) else "fa2"
        if rows.csr is None:
            return "ragged fa3" if wanted == "fa3" else "ragged fa2"
        return "prefill fa3" if wanted == "fa3" else "prefill fa2"

    def _float_workspace(self, need: Need) -> torch.Tensor:
        given = self.options.workspace_bytes
        if given is not None and given < need.float_bytes:
            raise ValueError(
                f"workspace_bytes is {given}, and these limits need {need.float_bytes} (max_num_tokens "
                f"{self.limits.max_num_tokens}, max_num_requests {self.limits.max_num_requests}, the layers' heads): "
                f"set workspace_bytes to {need.float_bytes} or leave it out"
            )
        return torch.zeros(given or need.float_bytes, dtype=torch.uint8, device=self.device)

    def _host_ring(self, need: Need) -> HostRing:
        # A step plans at most three kinds of rows for each group. An event takes as long as a plan's copy: one for all.
        at_once = 3 * len(self.groups)
        return HostRing(-(-need.int_bytes // 4), self.device, depth=4 * at_once, group=at_once)

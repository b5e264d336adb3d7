"""What outlives a step: who serves which layers, and the tensors that captured graphs read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attn_backends.backends.flash_attn.call import Call, LayerConstants, Rows, Tensors
from attn_backends.backends.flash_attn.fa2 import FlashAttn2, VllmFa2
from attn_backends.backends.flash_attn.fa3 import FlashAttnInterface, VllmFa3
from attn_backends.backends.flash_attn.fa4 import FlashAttn4
from attn_backends.backends.flash_attn.metadata import FlashAttnMetadata, FlashAttnMetadataBuilder, graph_metadata
from attn_backends.backends.flash_attn.options import FlashAttnOptions
from attn_backends.backends.flash_attn.provider import Provider, choose
from attn_backends.cache.warm_up import list_cache_writes, list_quantised_queries
from attn_backends.graphs.inputs import GraphTensors
from attn_backends.graphs.recorder import CudaRecorder, without_python
from attn_backends.interface import AttentionState, GraphState, PlannedStep
from attn_backends.interface.plans import plan_all_kinds
from attn_backends.kernels.warm_up import compile_listed, list_merges
from attn_backends.machine import Progress
from attn_backends.spec import FP8_DTYPES, PlanGroup
from attn_backends.step.buffers import own_tensors

logger = logging.getLogger(__name__)

# Best first, as measured; the last has not been timed, and does not split keys.
PROVIDERS: Sequence[Provider] = (VllmFa3(), FlashAttnInterface(), FlashAttn2(), VllmFa2(), FlashAttn4())
FIRST_QUERY_LENS = (1, 2, 64, 256)  # of rows that are called for before requests come: a tile has 64 to 192 queries


@dataclass(frozen=True)
class FlashAttnStep(PlannedStep[FlashAttnMetadata]):
    """A step, and the calls that attend it."""

    provider: Provider
    calls: tuple[Call, ...]
    prefix: Call | None  # over the shared prefix, whose result joins that of the first call


class FlashAttnGraphState(GraphState[FlashAttnMetadata, FlashAttnStep]):
    """The state of one captured size: the tensors that all sizes share, and a schedule a group.

    Kernels are told the longest length that there can be: how many splits they have room for follows from it, and a
    schedule has the same size at every replay. How many a row takes is worked out on the device, from its own length.
    """

    def __init__(self, parent: FlashAttnState, num_rows: int, query_len: int) -> None:
        super().__init__(parent, num_rows, query_len)
        assert self.inputs is not None  # they are held while graphs are captured
        self.parent = parent
        self._inputs_of = {group.index: self.inputs.of_layers(group.spec) for group in self.groups}
        self._tensors = {group: inputs.of(num_rows, self.num_tokens) for group, inputs in self._inputs_of.items()}
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.device) * query_len
        self._rows = {
            group: Rows(
                num_rows,
                self.num_tokens,
                query_len,
                self.limits.max_model_len,
                starts,
                tensors["seq_lens"],
                tensors["page_table"],
                some_may_lack_keys=True,  # padding
            )
            for group, tensors in self._tensors.items()
        }
        given = [(rows.seq_lens, rows.seq_lens.clone()) for rows in self._rows.values()]  # maybe a batch's already
        for lens, _ in given:
            lens.fill_(1)
        self._schedules = {group: parent.schedule(group, rows) for group, rows in self._rows.items()}
        scheduled = {group: made for group, made in self._schedules.items() if made is not None}
        self._reschedule = {group: self._rescheduler(group, made) for group, made in scheduled.items()}
        for lens, before in given:
            lens.copy_(before)
        self.steps = {group.index: self._static_step(group) for group in self.groups}

    def get_graph_input_buffers(self, metadata: FlashAttnMetadata) -> dict[str, torch.Tensor]:
        schedule, tensors = self._schedules[metadata.group_index], self._tensors[metadata.group_index]
        return tensors if schedule is None else {**tensors, "schedule": schedule}

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: FlashAttnMetadata) -> None:
        """The schedule is made of the lengths that are filled in first."""
        rows, inputs = metadata.rows, self._inputs_of[metadata.group_index]
        if not metadata.for_graph or rows.page_table is None:
            raise ValueError("this metadata is for eager steps: build it with for_graph=True")
        inputs.fill(buffers, metadata.slot_mapping, rows.seq_lens, rows.page_table)
        if self.parent.lends_keys:
            inputs.lend_pages(buffers)
        if "schedule" in buffers:
            self._reschedule[metadata.group_index]()

    def replan_in_place(self) -> dict[int, FlashAttnStep] | None:
        if any(inputs.shared is None for inputs in self._inputs_of.values()):
            return None
        for again in self._reschedule.values():
            again()
        return self.steps

    def _rescheduler(self, group: int, schedule: torch.Tensor) -> Callable[[], object]:
        """What makes a group's schedule anew, in place. The library's own call takes the host long."""

        def again() -> torch.Tensor:
            made = self.parent.schedule(group, self._rows[group])
            assert made is not None  # as it was the first time
            if made.shape != schedule.shape:
                raise RuntimeError(
                    f"a schedule of {tuple(schedule.shape)} numbers was captured, and the library makes one of "
                    f"{tuple(made.shape)} for the same rows: its version changed what a schedule's size follows from"
                )
            return schedule.copy_(made)

        return without_python(again, [self._rows[group], schedule], self.parent.recorder)

    def idle_metadata(self, group_index: int) -> FlashAttnMetadata:
        """Rows of as many keys as tokens, to capture with; over tensors that were given, what these hold."""
        if self._inputs_of[group_index].shared is None:
            self._rows[group_index].seq_lens.fill_(self.query_len)
            self._tensors[group_index]["page_table"].zero_()
        return super().idle_metadata(group_index)

    def _static_step(self, group: PlanGroup[Any]) -> FlashAttnStep:
        """The step that every batch is filled into: what layers read is where it stays."""
        rows, slots = self._rows[group.index], self._tensors[group.index]["slot_mapping"]
        metadata = graph_metadata(group.index, slots, rows)
        lens, parent = self.parent.tot_seq_lens(group.index, rows), self.parent
        call = Call(rows, slice(0, self.num_tokens), self._schedules[group.index], self.options.split_keys, lens)
        return FlashAttnStep(metadata, group.spec, parent.choices[group.index].provider, (call,), None)


class FlashAttnState(AttentionState[FlashAttnMetadata]):
    """One provider a plan group. It owns no workspace: kernels allocate what partial results take.

    Args:
        as for every state.

    Raises:
        Unsupported: no provider serves some layers, or the one that `options.provider` names does not.
    """

    backend_name = "FLASH_ATTN"
    graph_cls = FlashAttnGraphState
    providers: ClassVar[Sequence[Provider]] = PROVIDERS  # others in tests

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = self.options or FlashAttnOptions()
        self._specs = {group.index: group.spec for group in self.groups}
        wanted = self.options.provider
        self.choices = {
            index: choose(self.providers, spec, self.cache, self.device, wanted) for index, spec in self._specs.items()
        }
        for reason in sorted({choice.reason for choice in self.choices.values()}):
            logger.info("FLASH_ATTN uses %s", reason)
        self.recorder = CudaRecorder() if self.device.type == "cuda" else None

    @property
    def lends_keys(self) -> bool:
        return any(choice.provider.lends_keys for choice in self.choices.values())

    def hold_inputs(self, max_batch_size: int, shared: GraphTensors | None) -> None:
        """Where a row without keys is lent one, its first page has to be one: a step table's is, another engine's may
        not be, so that its batches are copied."""
        super().hold_inputs(max_batch_size, own_tensors(shared) if self.lends_keys else shared)

    def begin_forward(self, metadata: FlashAttnMetadata) -> FlashAttnStep:
        """The step's calls, with their schedules, made on the device."""
        spec, provider = self._specs[metadata.group_index], self.choices[metadata.group_index].provider
        rows, split = metadata.rows, metadata.num_decodes
        if provider.sizes_by_table:
            rows = rows.narrowed(self.cache.page_size)
        prefix_len, prefix = metadata.common_prefix_len, None
        apart = provider.decodes_apart and rows.page_table is not None and not metadata.for_graph
        if (apart or prefix_len) and 0 < split < rows.num_rows:
            first, rest = slice(0, split), slice(split, rows.num_tokens)
            decodes = rows.part(0, split, first, 1).after_prefix(prefix_len, self.cache.page_size)
            others = rows.part(split, rows.num_rows, rest, rows.max_query_len)
            pieces = [(decodes, first), (others, rest)]
        else:
            rows = rows.after_prefix(prefix_len, self.cache.page_size)
            pieces = [(rows, slice(0, rows.num_tokens))]
        calls = tuple(self._call(metadata, of, tokens) for of, tokens in pieces)
        if metadata.prefix is not None:
            prefix = self._call(metadata, metadata.prefix, slice(0, metadata.prefix.num_tokens), causal=False)
        return FlashAttnStep(metadata, spec, provider, calls, prefix)

    def _call(self, metadata: FlashAttnMetadata, rows: Rows, tokens: slice, causal: bool | None = None) -> Call:
        schedule = None if metadata.fast_build else self.schedule(metadata.group_index, rows, causal)
        lens = self.tot_seq_lens(metadata.group_index, rows, causal)
        return Call(rows, tokens, schedule, self.options.split_keys, lens)

    def schedule(self, group: int, rows: Rows, causal: bool | None = None) -> torch.Tensor | None:
        """The provider's schedule of some rows, causal as the layers are if `causal` is None."""
        spec = self._specs[group]
        return self.choices[group].provider.schedule(
            spec, self.cache, rows, causal=spec.causal if causal is None else causal, split_keys=self.options.split_keys
        )

    def tot_seq_lens(self, group: int, rows: Rows, causal: bool | None = None) -> torch.Tensor | None:
        """The provider's `tot_seq_lens` of some rows, causal as the layers are if `causal` is None."""
        spec = self._specs[group]
        causal = spec.causal if causal is None else causal
        return self.choices[group].provider.tot_seq_lens(spec, rows, causal=causal)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile what is launched beside the library, and call a library that compiles its kernels then."""
        compile_listed(self.device, self._list_launches, progress)
        if any(choice.provider.compiles_when_called for choice in self.choices.values()):
            plan_all_kinds(self, FlashAttnMetadataBuilder, FIRST_QUERY_LENS, self._call_kind, progress)

    def _call_kind(self, metadata: FlashAttnMetadata) -> None:
        """Call for one batch all that layers of a group may: with sinks and behind them, over a shared prefix, with an
        LSE and without."""
        spec, provider = self._specs[metadata.group_index], self.choices[metadata.group_index].provider
        if not provider.compiles_when_called:
            return
        call = self.begin_forward(metadata).calls[0]
        table = call.rows.page_table
        slots = (metadata.num_new_kv,) if table is None else (table.shape[1], self.cache.page_size)
        heads, dtype = spec.num_kv_heads, spec.dtype if table is None else spec.cache_dtype
        query = torch.zeros(metadata.num_tokens, spec.num_qo_heads, spec.head_dim, dtype=spec.dtype, device=self.device)
        keys, values = (
            torch.zeros(*slots, heads, dim, dtype=dtype, device=self.device)
            for dim in (spec.head_dim, spec.head_dim_vo)
        )
        output = query.new_empty(*query.shape[:2], spec.head_dim_vo)
        sinks = torch.zeros(spec.num_qo_heads, dtype=torch.bfloat16, device=self.device) if spec.sinks else None
        constants = LayerConstants.of(spec, sinks, 1.0, 1.0, self.device)
        for of in (constants, constants.without_sinks(), constants.over_prefix()):
            for want_lse in (False, True):
                provider.attend(Tensors(query, keys, values, output), call, of, want_lse)

    def _list_launches(self) -> None:
        specs = self._specs.values()
        list_cache_writes(specs, self.cache)
        list_merges(specs)
        list_quantised_queries(spec for spec in specs if spec.cache_dtype in FP8_DTYPES)

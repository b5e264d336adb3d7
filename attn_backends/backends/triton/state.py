"""What outlives a step: how decode's work is cut, where the parts of a row meet, and graphs' tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import torch

from attn_backends.backends.triton.launches import NO_PREFILL, Launches, mixed_launches
from attn_backends.backends.triton.metadata import TritonMetadata
from attn_backends.backends.triton.plans import TilePlan, prefill_plan
from attn_backends.backends.triton.rules import (
    can_upcast,
    decode_tokens,
    split_tile,
)
from attn_backends.backends.triton.schedule import Schedule, SplitPlan
from attn_backends.backends.triton.short_tiles import short_tile, short_tiles
from attn_backends.backends.triton.tuning import DecodeTile, TritonOptions, decode_tile
from attn_backends.backends.triton.upcasting import Span, section_spans
from attn_backends.backends.triton.variants import variants
from attn_backends.backends.triton.workspace import (
    DECODE_TOKENS,
    LaunchNeed,
    Workspace,
    decode_need,
    largest_need,
    prefill_need,
)
from attn_backends.graphs.inputs import GraphTensors
from attn_backends.graphs.recorder import CudaRecorder, without_python
from attn_backends.interface import AttentionState, AttentionStep, GraphState
from attn_backends.kernels.launch import machine_of, num_multiprocessors, shared_memory
from attn_backends.kernels.prefill.launch import visible_range
from attn_backends.kernels.prefill.split_launch import TileList
from attn_backends.kernels.prefill.splits import PrefillSplits
from attn_backends.kernels.repeats import Repeats
from attn_backends.kernels.streams import PerStream
from attn_backends.kernels.tiles import block_dims
from attn_backends.kernels.variants import Variant, compile_variants
from attn_backends.machine import Progress
from attn_backends.spec import AttentionSpec, PlanGroup

_SCHEDULES = 128  # of eager steps that are kept, of tens of kilobytes each


@dataclass(frozen=True)
class TritonStep(AttentionStep[TritonMetadata]):
    """A step, and how its rows are split."""

    schedule: Schedule | None  # of decodes; None: nothing is decoded
    workspace: Workspace
    splits: TileList | None = None  # of all other rows; None: their keys are not split
    section_splits: tuple[TileList | None, ...] = ()  # the same of each section of rows whose keys are made 16 bits
    _repeats: Repeats = field(default_factory=Repeats, init=False, compare=False, repr=False)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (each for part in (self.metadata, self.workspace) for each in vars(part).values()
                    if isinstance(each, torch.Tensor))  # fmt: skip
        if self.schedule is not None:
            listed = self.schedule.work_list
            yield from (listed.work_items, listed.more_items, listed.item_pages)
        if self.splits is not None:
            yield self.splits.work_items


class TritonGraphState(GraphState[TritonMetadata, TritonStep]):
    """The state of one captured size: the tensors that all sizes share, and a schedule a group; of mixed batches a list
    of tiles too."""

    def __init__(self, parent: TritonState, num_rows: int, query_len: int, num_tokens: int = 0) -> None:
        super().__init__(parent, num_rows, query_len, num_tokens)
        workspace = parent.graph_workspace
        assert self.inputs is not None  # both are held while graphs are captured
        assert workspace is not None
        if query_len > DECODE_TOKENS:
            raise ValueError(
                f"graphs of TRITON serve up to {DECODE_TOKENS} query tokens a row, and {query_len} were asked for: "
                "run longer rows eager"
            )
        self._inputs_of = {group.index: self.inputs.of_layers(group.spec) for group in self.groups}
        self._tensors = {
            group: inputs.of(num_rows, self.num_tokens, is_mixed=not query_len)
            for group, inputs in self._inputs_of.items()
        }
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.device) * query_len
        self.steps = {group.index: self._step(parent, group, starts, workspace) for group in self.groups}
        self._relist = {index: _relister(step, parent.recorder) for index, step in self.steps.items()}

    def replan(self, metadata: TritonMetadata) -> TritonStep:
        self._relist[metadata.group_index]()
        return self.steps[metadata.group_index]

    def replan_in_place(self) -> dict[int, TritonStep] | None:
        for inputs in self._inputs_of.values():
            if inputs.shared is None or (not self.query_len and inputs.shared_starts is None):
                return None
        for again in self._relist.values():
            again()
        return self.steps

    def get_graph_input_buffers(self, metadata: TritonMetadata) -> dict[str, torch.Tensor]:
        return self._tensors[metadata.group_index]

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: TritonMetadata) -> None:
        if metadata.page_table is None:
            raise ValueError("this metadata reads no cache: run it eager, and build graphs' with for_graph=True")
        inputs = self._inputs_of[metadata.group_index]
        inputs.fill(buffers, metadata.slot_mapping, metadata.seq_lens, metadata.page_table)
        if not self.query_len:
            inputs.fill_starts(buffers["query_start_loc"], metadata.query_start_loc)

    def _step(
        self, parent: TritonState, group: PlanGroup[AttentionSpec], starts: torch.Tensor, workspace: Workspace
    ) -> TritonStep:
        """All rows are decoded, or prefilled where that is faster for so many queries each; or of any lengths."""
        given = self.cache, self.options, self.device
        if not self.query_len:
            starts = self._tensors[group.index]["query_start_loc"]
            metadata = self._metadata(group.index, starts, mixed_launches(group.spec, *given, self.num_tokens))
            schedule = parent.make_schedule(group.index, self.num_rows, metadata.max_decode_len, workspace)
            return TritonStep(metadata, schedule, workspace, parent.make_tile_list(metadata, workspace))
        if self.query_len <= decode_tokens(group.spec, *given):
            decodes = Launches(self.num_rows, self.num_rows, self.query_len, NO_PREFILL)
            schedule = parent.make_schedule(group.index, self.num_rows, self.query_len, workspace)
            return TritonStep(self._metadata(group.index, starts, decodes), schedule, workspace)
        query_lens = np.full(self.num_rows, self.query_len, np.int32)
        lens = query_lens, np.full_like(query_lens, self.limits.max_model_len)
        plan = TilePlan(None, None)
        short = short_tile(group.spec, short_tiles(group.spec, *given), *lens, self.device, for_graph=True)
        if short is None:
            tile = split_tile(group.spec, *given, is_paged=True, is_upcast=False)
            plan = prefill_plan(group.spec, tile, None, *lens, 0, self.device, for_graph=True)
        prefill = {**NO_PREFILL, "prefill_splits": plan.splits, "short_tile": short, "hopper_tile": plan.tile}
        metadata = self._metadata(group.index, starts, Launches(0, 0, 0, prefill))
        return TritonStep(metadata, None, workspace, parent.make_tile_list(metadata, workspace))

    def _metadata(self, group_index: int, starts: torch.Tensor, launches: Launches) -> TritonMetadata:
        tensors = self._tensors[group_index]
        return TritonMetadata.of_graph(
            group_index,
            tensors["slot_mapping"],
            self.num_rows,
            self.num_tokens,
            is_mixed=not self.query_len,
            num_rows=self.num_rows,
            num_decode_rows=launches.num_decode_rows,
            num_decode_row_tokens=launches.num_decode_rows * self.query_len,
            max_decode_len=launches.max_decode_len,
            **launches.prefill,
            max_seq_len=self.limits.max_model_len,
            query_start_loc=starts,
            key_start_loc=starts,
            seq_lens=tensors["seq_lens"],
            page_table=tensors["page_table"],
        )


def _relister(step: TritonStep, recorder: CudaRecorder | None) -> Callable[[], object]:
    """What lists a group's work anew, in place. Triton's launch of a kernel takes the host longer than a graph."""
    lens, starts, tiles = step.metadata.seq_lens, step.metadata.query_start_loc, step.workspace.tiles
    table = step.metadata.page_table
    cuts, splits = None if step.schedule is None else step.schedule.work_list, step.splits

    def again() -> torch.Tensor:
        if cuts is None and splits is None:  # whole tiles of a prefill
            return tiles.zero_()
        if cuts is not None:
            cuts.fill(lens, starts, table)
        if splits is not None:
            splits.fill(lens, starts)
        return lens

    return without_python(again, [cuts, splits, lens, starts, table, tiles], recorder)


class TritonState(AttentionState[TritonMetadata]):
    """A workspace for the parts of split rows, sized by the multiprocessors and the layers' heads, not by the context.

    A part of a row leaves (head_dim_vo + 2) * 4 bytes for each of its queries; there are at most twice as many parts as
    programs that the GPU holds at once (see `equal_cuts`). Layers over a cache of 8 bits have room on Hopper for
    keys and values of 16 bits too, `TritonOptions.upcast_bytes` at most.

    A step takes the workspace of the stream on which it began, so steps on several streams do not meet. The first
    stream's is made at once, another's when a step begins there. Captured graphs share one of their own.
    """

    backend_name = "TRITON"
    graph_cls = TritonGraphState
    has_mixed_graphs = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_sms = num_multiprocessors(self.device)
        self._shared_memory = shared_memory(self.device)
        self._specs = {group.index: group.spec for group in self.groups}
        self.workspace = self._make_workspace(self._upcast_bytes())
        self._workspaces = PerStream(self.device, lambda: self._make_workspace(self._upcast_bytes()))
        self.graph_workspace: Workspace | None = None  # kept for good once graphs were captured
        self._schedule = lru_cache(maxsize=_SCHEDULES)(self.make_schedule)  # of eager steps, which repeat their shapes
        self.recorder = CudaRecorder() if self.device.type == "cuda" else None

    def begin_forward(self, metadata: TritonMetadata) -> TritonStep:
        workspace = self._workspaces.of_current(self.workspace)
        splits, schedule = self.make_tile_list(metadata, workspace), None
        sections = self._make_section_lists(metadata, workspace)
        lists = [each for each in (splits, *sections) if each is not None]
        for each in lists:
            each.fill(metadata.seq_lens, metadata.query_start_loc)
        if not lists and metadata.num_decode_rows < metadata.num_rows:
            workspace.tiles.zero_()
        num_decoded = metadata.num_rows if metadata.is_mixed else metadata.num_decode_rows
        if num_decoded:
            given = metadata.group_index, num_decoded, metadata.max_decode_len, workspace
            schedule = self._schedule(*given, metadata.decode_sms).anew()
            schedule.work_list.fill(metadata.seq_lens, metadata.query_start_loc, metadata.page_table)
        return TritonStep(metadata, schedule, workspace, splits, sections)

    def make_tile_list(self, metadata: TritonMetadata, workspace: Workspace) -> TileList | None:
        """A list for the tiles of rows behind the decodes, if the keys of some are split; in a graph of mixed batches
        for those of rows that are too long to be decoded."""
        num_tokens = metadata.num_row_tokens - metadata.num_decode_row_tokens
        span = Span(metadata.num_decode_rows, metadata.num_rows, num_tokens)
        mixed = (metadata.max_decode_len, metadata.num_tokens) if metadata.is_mixed else ()
        return self._tile_list(metadata.group_index, metadata.prefill_splits, span, workspace, *mixed)

    def _make_section_lists(self, metadata: TritonMetadata, workspace: Workspace) -> tuple[TileList | None, ...]:
        sections, num_tokens = metadata.upcast_rows, metadata.num_row_tokens - metadata.num_decode_row_tokens
        of_sections = section_spans(sections, metadata.num_rows, num_tokens) if sections else []
        return tuple(self._tile_list(metadata.group_index, section.splits, span, workspace)
                     for section, span in zip(sections, of_sections, strict=True))  # fmt: skip

    def _tile_list(
        self, group: int, splits: PrefillSplits | None, span: Span, workspace: Workspace, others_tokens: int = 0,
        num_tokens: int = 0,
    ) -> TileList | None:  # fmt: skip
        if splits is None:
            return None
        spec, tile, num_rows = self._specs[group], splits.tile, span.stop - span.first_row
        most_rows = min(num_rows, num_tokens // (others_tokens + 1)) + 1 if num_tokens else num_rows
        num_tiles = tile.most_tiles(span.num_tokens, most_rows)
        where = workspace.partial_acc, workspace.partial_ml, workspace.tiles
        num_kv_heads = splits.num_kv_heads or spec.num_kv_heads
        return TileList(splits, num_kv_heads, visible_range(spec), span.first_row, num_rows, num_tiles,
                        block_dims(spec)[1], where, others_tokens, num_tokens)  # fmt: skip

    def make_schedule(
        self, group: int, num_rows: int, query_len: int, workspace: Workspace, num_sms: int | None = None
    ) -> Schedule:  # fmt: skip
        """Args: num_sms: multiprocessors that work items are to fill; None: all."""
        spec = self._specs[group]
        tile = self._tile(spec, num_rows, query_len)
        workspace.check(decode_need(spec, tile, query_len, self._num_sms), num_rows, query_len)
        page_size = self.cache.page_size
        return Schedule(spec, tile, num_rows, query_len, num_sms or self._num_sms, page_size, workspace.counters)

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

    def hold_inputs(self, max_batch_size: int, shared: GraphTensors | None) -> None:
        super().hold_inputs(max_batch_size, shared)
        if self.graph_workspace is None:  # graphs of mixed batches have prefills, of however few tokens
            least = [prefill_need(spec, self._num_sms) for spec in self._specs.values()]
            self.graph_workspace = self._make_workspace(0, *least)

    def _make_workspace(self, upcast_bytes: int, *needs: LaunchNeed) -> Workspace:
        specs = self._specs.values()
        need = largest_need(specs, self.cache, self.limits, self.options, self._num_sms, self._shared_memory)
        need = reduce(LaunchNeed.or_more, needs, need)
        return Workspace.of(need, upcast_bytes, self.device)

    def _upcast_bytes(self) -> int:
        options = self.options or TritonOptions()
        specs = [spec for spec in self._specs.values() if can_upcast(spec, options, self.device)]
        key_bytes = (spec.num_kv_heads * (spec.head_dim + spec.head_dim_vo) * spec.dtype.itemsize for spec in specs)
        most = self.limits.max_num_requests * self.limits.max_model_len * max(key_bytes, default=0)
        return min(options.upcast_bytes, most) // 16 * 16

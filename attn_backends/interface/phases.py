"""Two backends over one cache: the parts of a step, each built, planned and run by the backend of its phase.

Decode rows are the leading ones, of at most the decode backend's `decode_threshold` tokens; graphs are all decode.
`phased_backend` makes a backend of these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.order import SwappableRows, leading_decodes, reorder_batch_to_split_decodes_and_prefills
from attn_backends.batch.views import slice_rows
from attn_backends.cache.kv_cache import KVCache
from attn_backends.graphs.inputs import GraphTensors
from attn_backends.interface.impl import AttentionImpl
from attn_backends.interface.metadata import AttentionMetadata, AttentionMetadataBuilder
from attn_backends.interface.state import AttentionState, GraphState
from attn_backends.interface.steps import AttentionStep
from attn_backends.machine import Progress

EachT = TypeVar("EachT")


class Phases(NamedTuple, Generic[EachT]):
    """One thing of each phase's backend: its class, builder, options, …"""

    prefill: EachT
    decode: EachT


def _each(
    classes: Iterable[Callable[..., EachT]], options: Phases[Any] | None, *args: Any, **weights: Any
) -> Iterator[EachT]:
    """One of each phase's class, with that phase's options."""
    for made, own in zip(classes, options or (None, None), strict=True):
        yield made(*args, options=own, **weights)


@dataclass(frozen=True)
class PhasedMetadata(AttentionMetadata):
    """The metadata of both parts, each over rows and tokens that start at 0, without padding unless it is a graph's."""

    prefill: AttentionMetadata | None  # None: no such rows
    decode: AttentionMetadata | None

    def decode_fields(self) -> dict[str, Any]:
        return {"prefill": None}

    def prefill_fields(self) -> dict[str, Any]:
        return {"decode": None}


@dataclass(frozen=True)
class PhasedStep(AttentionStep[PhasedMetadata]):
    """The steps of both parts, each planned by its own state."""

    prefill: AttentionStep[Any] | None
    decode: AttentionStep[Any] | None

    def check_plan(self) -> None:
        """Both, before either part writes."""
        for part in (self.prefill, self.decode):
            if part is not None:
                part.check_plan()


class PhasedMetadataBuilder(AttentionMetadataBuilder[PhasedMetadata]):
    """Both builders, each given its own rows of a batch."""

    builder_classes: ClassVar[Phases[type[AttentionMetadataBuilder[Any]]]]

    def __init__(self, *args: Any, options: Phases[Any] | None = None) -> None:
        super().__init__(*args, options=options)
        self.prefill, self.decode = _each(self.builder_classes, options, *args)
        self.decode_threshold = self.decode.decode_threshold

    def prepare(self) -> None:
        self.prefill.prepare()
        self.decode.prepare()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PhasedMetadata:
        common, index = common_attn_metadata, self.group.index
        self.check_batch(common)
        if common.for_graph:
            return _of_decodes(self.decode.build(common_prefix_len, common, fast_build))
        actual, num_decodes = common.num_actual_reqs, leading_decodes(common, self.decode_threshold)
        prefill = decode = None
        if num_decodes:
            decode = self.decode.build(common_prefix_len, _rows(common, 0, num_decodes), fast_build)
        if num_decodes < actual:
            prefill = self.prefill.build(common_prefix_len, _rows(common, num_decodes, actual), fast_build)
        return PhasedMetadata.of_batch(
            common, index, num_decodes,
            num_decode_tokens=int(common.query_start_loc_cpu[num_decodes]),
            common_prefix_len=0 if decode is None else decode.common_prefix_len,
            prefill=prefill, decode=decode, planned_for=self.group.spec,
        )  # fmt: skip

    def needs_lengths_of(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        common, actual = common_attn_metadata, common_attn_metadata.num_actual_reqs
        if self.needs_exact_lengths or common.for_graph:
            return self.needs_exact_lengths
        num_decodes = leading_decodes(common, self.decode_threshold)
        parts = (self.decode, 0, num_decodes), (self.prefill, num_decodes, actual)
        return any(each.needs_lengths_of(_rows(common, *rows)) for each, *rows in parts if rows[0] < rows[1])

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        return self.decode.can_run_in_cudagraph(common_attn_metadata)

    def reorder_batch(self, batch: SwappableRows, query_lens: Sequence[int]) -> bool:
        """Decodes first: those behind a prefill would be attended with it."""
        return reorder_batch_to_split_decodes_and_prefills(batch, query_lens, self.decode_threshold)


def _of_decodes(decode: AttentionMetadata) -> PhasedMetadata:
    """The metadata of a graph, all of whose rows are decodes."""
    given = decode.group_index, decode.slot_mapping, decode.num_decodes, decode.num_tokens
    return PhasedMetadata.of_graph(*given, prefill=None, decode=decode, planned_for=decode.planned_for)


def _rows(common: CommonAttentionMetadata, start: int, stop: int) -> CommonAttentionMetadata:
    """These rows as a batch of their own; the batch itself, with what it has worked out, where they are all of it."""
    is_whole = stop - start == common.num_reqs and common.num_tokens == common.num_actual_tokens
    return common if is_whole else slice_rows(common, start, stop)


class PhasedGraphState(GraphState[PhasedMetadata, PhasedStep]):
    """One captured size: the decode backend's own state of it."""

    def __init__(self, parent: PhasedState, num_rows: int, query_len: int) -> None:
        super().__init__(parent, num_rows, query_len)
        self.decode: GraphState[Any, Any] = parent.decode.graph_clone(num_rows, query_len)  # type: ignore[assignment]

    def begin_forward(self, metadata: PhasedMetadata) -> PhasedStep:
        if metadata.decode is None or not metadata.for_graph:
            return super().begin_forward(metadata)  # it refuses
        step = self.decode.begin_forward(metadata.decode)
        known = self.steps.get(metadata.group_index)
        if known is None or known.decode is not step:
            known = self.steps[metadata.group_index] = PhasedStep(_of_decodes(step.metadata), None, step)
        return known

    def idle_metadata(self, group_index: int) -> PhasedMetadata:
        return _of_decodes(self.decode.idle_metadata(group_index))

    def move_to_current_stream(self) -> None:
        self.decode.move_to_current_stream()

    def get_graph_input_buffers(self, metadata: PhasedMetadata) -> dict[str, torch.Tensor]:
        return self.decode.get_graph_input_buffers(_decode(metadata))

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: PhasedMetadata) -> None:
        self.decode.prepare_graph_input_buffers(buffers, _decode(metadata))


def _decode(metadata: PhasedMetadata) -> AttentionMetadata:
    if metadata.decode is None:
        raise ValueError("this metadata has no decode rows, and graphs are of those: build it with for_graph=True")
    return metadata.decode


class PhasedState(AttentionState[PhasedMetadata]):
    """Both states, each with the workspaces and plans of its own; graphs are the decode backend's."""

    state_classes: ClassVar[Phases[type[AttentionState[Any]]]]

    def __init__(self, *args: Any, options: Phases[Any] | None = None) -> None:
        super().__init__(*args, options=options)
        self.prefill, self.decode = _each(self.state_classes, options, *args)

    def begin_forward(self, metadata: PhasedMetadata) -> PhasedStep:
        prefill, decode = metadata.prefill, metadata.decode
        return PhasedStep(
            metadata,
            None if prefill is None else self.prefill.begin_forward(prefill),
            None if decode is None else self.decode.begin_forward(decode),
        )

    def move_to_current_stream(self) -> None:
        self.prefill.move_to_current_stream()
        self.decode.move_to_current_stream()

    def warm_up(self, progress: Progress | None = None) -> None:
        self.prefill.warm_up(progress)
        self.decode.warm_up(progress)

    @contextmanager
    def graph_capture(self, max_batch_size: int, inputs: GraphTensors | None = None) -> Iterator[None]:
        with self.decode.graph_capture(max_batch_size, inputs), super().graph_capture(max_batch_size, inputs):
            yield

    def hold_graph_buffers(self, max_batch_size: int, inputs: GraphTensors | None = None) -> None:
        self.decode.hold_graph_buffers(max_batch_size, inputs)
        super().hold_graph_buffers(max_batch_size, inputs)

    def hold_inputs(self, max_batch_size: int, shared: GraphTensors | None) -> None:
        """The decode backend's state holds them."""
        self.inputs = self.decode.inputs


class PhasedImpl(AttentionImpl[PhasedStep]):
    """Both impls of a layer. Each writes the new keys and values of its own rows."""

    impl_classes: ClassVar[Phases[type[AttentionImpl[Any]]]]
    step_cls = PhasedStep

    def __init__(self, *layer: Any, options: Phases[Any] | None = None, **weights: Any) -> None:
        common = {name: weights[name] for name in ("sinks", "k_scale", "v_scale") if name in weights}
        super().__init__(*layer, options=options, **common)
        self.prefill, self.decode = _each(self.impl_classes, options, *layer, **weights)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None,
        kv_cache: KVCache | torch.Tensor | None, step: PhasedStep, output: torch.Tensor | None = None, *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """A step of one phase, without padding, is its backend's from end to end."""
        if isinstance(step, PhasedStep):
            for impl, own in ((self.decode, step.decode), (self.prefill, step.prefill)):
                if own is not None and own.metadata.num_tokens == step.metadata.num_tokens:
                    return impl.forward(query, key, value, kv_cache, own, output, lse=lse)
        return super().forward(query, key, value, kv_cache, step, output, lse=lse)

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, step: PhasedStep) -> None:
        """`attend` calls each impl's `forward`, which writes."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, kv_cache: KVCache | None,
        step: PhasedStep, output: torch.Tensor, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        first = first_kv = 0
        for impl, own in ((self.decode, step.decode), (self.prefill, step.prefill)):
            if own is not None:
                stop, stop_kv = first + own.metadata.num_tokens, first_kv + own.metadata.num_new_kv
                own_key, own_value = (None if each is None else each[first_kv:stop_kv] for each in (key, value))
                own_lse = None if lse is None else lse[first:stop]
                impl.forward(query[first:stop], own_key, own_value, kv_cache, own, output[first:stop], lse=own_lse)
                first, first_kv = stop, stop_kv

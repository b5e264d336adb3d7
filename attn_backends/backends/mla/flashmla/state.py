"""What outlives a step of FLASHMLA: its kernels, and schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attn_backends.backends.mla.flashmla.library import (
    FP8,
    FilledSchedule,
    Kernels,
    MadeSchedule,
    RefilledSchedule,
    Schedule,
    load_kernels,
)
from attn_backends.backends.mla.flashmla.metadata import FlashMLAMetadata
from attn_backends.backends.mla.flashmla.options import FlashMLAOptions
from attn_backends.backends.mla.metadata import DecodeRows, MLAMetadata
from attn_backends.backends.mla.state import MLAGraphState, MLAState, MLAStep
from attn_backends.graphs.inputs import GraphTensors
from attn_backends.spec import MLASpec
from attn_backends.step.buffers import own_tensors


@dataclass(frozen=True)
class FlashMLAStep(MLAStep):
    """A step with what FlashMLA's tile scheduler made for its decode rows, under the names that vLLM gives it.

    `begin_forward` makes both with FlashMLA's older generation, and with any over fp8 latents. The newer one has no
    function for it: its `get_mla_metadata` takes no lengths and returns an empty object, which the kernel's first call
    fills. There both are None until the step's first layer has run; in a graph that launches our own copy of that
    work, they are what the last replay made. Without decode rows they are None.
    """

    @property
    def decode_tile_scheduler_metadata(self) -> torch.Tensor | None:
        """[num_sm_parts, 8] i32: rows and blocks of each part."""
        return None if self.plan is None else self.plan.tensors[0]

    @property
    def decode_num_splits(self) -> torch.Tensor | None:
        """[num_decodes + 1] i32: splits of all rows before."""
        return None if self.plan is None else self.plan.tensors[1]


class FlashMLAGraphState(MLAGraphState):
    parent: FlashMLAState

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: MLAMetadata) -> None:
        super().prepare_graph_input_buffers(buffers, metadata)
        if self.parent.lends_keys:
            self.inputs.lend_pages(buffers)


class FlashMLAState(MLAState):
    backend_name = "FLASHMLA"
    graph_cls = FlashMLAGraphState
    metadata_cls = FlashMLAMetadata
    step_cls = FlashMLAStep
    load_kernels: ClassVar[Any] = staticmethod(load_kernels)  # others in tests

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.options or FlashMLAOptions()
        self.kernels: Kernels = self.load_kernels(options.provider)
        self._can_refill = False  # not asked before graphs are captured

    @property
    def num_q_heads(self) -> int:
        """Query heads of its layers, under vLLM's name; the most, where plan groups differ."""
        return max(spec.num_qo_heads for spec in self.specs.values())

    def hold_inputs(self, max_batch_size: int, inputs: GraphTensors | None) -> None:
        super().hold_inputs(max_batch_size, own_tensors(inputs) if self.lends_keys else inputs)
        self._can_refill = self.kernels.can_refill(self.device)

    @property
    def lends_keys(self) -> bool:
        """Whether some layers' kernel reads a key in rows that have none (see `MadeSchedule`)."""
        return not self.kernels.fills_schedules or any(spec.cache_dtype is FP8 for spec in self.specs.values())

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> Schedule:
        schedule: Schedule | None = held
        if schedule is None and spec.cache_dtype is FP8:
            schedule = MadeSchedule(self.kernels, self.kernels.of_fp8().get_mla_metadata)
        schedule = schedule or self._new_schedule(rows)
        schedule.plan(rows, spec.num_qo_heads)
        return schedule

    def _new_schedule(self, rows: DecodeRows) -> Schedule:
        if not self.kernels.fills_schedules:
            return MadeSchedule(self.kernels)
        if rows.idle is None or not self._can_refill:
            return FilledSchedule(self.kernels, in_graph=rows.idle is not None)
        return RefilledSchedule(self.kernels)

"""What outlives a step of FLASHMLA: its kernels, and schedules."""

from __future__ import annotations

from typing import Any, ClassVar

from attn_backends.backends.mla.flashmla.library import (
    FilledSchedule,
    Kernels,
    MadeSchedule,
    RefilledSchedule,
    Schedule,
    load_kernels,
)
from attn_backends.backends.mla.flashmla.options import FlashMLAOptions
from attn_backends.backends.mla.metadata import DecodeRows
from attn_backends.backends.mla.state import MLAState
from attn_backends.graphs.inputs import GraphTensors
from attn_backends.spec import MLASpec


class FlashMLAState(MLAState):
    backend_name = "FLASHMLA"
    load_kernels: ClassVar[Any] = staticmethod(load_kernels)  # others in tests

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.options or FlashMLAOptions()
        self.kernels: Kernels = self.load_kernels(options.provider)
        self._can_refill = False  # not asked before graphs are captured

    def hold_inputs(self, max_batch_size: int, inputs: GraphTensors | None) -> None:
        super().hold_inputs(max_batch_size, inputs)
        self._can_refill = self.kernels.can_refill(self.device)

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> Schedule:
        schedule: Schedule = held or self._new_schedule(rows)
        schedule.plan(rows, spec.num_qo_heads)
        return schedule

    def _new_schedule(self, rows: DecodeRows) -> Schedule:
        if not self.kernels.fills_schedules:
            return MadeSchedule(self.kernels)
        if rows.idle is None or not self._can_refill:
            return FilledSchedule(self.kernels, in_graph=rows.idle is not None)
        return RefilledSchedule(self.kernels)

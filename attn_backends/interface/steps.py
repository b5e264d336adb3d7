"""The step that layers receive: a batch's metadata, bound to what was planned for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from attn_backends.interface.metadata import MetadataT
from attn_backends.spec import AttentionSpec


class RepeatedCalls(Protocol):
    """What the layers of one step have started, for layers that lie alike (see `attn_backends.kernels.repeats`)."""

    def run(
        self, layer: Hashable, tensors: Sequence[torch.Tensor | None],
        of_step: Callable[[], Iterable[torch.Tensor]], call: Callable[[], object],
    ) -> None: ...  # fmt: skip


@dataclass(frozen=True)
class AttentionStep(Generic[MetadataT]):
    """What every layer's Impl receives: metadata bound to what the state planned for it (a subclass adds wrappers)."""

    metadata: MetadataT
    _repeats: RepeatedCalls | None = field(default=None, init=False, compare=False, repr=False)  # None: nothing is

    def check_plan(self) -> None:
        """Refuse to run once another step was planned in this one's place (`replaced_plan`): asked before anything is
        written. By default a step keeps what was planned for it."""

    def _tensors(self) -> Iterable[torch.Tensor]:
        """All that calls of the step's layers read and write beside the layers' own, where they are repeated."""
        return ()


@dataclass(frozen=True)
class PlannedStep(AttentionStep[MetadataT]):
    """A step whose plan holds constants of the layers: `AttentionImpl.forward` refuses it to layers of another spec."""

    spec: AttentionSpec  # of the layers that it was planned for


StepT = TypeVar("StepT", bound=AttentionStep[Any])

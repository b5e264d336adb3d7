"""What states whose steps can be captured share: when buffers are held, and which clones there are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from attn_backends.derive import StepBuffers
from attn_backends.interface import AttentionState, MetadataT, check_capture_size

CloneT = TypeVar("CloneT", bound=AttentionState[Any])


class CapturingState(AttentionState[MetadataT], Generic[MetadataT, CloneT]):
    """A state with a clone for each captured size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_batch_size = 0  # while capturing
        self._clones: dict[tuple[int, int], CloneT] = {}

    def hold_inputs(self, max_batch_size: int, inputs: StepBuffers | None) -> None:
        """Allocate what clones of up to so many rows share, for good. By default they share nothing."""

    @abstractmethod
    def make_clone(self, batch_size: int, query_len: int) -> CloneT:
        """The state of one size, within the limits and what is held."""

    @abstractmethod
    def idle_metadata_of(self, clone: CloneT, group_index: int) -> MetadataT:
        """Metadata to capture with, over a clone's buffers."""

    @contextmanager
    def graph_capture(self, max_batch_size: int, inputs: StepBuffers | None = None) -> Iterator[None]:
        check_capture_size(max_batch_size, 1, self.limits)
        self.hold_inputs(max_batch_size, inputs)
        self._max_batch_size, self._clones = max_batch_size, {}
        try:
            yield
        finally:
            self._max_batch_size, self._clones = 0, {}

    def graph_clone(self, batch_size: int, query_len: int = 1) -> CloneT:
        check_capture_size(batch_size, query_len, self.limits, self._max_batch_size)
        clone = self._clones[batch_size, query_len] = self.make_clone(batch_size, query_len)
        return clone

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, query_len: int = 1, group_index: int = 0
    ) -> MetadataT:
        clone = self._clones.get((batch_size, query_len)) or self.graph_clone(batch_size, query_len)
        return self.idle_metadata_of(clone, group_index)

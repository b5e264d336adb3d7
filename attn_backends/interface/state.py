"""What outlives a step: workspaces, persistent buffers, plans, graphs; and what states with graphs share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch

from attn_backends.interface.capabilities import Rejection, Unsupported
from attn_backends.interface.metadata import AttentionStep, MetadataT
from attn_backends.machine import Progress
from attn_backends.spec import KVCacheSpec, Limits, PlanGroup
from attn_backends.step.buffers import StepBuffers


class AttentionState(ABC, Generic[MetadataT]):
    """Everything that outlives a step: workspaces, persistent buffers, plans, graphs. One for all plan groups.

    Sized once, from `limits`, as the largest need of all groups. Arguments as for the builder, with all `groups`.
    """

    backend_name: ClassVar[str]

    def __init__(
        self, groups: Sequence[PlanGroup[Any]], cache: KVCacheSpec, limits: Limits, device: torch.device | str, *,
        options: Any = None,
    ) -> None:  # fmt: skip
        self.groups = tuple(groups)
        self.cache = cache
        self.limits = limits
        self.device = torch.device(device)
        self.options = options

    @abstractmethod
    def begin_forward(self, metadata: MetadataT) -> AttentionStep[MetadataT]:
        """Plan one group's step. Called once a step and group, before its layers run; the only place that plans."""

    def move_to_current_stream(self) -> None:
        """Let the current CUDA stream take over from the one on which steps began so far: it waits for that one. There
        is nothing to do where every stream has a workspace of its own, or steps share none."""

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every kernel that steps within the limits can launch, so that none is compiled once requests come.
        Call it while an engine loads; calling it again takes little time. By default there is nothing to compile.

        Args:
            progress: told after each kernel how many are done, of how many, and its name.

        Raises:
            RuntimeError: a kernel cannot be compiled for this GPU.
        """

    # CUDA graphs. `with graph_capture(n)` holds the persistent buffers; `graph_clone(size)` is the state of one size
    # that is captured. Its `begin_forward`, at capture and at replay, fills them, plans, and returns a step over them.

    def graph_capture(self, max_batch_size: int, inputs: StepBuffers | None = None) -> AbstractContextManager[None]:
        """Hold the buffers for capturing decode graphs of up to `max_batch_size` rows. They stay, and never grow.

        Graphs may read `inputs`, a step table's tensors, where they are: then all batches have to be of that table.
        """
        self._no_graphs()

    def graph_clone(self, batch_size: int, query_len: int = 1) -> AttentionState[MetadataT]:
        """The state that one captured size keeps: `batch_size` rows of `query_len` tokens each."""
        self._no_graphs()

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, query_len: int = 1, group_index: int = 0
    ) -> MetadataT:
        """Metadata of one plan group to capture with, over the persistent buffers, without a builder or a batch."""
        self._no_graphs()

    def get_graph_input_buffers(self, metadata: MetadataT) -> dict[str, torch.Tensor]:
        """The persistent tensors that a captured graph reads, by the name of what fills them."""
        self._no_graphs()

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: MetadataT) -> None:
        """Fill the persistent tensors with a step's. Device to device: it reads nothing on the host."""
        self._no_graphs()

    def _no_graphs(self) -> NoReturn:
        raise Unsupported(
            self.backend_name,
            [Rejection("cuda_graph", "graph capture", "eager only", "Run eager: set graphs to none.")],
        )


def check_capture_size(batch_size: int, query_len: int, limits: Limits, held_rows: int | None = None) -> None:
    """What every state asks before it allocates graph buffers, or a clone over those that it holds for `held_rows`.

    Raises:
        ValueError: the size is not positive, or above the limits that the state was sized from.
        RuntimeError: the buffers hold fewer rows; none outside of a capture.
    """
    if batch_size < 1 or query_len < 1:
        raise ValueError(f"a graph of {batch_size} rows of {query_len} tokens: both must be at least 1")
    if batch_size > limits.max_num_requests or batch_size * query_len > limits.max_num_tokens:
        raise ValueError(
            f"a graph of {batch_size} rows of {query_len} tokens is above the limits (max_num_requests "
            f"{limits.max_num_requests}, max_num_tokens {limits.max_num_tokens}): capture smaller sizes, or raise these"
        )
    if held_rows is not None and batch_size > held_rows:
        raise RuntimeError(
            f"graph buffers never grow: clone {batch_size} rows inside `with state.graph_capture({batch_size})`"
        )


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

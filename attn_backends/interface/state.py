"""What outlives a step: workspaces, persistent buffers, plans, graphs; and what states with graphs share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, NoReturn

import torch

from attn_backends.graphs.inputs import GraphInputs, GraphTensors
from attn_backends.interface.capabilities import Rejection, Unsupported
from attn_backends.interface.metadata import MetadataT
from attn_backends.interface.refusals import refuse_raw_options
from attn_backends.interface.steps import AttentionStep, StepT
from attn_backends.machine import Progress
from attn_backends.spec import KVCacheSpec, Limits, PlanGroup


class AttentionState(ABC, Generic[MetadataT]):
    """Everything that outlives a step: workspaces, persistent buffers, plans, graphs. One for all plan groups.

    Sized once, from `limits`, as the largest need of all groups. Arguments as for the builder, with all `groups`.
    """

    backend_name: str  # set on the class
    graph_cls: ClassVar[type[GraphState[Any, Any]] | None] = None  # state of one captured size; None: it has no graphs
    has_mixed_graphs: ClassVar[bool] = False  # `graph_cls` also serves a number of tokens, of rows of any query lengths

    def __init__(
        self, groups: Sequence[PlanGroup[Any]], cache: KVCacheSpec, limits: Limits, device: torch.device | str, *,
        options: Any = None,
    ) -> None:  # fmt: skip
        refuse_raw_options(options)
        self.groups = tuple(groups)
        self.cache = cache
        self.limits = limits
        self.device = torch.device(device)
        self.options = options
        self.inputs: GraphInputs | None = None  # kept for good once graphs were captured
        self._max_batch_size = 0  # while capturing
        self._clones: dict[tuple[int, int], GraphState[MetadataT, Any]] = {}
        self._mixed_clones: dict[tuple[int, int], GraphState[MetadataT, Any]] = {}

    def begin_forward(self, metadata: MetadataT) -> AttentionStep[MetadataT]:
        """Plan one group's step. Called once a step and group, before its layers run; the only place that plans.

        A state without plans gives the metadata as it is.

        A step is good until the next one of its group: run its layers before, or give each of several micro-batches in
        flight a state of its own. A backend whose steps live on serves them; one that holds one plan a group refuses.
        """
        return AttentionStep(metadata)

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
    # An engine that captures by itself calls `hold_graph_buffers(n)` once, and `step_for` takes the place of both.

    @contextmanager
    def graph_capture(self, max_batch_size: int, inputs: GraphTensors | None = None) -> Iterator[None]:
        """Hold the buffers for capturing decode graphs of up to `max_batch_size` rows. They stay, and never grow.

        Graphs may read `inputs` where they are, a step table's tensors or an engine's: then all batches have to be of
        these.
        """
        self.hold_graph_buffers(max_batch_size, inputs)
        try:
            yield
        finally:
            self._max_batch_size, self._clones, self._mixed_clones = 0, {}, {}

    def hold_graph_buffers(self, max_batch_size: int, inputs: GraphTensors | None = None) -> None:
        """What `graph_capture` does, for an engine whose captures no `with` surrounds: sizes get their clones whenever
        they are first asked for, from now on."""
        if self.graph_cls is None:
            self._no_graphs()
        check_capture_size(max_batch_size, 1, self.limits)
        self.hold_inputs(max_batch_size, inputs)
        self._max_batch_size, self._clones, self._mixed_clones = max_batch_size, {}, {}

    @property
    def graph_sizes(self) -> frozenset[tuple[int, int]]:
        """The sizes that have a clone while buffers are held: rows, and query tokens of each."""
        return frozenset(self._clones)

    def step_for(self, metadata: MetadataT) -> AttentionStep[MetadataT]:
        """`begin_forward` by who serves the metadata: if it is `for_graph` the clone of its size, which is made at the
        first call, else this state. A clone's step serves eager passes as well as captures and replays.

        Raises:
            RuntimeError: it is for a graph, and no buffers are held for so many rows.
        """
        if not metadata.for_graph:
            return self.begin_forward(metadata)
        if metadata.is_mixed:
            size = metadata.num_decodes, metadata.num_tokens
            return (self._mixed_clones.get(size) or self.mixed_graph_clone(*size)).begin_forward(metadata)
        size = metadata.num_decodes, metadata.num_tokens // metadata.num_decodes
        clone = self._clones.get(size) or self.graph_clone(*size)
        return clone.begin_forward(metadata)

    def replanned(self, num_rows: int, query_len: int) -> Mapping[int, AttentionStep[MetadataT]] | None:
        """The steps of a size that has a clone, by group, for the batch that an engine has written into the tensors
        which its graphs read: what `step_for` would return, without metadata, as nothing is read of the batch on the
        host. None where `step_for` is needed: a plan takes lengths on the host, or graphs have copies of the tensors.
        """
        clone = self._clones.get((num_rows, query_len))
        return None if clone is None else clone.replan_in_place()

    def replanned_mixed(self, num_rows: int, num_tokens: int) -> Mapping[int, AttentionStep[MetadataT]] | None:
        """The same of a graph of mixed batches."""
        clone = self._mixed_clones.get((num_rows, num_tokens))
        return None if clone is None else clone.replan_in_place()

    def graph_clone(self, batch_size: int, query_len: int = 1) -> AttentionState[MetadataT]:
        """The state that one captured size keeps: `batch_size` rows of `query_len` tokens each."""
        graph_cls = self.graph_cls or self._no_graphs()
        check_capture_size(batch_size, query_len, self.limits, self._max_batch_size)
        clone = self._clones[batch_size, query_len] = graph_cls(self, batch_size, query_len)
        return clone

    def mixed_graph_clone(self, num_rows: int, num_tokens: int) -> AttentionState[MetadataT]:
        """The state that a graph of mixed batches keeps, which serves any query lengths: decodes, verified tokens,
        chunks and prompts in any order, rows without tokens, and tokens behind all rows.

        Raises:
            Unsupported: the backend has no such graphs, as it declares less than `CudaGraphSupport.ALWAYS`.
        """
        if self.graph_cls is None or not self.has_mixed_graphs:
            self._no_graphs("of mixed batches", "graphs of rows of equal query lengths, or none")
        check_capture_size(num_rows, 1, self.limits, self._max_batch_size)
        check_capture_size(1, num_tokens, self.limits)
        clone = self._mixed_clones[num_rows, num_tokens] = self.graph_cls(self, num_rows, 0, num_tokens)
        return clone

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, query_len: int = 1, group_index: int = 0
    ) -> MetadataT:
        """Metadata of one plan group to capture with, over the persistent buffers, without a builder or a batch."""
        if (batch_size, query_len) not in self._clones:
            self.graph_clone(batch_size, query_len)
        return self._clones[batch_size, query_len].idle_metadata(group_index)

    def get_graph_input_buffers(self, metadata: MetadataT) -> dict[str, torch.Tensor]:
        """The persistent tensors that a captured graph reads, by the name of what fills them."""
        self._no_graphs()

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: MetadataT) -> None:
        """Fill the persistent tensors with a step's. Device to device: it reads nothing on the host."""
        self._no_graphs()

    def hold_inputs(self, max_batch_size: int, shared: GraphTensors | None) -> None:
        """Allocate what graphs of up to so many rows read of a batch, for good."""
        if self.inputs is None or not self.inputs.serves(max_batch_size, shared):
            self.inputs = self.make_inputs(max_batch_size, shared)

    def make_inputs(self, max_batch_size: int, shared: GraphTensors | None) -> GraphInputs:
        """The tensors of `hold_inputs`. A backend whose kernels read more of a batch overrides it."""
        return GraphInputs(self.cache, self.limits, self.device, max_batch_size, shared)

    def _no_graphs(self, of: str = "", supported: str = "eager only") -> NoReturn:
        asked = f"graph capture {of}".rstrip()
        raise Unsupported(
            self.backend_name, [Rejection("cuda_graph", asked, supported, "Run eager: set graphs to none.")]
        )


class GraphState(AttentionState[MetadataT], Generic[MetadataT, StepT]):
    """The state of one captured size: a step a group, over tensors that stay and that `begin_forward` fills.

    A backend's subclass fills `steps` in its `__init__`, names the tensors in `get_graph_input_buffers`, and copies a
    batch to them in `prepare_graph_input_buffers`; it overrides `replan` where kernels read more than those.

    Args:
        parent: the state of eager steps.
        num_rows, query_len: the size, padding included.
        num_tokens: of a graph of mixed batches, whose `query_len` is 0; rows have as many in all, or fewer.
    """

    def __init__(
        self, parent: AttentionState[MetadataT], num_rows: int, query_len: int, num_tokens: int = 0
    ) -> None:  # fmt: skip
        super().__init__(parent.groups, parent.cache, parent.limits, parent.device, options=parent.options)
        self.backend_name = parent.backend_name
        self.inputs = parent.inputs
        self.num_rows = num_rows
        self.query_len = query_len
        self.num_tokens = num_tokens or num_rows * query_len
        self.steps: dict[int, StepT] = {}  # by group index

    def begin_forward(self, metadata: MetadataT) -> StepT:
        """Fill what the graph reads, and plan over it.

        Raises:
            ValueError: the metadata is of another size, or not of a graph's form.
        """
        given = (metadata.num_decodes, metadata.num_tokens, metadata.is_mixed)
        if not metadata.for_graph or given != (self.num_rows, self.num_tokens, not self.query_len):
            of_rows = f"rows of {self.query_len}" if self.query_len else f"mixed rows of {self.num_tokens}"
            raise ValueError(
                f"this graph was captured for {self.num_rows} {of_rows} tokens, and the metadata has "
                f"{metadata.num_tokens} tokens of {metadata.num_decodes + metadata.num_prefills} rows: pad the batch "
                f"to the captured size, and build it with for_graph=True{'' if self.query_len else ', is_mixed=True'}"
            )
        self.prepare_graph_input_buffers(self.get_graph_input_buffers(metadata), metadata)
        return self.replan(metadata)

    def replan(self, metadata: MetadataT) -> StepT:
        """The group's step, planned anew, in place, over tensors that are filled. By default nothing is planned."""
        return self.steps[metadata.group_index]

    def replan_in_place(self) -> Mapping[int, StepT] | None:
        """All groups' steps, planned anew over tensors that an engine has filled; see `AttentionState.replanned`. By
        default None. A backend overrides it that plans on the device alone."""
        return None

    def idle_metadata(self, group_index: int) -> MetadataT:
        """Metadata to capture with, over the persistent tensors."""
        metadata: MetadataT = self.steps[group_index].metadata
        return metadata

    @abstractmethod
    def get_graph_input_buffers(self, metadata: MetadataT) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: MetadataT) -> None: ...


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
            f"graph buffers are held for {held_rows} rows and never grow, and this is a graph of {batch_size}: call "
            f"state.hold_graph_buffers({batch_size}) before, or clone inside `with state.graph_capture({batch_size})`"
        )

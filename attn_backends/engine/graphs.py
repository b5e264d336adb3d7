"""CUDA graphs of the engine's steps: each padded size is captured once, largest first, in one memory pool.

A full graph holds a whole decode step. Piecewise graphs hold what lies between the attention layers, which run eager.
Capture and replay fill the buffers through the same function; only the recording differs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.page_table import IntArray
from attn_backends.engine.config import GraphsConfig
from attn_backends.engine.layers import Layers
from attn_backends.engine.models.context import NewTokens, Steps
from attn_backends.engine.outputs import Report
from attn_backends.graphs.recorder import Graph, GraphRecorder
from attn_backends.interface import AttentionBackend, AttentionState
from attn_backends.interface.capabilities import CudaGraphSupport, Rejection, Unsupported
from attn_backends.interface.state import check_capture_size
from attn_backends.step.table import StepBatch, StepTable

CAPTURE = "graph capture"  # a request id
KeptT = TypeVar("KeptT")


class GraphKey(NamedTuple):
    """Every integer that a captured launch has baked in. A piecewise graph is one row of all tokens."""

    num_reqs: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.query_len


def default_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 12, then every 8th to 256, every 16th to 512, every 32nd beyond; the largest itself at the end.

    >>> default_sizes(40)
    (1, 2, 4, 8, 12, 16, 24, 32, 40)
    """
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32)]
    return (*(size for size in sizes if size < largest), largest)


def graph_mode(
    config: GraphsConfig, backend: type[AttentionBackend], device: torch.device, can_record: bool
) -> Literal["none", "piecewise", "full"]:
    """What `graphs.mode` comes to for a backend on a device.

    Args:
        can_record: someone records graphs on any device.

    Raises:
        ValueError: graphs are asked for on a device that has none.
        Unsupported: full graphs are asked for and the backend cannot run inside one, or not of such query lengths.
    """
    level, on_gpu = backend.capabilities().cuda_graph, device.type == "cuda"
    if config.mode == "auto":
        return "full" if (on_gpu or can_record) and level > CudaGraphSupport.NEVER else "none"
    if config.mode != "none" and not (on_gpu or can_record):
        raise ValueError(
            f"graphs.mode is {config.mode}, and device {device} has no CUDA graphs: set it to auto or none"
        )
    longest = max(config.query_lens)
    needed = CudaGraphSupport.UNIFORM_BATCH if longest > 1 else CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    if config.mode == "full" and level < needed:
        asked = f"graphs.mode full with {longest} tokens a row"
        hint = "Set graphs.mode to piecewise, auto or none." if longest == 1 else "Set graphs.query_lens to [1]."
        raise Unsupported(backend.get_name(), [Rejection("cuda_graph", asked, level.name, hint)])
    return config.mode


class SizeLadder:
    """The captured sizes of one query length, and which of them a batch is padded to."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = sorted(set(sizes))

    def fit(self, size: int) -> int | None:
        """The smallest captured size that holds `size`; None if none does."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def __iter__(self) -> Iterator[int]:
        """Largest first: smaller graphs then fit into memory that the first one has claimed."""
        return reversed(self.sizes)


@contextmanager
def explained(key: GraphKey) -> Iterator[None]:
    """Say what to change when capturing fails."""
    graph = f"a graph of {key.num_reqs} rows of {key.query_len} tokens"
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise RuntimeError(
            f"out of device memory while capturing {graph}: lower cache.memory, give fewer or smaller graphs.sizes, or "
            "set graphs.mode to none"
        ) from error
    except RuntimeError as error:
        raise RuntimeError(
            f"capturing {graph} failed, as it does where a model waits for the device (experts do, unless in bfloat16 "
            f"on compute capability 9.0 and newer): set graphs.mode to none or auto. What failed: {error}"
        ) from error


def idle_step(
    table: StepTable, query_len: int, num_padded_reqs: int, padded_query_len: int, *, for_graph: bool = False
) -> StepBatch:
    """A step to capture with: one request that nobody made, over the first pages of an empty pool, and padding."""
    table.enter(CAPTURE, range(-(-query_len // table.cache.page_size)))
    step = table.step(
        [0], [query_len], np.zeros(query_len, np.int64), num_padded_reqs=num_padded_reqs,
        padded_query_len=max(1, padded_query_len), for_graph=for_graph,
    )  # fmt: skip
    table.leave(CAPTURE)
    return step


@dataclass(eq=False)
class _StepGraphs(Generic[KeptT]):
    """Graphs by size over one engine's layers, state and table; with each what its replays are filled through."""

    layers: Layers
    state: AttentionState[Any]
    table: StepTable
    recorder: GraphRecorder
    ladder: SizeLadder
    _captured: dict[GraphKey, tuple[KeptT, Graph]] = field(default_factory=dict, init=False)

    def _capture_all(self, keys: Sequence[GraphKey], report: Report) -> None:
        for done, key in enumerate(keys):
            report("capturing CUDA graphs", done, len(keys))
            with explained(key):
                self._captured[key] = self._capture(key)

    def _capture(self, key: GraphKey) -> tuple[KeptT, Graph]:
        raise NotImplementedError


@dataclass(eq=False)
class FullGraphs(_StepGraphs[AttentionState[Any]]):
    """Decode steps of one query length, each as one graph. Other batches are eager."""

    query_lens: frozenset[int] = field(kw_only=True)  # tokens a row that sizes are captured for
    for_graph = True  # metadata takes the static form

    def capture(self, report: Report) -> None:
        """Capture every size, largest first.

        Raises:
            ValueError: a size is above the limits of the state.
        """
        keys = [GraphKey(size, query_len) for query_len in sorted(self.query_lens) for size in self.ladder]
        with self.state.graph_capture(max(self.ladder.sizes), self.table.side.buffers):
            self._capture_all(sorted(keys, key=lambda key: -key.num_tokens), report)

    def _capture(self, key: GraphKey) -> tuple[AttentionState[Any], Graph]:
        state = self.state.graph_clone(*key)
        idle = idle_step(self.table, key.query_len, key.num_reqs - 1, key.query_len, for_graph=True)
        context = self.layers.context(self.layers.plan(state, idle.common))
        logits_at = torch.arange(key.num_tokens, device=self.table.device)

        def run() -> torch.Tensor:
            return self.layers.model.forward(idle.token_ids, idle.positions, logits_at, context)

        return state, self.recorder.capture(run, [state, self.table, self.layers, logits_at])

    def fit(self, query_lens: IntArray) -> GraphKey | None:
        """The captured size that a batch is padded to; None if none holds it."""
        query_len = int(query_lens[0])
        size = self.ladder.fit(len(query_lens)) if (query_lens == query_len).all() else None
        return None if size is None or query_len not in self.query_lens else GraphKey(size, query_len)

    def padding(self, key: GraphKey, query_lens: IntArray) -> tuple[int, int]:
        """Rows to add, and tokens of each."""
        return key.num_reqs - len(query_lens), key.query_len

    def serves(self, common: CommonAttentionMetadata) -> bool:
        return self.layers.plans.can_run_in_cudagraph(common)

    def run(self, key: GraphKey, step: StepBatch, logits_at: NDArray[np.int64]) -> torch.Tensor:
        """Fill, replay, and return the logits of some tokens."""
        state, graph = self._captured[key]
        self.layers.plan(state, step.common)
        logits = graph.replay()
        return logits[: len(logits_at)] if key.query_len == 1 else logits[torch.from_numpy(logits_at)]


class PiecewiseGraphs(_StepGraphs[torch.Tensor]):
    """Any step as graphs of what lies between attention layers, by its number of tokens; attention runs eager."""

    for_graph = False
    steps: Steps | None = None  # of the step that is replayed; None while capturing

    def capture(self, report: Report) -> None:
        """Capture every size, largest first.

        Raises:
            ValueError: a size is above the limits of the table.
        """
        for size in self.ladder:
            check_capture_size(1, size, self.table.limits)
        self._capture_all([GraphKey(1, size) for size in self.ladder], report)

    def _capture(self, key: GraphKey) -> tuple[torch.Tensor, Graph]:
        idle = idle_step(self.table, 1, int(key.num_tokens > 1), key.num_tokens - 1)
        num_logits = min(key.num_tokens, self.table.limits.max_num_requests)
        logits_at = torch.zeros(num_logits, dtype=torch.int64, device=self.table.device)

        def run() -> torch.Tensor:
            return self.layers.model.forward(idle.token_ids, idle.positions, logits_at, self)

        return logits_at, self.recorder.capture(run, [self.table, self.layers, logits_at])

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        """Called by the model's layers while it is captured: a cut for each of them."""
        layer: int = module.layer_idx  # the dry run has checked it
        impl, cache = self.layers.plans.impls[layer], self.layers.caches[layer]
        output = new[0].new_zeros(*new[0].shape[:2], impl.spec.head_dim_vo)

        def eager() -> None:
            if self.steps is not None:
                impl.forward(*new, cache, self.steps[layer], output)

        self.recorder.cut(eager)
        return output

    def fit(self, query_lens: IntArray) -> GraphKey | None:
        """The captured number of tokens that a batch is padded to; None if none holds it."""
        size = self.ladder.fit(int(query_lens.sum()))
        return None if size is None else GraphKey(1, size)

    def padding(self, key: GraphKey, query_lens: IntArray) -> tuple[int, int]:
        """Rows to add, and tokens of each: of one where there is room, so that the step can be advanced."""
        missing = key.num_tokens - int(query_lens.sum())
        if len(query_lens) + missing <= self.table.limits.max_num_requests:
            return missing, 1
        return int(missing > 0), missing

    def serves(self, common: CommonAttentionMetadata) -> bool:
        return True

    def run(self, key: GraphKey, step: StepBatch, logits_at: NDArray[np.int64]) -> torch.Tensor:
        """Fill, replay, and return the logits of some tokens."""
        static, graph = self._captured[key]
        static[: len(logits_at)].copy_(torch.from_numpy(logits_at), non_blocking=True)  # staged: it does not wait
        self.steps = self.layers.plan(self.state, step.common)
        return graph.replay()[: len(logits_at)]

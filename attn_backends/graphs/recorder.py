"""Capture and replay: what a function launches, recorded once and run again without its Python.

`GraphRecorder` is what engines and the conformance kit ask for; `CudaRecorder` is torch's CUDA graphs, and
`attn_backends.testing.graphs.simulator` the same on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from attn_backends.step.staging import no_garbage_collection

Run = Callable[[], torch.Tensor]


class Graph(Protocol):
    def replay(self) -> torch.Tensor:
        """Run again what was captured; returns the static output."""


class GraphRecorder(Protocol):
    """Captures what a function launches: `CudaRecorder`, or on a CPU the simulator of `attn_backends.testing`."""

    def capture(self, run: Run, persistent: Sequence[object]) -> Graph:
        """Run once to warm up, once to record.

        Args:
            persistent: whatever owns the tensors that the graph may read. The graph holds it, so they outlive it.
        """

    def cut(self, eager: Callable[[], None]) -> None:
        """Called from inside `run`: end one graph, run something now and at every replay, begin the next graph."""


class CudaRecorder:
    """`torch.cuda.CUDAGraph`s that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._pieces: list[Callable[[], None]] = []
        self._recording: torch.cuda.CUDAGraph | None = None
        self._kept: torch.cuda.CUDAGraph | None = None

    def capture(self, run: Run, persistent: Sequence[object]) -> Graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            torch.cuda.synchronize()
            self._pieces = []
            with no_garbage_collection():
                # torch refuses a pool whose last graph is gone while what it holds is still in use: one is kept.
                if self._kept is None:
                    kept = torch.cuda.CUDAGraph()
                    kept.capture_begin(pool=self._pool)
                    torch.zeros(1, dtype=torch.uint8, device="cuda")
                    kept.capture_end()
                    self._kept = kept
                self._begin()
                try:
                    output = run()
                finally:
                    self._end()
        torch.cuda.current_stream().wait_stream(stream)
        return _CudaGraph(tuple(self._pieces), output, tuple(persistent))

    def cut(self, eager: Callable[[], None]) -> None:
        if self._recording is None:  # the warm-up
            eager()
            return
        self._end()
        eager()
        self._pieces.append(eager)
        self._begin()

    def _begin(self) -> None:
        self._recording = torch.cuda.CUDAGraph()
        self._recording.capture_begin(pool=self._pool)

    def _end(self) -> None:
        if self._recording is not None:
            graph, self._recording = self._recording, None
            graph.capture_end()
            self._pieces.append(graph.replay)


def without_python(run: Run, persistent: Sequence[object], recorder: GraphRecorder | None) -> Run:
    """What runs it again, over what its tensors hold by then: with a recorder a graph, which the host replays sooner
    than it makes the calls. `persistent` as for `capture`."""
    return run if recorder is None else recorder.capture(run, persistent).replay


@dataclass(frozen=True)
class _CudaGraph:
    pieces: tuple[Callable[[], None], ...]
    output: torch.Tensor
    persistent: tuple[object, ...]  # held: the pieces know addresses alone

    def replay(self) -> torch.Tensor:
        for piece in self.pieces:
            piece()
        return self.output

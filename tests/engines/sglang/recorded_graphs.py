"""SGLang's runners of CUDA graphs on a CPU: what they capture is recorded, and replayed from the recording alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend

from attn_backends.testing.graphs.recorder import EagerCall, RecordedOp, Recorder


class RecordedGraphs(BaseCudaGraphBackend):
    """In the place of SGLang's backend that captures a whole forward pass for each number of rows."""

    def __init__(self, runner: Any) -> None:
        self.graphs: dict[Any, tuple[list[RecordedOp | EagerCall], Any]] = {}

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    replay_session = contextmanager(lambda self: iter([None]))

    def capture_one(
        self, shape_key: Any, forward_fn: Callable[[], Any], capture_inputs: Any = None, post_warmup_hook: Any = None
    ) -> None:
        for _ in range(2):  # as SGLang warms up
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        recorder = Recorder()
        with recorder.python, recorder:
            output = forward_fn()
        recorder.undo()
        self.graphs[shape_key] = recorder.ops, output

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self.graphs

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        ops, output = self.graphs[shape_key]
        for op in ops:
            op.run()
        return output

    def cleanup(self) -> None:
        self.graphs.clear()


def install(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Have a module's runners record, and ask no GPU."""
    if not hasattr(decode_cuda_graph_runner, "get_or_create_global_graph_capture_stream"):
        pytest.skip("this version's runners make streams of a GPU by themselves")
    monkeypatch.setattr(module, "resolve_decode_backend", RecordedGraphs)
    monkeypatch.setattr(decode_cuda_graph_runner, "get_or_create_global_graph_capture_stream", object)

"""CUDA graphs that are dropped and captured again."""

from __future__ import annotations

import pytest
import torch

from attn_backends.graphs.recorder import CudaRecorder


@pytest.mark.gpu
def test_a_recorder_captures_again_when_all_its_graphs_are_gone() -> None:
    """As an engine does that holds its buffers anew; results of what it dropped may still be in use."""
    recorder, source = CudaRecorder(), torch.ones(4, device="cuda")
    held = recorder.capture(lambda: source + 1, [source]).replay()
    graph = recorder.capture(lambda: source * 3, [source])
    source.fill_(2)
    assert graph.replay().tolist() == [6.0] * 4
    assert held.tolist() == [2.0] * 4

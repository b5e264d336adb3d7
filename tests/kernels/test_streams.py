"""Which workspace a step takes by the stream on which it begins, and when that is refused."""

from __future__ import annotations

import pytest
import torch

from attn_backends.kernels import streams
from attn_backends.kernels.streams import OneStream, PerStream
from attn_backends.registry import get_backend
from attn_backends.spec import AttentionSpec, MLASpec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.graphs.harness import graph_batch
from attn_backends.testing.harness import assert_matches, make_layer
from tests.helpers import flashinfer_emulated, flashinfer_mla_emulated  # noqa: F401 (they register backends)

GPU = torch.device("cuda")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current stream, which a test sets."""
    current = [1]
    monkeypatch.setattr(streams, "_stream_id", lambda _: current[0])
    return current


def test_the_first_stream_takes_what_is_there(on: list[int]) -> None:
    made: list[str] = []
    workspaces = PerStream(GPU, lambda: made.append("made") or f"other {len(made)}")
    assert [workspaces.of_current("first") for _ in range(2)] == ["first", "first"]
    on[0] = 2
    assert [workspaces.of_current("first") for _ in range(2)] == ["other 1", "other 1"]
    on[0] = 3
    assert workspaces.of_current("first") == "other 2"
    on[0] = 1
    assert workspaces.of_current("first") == "first"
    assert len(made) == 2


def test_streams_are_counted(on: list[int]) -> None:
    workspaces = PerStream(GPU, object)
    for on[0] in range(1, 9):
        workspaces.of_current("first")
    on[0] = 9
    with pytest.raises(RuntimeError, match=r"8 streams, each of which has a workspace.*make a state for each"):
        workspaces.of_current("first")
    on[0] = 8
    workspaces.of_current("first")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams that the current one was told to wait for."""
    told: list[object] = []
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: ("stream", handle))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Now", (), {"wait_stream": told.append}))
    return told


def test_one_stream_refuses_a_second(on: list[int], waits: list[object]) -> None:
    stream = OneStream("FLASHINFER", GPU)
    stream.check()
    on[0] = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"FLASHINFER begins on stream 0x2.*0x1.*move_to_current_stream"):
            stream.check()
    stream.move()
    stream.move()
    assert waits == [("stream", 1)]
    stream.check()
    on[0] = 1
    with pytest.raises(RuntimeError, match="Make a state for each"):
        stream.check()


def test_a_cpu_has_one() -> None:
    cpu = torch.device("cpu")
    stream, workspaces = OneStream("TORCH", cpu), PerStream(cpu, object)
    stream.check()
    stream.move()
    assert workspaces.of_current("first") == "first"


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("FLASHINFER_EMULATED", AttentionSpec(4, 2, 64, dtype=torch.bfloat16)),
        ("FLASHINFER_MLA_EMULATED", MLASpec(16, dtype=torch.bfloat16)),
        ("TORCH_MLA", MLASpec(16, dtype=torch.bfloat16)),
    ],
)
def test_states_with_one_workspace_serve_one_stream(
    on: list[int], waits: list[object], name: str, spec: AttentionSpec
) -> None:
    """Eager steps and replays alike, and another stream once it has taken over."""
    batch = random_batch(get_backend(name), spec, [40, 9], [1, 1], page_size=16)
    layer = make_layer(get_backend(name), batch)
    with layer.state.graph_capture(2):
        clone = layer.state.graph_clone(2)
    for_graph = layer.builder.build(0, graph_batch(batch, 2, 1))
    layer.begin(batch)
    on[0] = 2
    for begin in (lambda: layer.begin(batch), lambda: clone.begin_forward(for_graph)):
        with pytest.raises(RuntimeError, match=r"begins on stream 0x2"):
            begin()
    layer.state.move_to_current_stream()
    assert waits == [("stream", 1)]
    assert_matches(layer.forward(batch, layer.begin(batch)), batch)

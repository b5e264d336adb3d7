"""Which workspace a step takes by the stream on which it begins, and when that is refused."""

from __future__ import annotations

import pytest
import torch

from attn_backends import streams
from attn_backends.streams import OneStream, PerStream

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


def test_one_stream_refuses_a_second(on: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = OneStream("FLASHINFER", GPU)
    stream.check()
    on[0] = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"FLASHINFER begins on stream 0x2.*0x1.*move_to_current_stream"):
            stream.check()
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: ("stream", handle))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Now", (), {"wait_stream": waits.append}))
    stream.move()
    stream.move()
    assert waits == [("stream", 1)]
    stream.check()
    on[0] = 1
    with pytest.raises(RuntimeError, match="Make a state for each"):
        stream.check()


def test_a_cpu_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    stream, workspaces = OneStream("TORCH", cpu), PerStream(cpu, object)
    stream.check()
    stream.move()
    assert workspaces.of_current("first") == "first"

"""States and CUDA streams: a workspace serves the steps of one stream, which run one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

_MOST_STREAMS = 8
WorkspaceT = TypeVar("WorkspaceT")


def _stream_id(device: torch.device) -> int:
    """The current stream's handle; 0 where there are no streams."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))  # as Triton asks; a Stream takes ten times as long to make


class PerStream(Generic[WorkspaceT]):
    """Workspaces of all streams but the first that asks, which has one already.

    Args:
        make: allocates another. Its memory belongs to the stream that is current then.
    """

    def __init__(self, device: torch.device, make: Callable[[], WorkspaceT]) -> None:
        self._device = device
        self._make = make
        self._first: int | None = None
        self._others: dict[int, WorkspaceT] = {}

    def of_current(self, first: WorkspaceT) -> WorkspaceT:
        """The current stream's; `first` on the first stream that asks.

        Raises:
            RuntimeError: more streams ask than a state has workspaces for.
        """
        stream = _stream_id(self._device)
        if self._first is None:
            self._first = stream
        if stream == self._first:
            return first
        if stream not in self._others:
            if len(self._others) + 1 == _MOST_STREAMS:
                raise RuntimeError(
                    f"steps of one state began on {_MOST_STREAMS} streams, each of which has a workspace, and now on "
                    "another: begin them on fewer streams, or make a state for each"
                )
            self._others[stream] = self._make()
        return self._others[stream]


class OneStream:
    """The one stream on which a state's steps begin, where its workspace belongs to a library that keeps no second."""

    def __init__(self, backend_name: str, device: torch.device) -> None:
        self._backend_name = backend_name
        self._device = device
        self._stream: int | None = None

    def check(self) -> None:
        """Take the first stream that asks, and refuse any other.

        Raises:
            RuntimeError: a step begins on another stream than the steps before it.
        """
        stream = _stream_id(self._device)
        if self._stream is None:
            self._stream = stream
        if stream != self._stream:
            raise RuntimeError(
                f"a step of {self._backend_name} begins on stream {stream:#x}, and those before it began on "
                f"{self._stream:#x}: their workspace is one, so they would overwrite each other. Make a state for each "
                "stream, or call state.move_to_current_stream() when this stream takes over for good"
            )

    def move(self) -> None:
        """Let the current stream wait for all that the one before it was given, and take it from now on."""
        stream = _stream_id(self._device)
        if self._stream not in (None, stream):
            before = torch.cuda.ExternalStream(self._stream, self._device)
            torch.cuda.current_stream(self._device).wait_stream(before)
        self._stream = stream

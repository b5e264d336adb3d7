"""Stand-ins for what vLLM's runner takes of CUDA to schedule asynchronously: streams, events and pinned memory.

On a CPU all work is done when a call returns, so streams have nothing to wait for, and any memory is the host's.
"""

from __future__ import annotations

from typing import Any

import torch


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


def install() -> None:
    """Put them in torch's place, for the rest of the process."""
    zeros = torch.zeros
    torch.zeros = lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs)
    torch.Tensor.pin_memory = lambda self, *args: self
    torch.Event = torch.cuda.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = torch.cuda.stream = lambda *args: Stream()

"""Host memory that is copied to the device while the host goes on: rings of pinned buffers, guarded by events."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch

from attn_backends.batch.page_table import IntArray

_GRAIN = 256  # ints; copies are rounded up to it, so that their views repeat


class Event(Protocol):
    """What is needed of `torch.cuda.Event`. One that was never recorded counts as done."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While a CUDA graph is captured: a graph that is collected meanwhile is destroyed, which no capture survives."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class AlwaysDone:
    """The event of a copy that is over when it returns, as between two places in host memory."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class HostRing:
    """A ring of host buffers that are written while copies of earlier ones may still run.

    Copies run on the current stream, in order with the kernels that read what they bring.

    Args:
        size: i32 of a buffer.
        depth: buffers in the ring: how many copies the host may be ahead before it waits.
        group: buffers that one event guards, the last of them recording it: an event takes longer than a copy.
        make_event: for tests; by default CUDA events on a GPU.

    Attributes:
        slot: number of the buffer that is written now.
        hosts_cpu: [depth] of [size] i32, pinned where there is a GPU.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        depth: int = 4,
        group: int = 1,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        on_gpu = device.type == "cuda"
        make_event = make_event or (torch.cuda.Event if on_gpu else AlwaysDone)
        self.hosts_cpu = [torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=on_gpu) for _ in range(depth)]
        self.slot = -1
        self._group = group
        self._events = [make_event() for _ in range(depth // group)]

    def next_host(self) -> torch.Tensor:
        """[size] i32 to write the next copy into. Waits for the copies that last read its group, if they still run."""
        self.slot = (self.slot + 1) % len(self.hosts_cpu)
        if self.slot % self._group == 0:
            event = self._events[self.slot // self._group]
            if not event.query():
                event.synchronize()
        return self.hosts_cpu[self.slot]

    def sent(self) -> None:
        """The buffer's copy is queued."""
        if (self.slot + 1) % self._group == 0:
            self._events[self.slot // self._group].record()


class StagingRing(HostRing):
    """A host ring, and the one buffer on the device that all of it is copied to.

    Args:
        size: i32 that one copy may bring; the others as for `HostRing`.

    Attributes:
        on_device: [size] i32.
    """

    def __init__(self, size: int, device: torch.device, *args: Any, **kwargs: Any) -> None:
        size = -(-size // _GRAIN) * _GRAIN
        super().__init__(size, device, *args, **kwargs)
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self.buffers: list[IntArray] = [host.numpy() for host in self.hosts_cpu]
        self._views = lru_cache(maxsize=256)(self._make_views)

    def next_buffer(self) -> IntArray:
        """`next_host` as an array."""
        self.next_host()
        return self.buffers[self.slot]

    def send(self, count: int) -> None:
        """Copy the first `count` ints of that buffer to `on_device`, without waiting. A graph may hold the copy too:
        then `sent` alone is called."""
        host, on_device = self._views(self.slot, -(-count // _GRAIN))
        on_device.copy_(host, non_blocking=True)
        self.sent()

    def _make_views(self, slot: int, grains: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.hosts_cpu[slot][: grains * _GRAIN], self.on_device[: grains * _GRAIN]

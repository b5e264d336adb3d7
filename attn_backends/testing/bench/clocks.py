"""How long a call takes: by events on a GPU, with a cold L2, and by the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Run = Callable[[], object]
Clock = Callable[[Run], float]  # microseconds of one call
FRONT_BYTES = 1 << 28  # written before each turn: more than any L2 holds, and the host queues calls meanwhile
TURN_US, MOST_CALLS = 2_000, 20  # of one turn


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return EventClock(device) if device.type == "cuda" else host_clock


def host_clock(run: Run) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e6


class EventClock:
    """Time on the GPU, a mean of some calls. A fill in front keeps it busy while the host queues them."""

    def __init__(self, device: torch.device) -> None:
        self.front = torch.empty(FRONT_BYTES, dtype=torch.uint8, device=device)
        self._calls: dict[int, int] = {}

    def __call__(self, run: Run) -> float:
        count = self._calls.get(id(run), 1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.front.zero_()
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        us = float(start.elapsed_time(end)) * 1e3 / count
        self._calls[id(run)] = max(1, min(MOST_CALLS, round(TURN_US / max(us, 1e-3))))
        return us

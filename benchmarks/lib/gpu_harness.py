"""What benchmarks of kernels share: replays of CUDA graphs timed by events, in turns, beside a plain copy.

On a CPU a function stands for its graph and the host's clock for events: it shows that a script runs, no more.
"""

from __future__ import annotations

import gc
import importlib.metadata
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from attn_backends.graphs.recorder import CudaRecorder

FRONT_BYTES = 1 << 30
TURN_US = 5_000  # that one turn of a contender takes, about
MOST_REPLAYS = 50  # in one turn
SLOW = 10  # times as long as the median contender
SLOW_ROUNDS = 3
PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn", "vllm", "numpy")

Run = Callable[[], object]


def capture(run: Callable[[], torch.Tensor], device: torch.device) -> Run:
    """What replays the launches of a function as one CUDA graph, after one run to warm up."""
    return run if device.type == "cpu" else CudaRecorder().capture(run, [run]).replay


class Copy(NamedTuple):
    """A copy within the device, to compare bandwidths with."""

    replay: Run
    num_bytes: int  # read and written


def make_copy(device: torch.device) -> Copy:
    size = FRONT_BYTES if device.type == "cuda" else 1 << 16
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not in a graph, whose copies are slower: those of a GiB need none.
    return Copy(lambda: target.copy_(source), 2 * size)


class EventClock:
    """Time of replays on the GPU. A fill in front keeps it busy while the host queues them, and empties the L2."""

    def __init__(self) -> None:
        self.front = torch.empty(FRONT_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, replay: Run, count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.front.zero_()
        start.record()
        for _ in range(count):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count


def host_clock(replay: Run, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        replay()
    return (time.perf_counter() - started) * 1e6 / count


def in_turns_us(replays: dict[str, Run], rounds: int, device: torch.device) -> dict[str, float]:
    """Median time of one replay of each contender, in microseconds, over rounds in which each has its turn."""
    return {name: statistics.median(times) for name, times in rounds_us(replays, rounds, device, {}).items()}


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Of two contenders' times in the same rounds: the median of each round's."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def rounds_us(
    replays: dict[str, Run], rounds: int, device: torch.device, twins: Mapping[str, str], turn_us: float = TURN_US
) -> dict[str, list[float]]:
    """Time of one replay of each contender, in microseconds, in each of some rounds in which all have their turn.

    Every round has an order of its own: what ran before has heated the GPU, more or less, and its clock follows.
    `twins` are to be compared: they follow one another, in either order. Those that take ten times as long as the
    median have a few rounds of their own, after the others: in such a turn the GPU cools, and who comes next gains.
    """
    clock = host_clock if device.type == "cpu" else EventClock()
    first_us = {}
    for name, replay in replays.items():
        clock(replay, 2)  # to warm up
        first_us[name] = max(1e-3, clock(replay, 1))
    groups: dict[str, list[str]] = {}
    for name in replays:
        groups.setdefault(twins.get(name, name), []).append(name)
    limit = SLOW * statistics.median_high(first_us.values())
    slow = [group for group in groups.values() if min(first_us[name] for name in group) >= limit]
    fast = [group for group in groups.values() if group not in slow]
    shuffled = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in replays}
    for name in chain(_turns(fast, rounds, shuffled), _turns(slow, min(rounds, SLOW_ROUNDS), shuffled)):
        count = max(1, min(MOST_REPLAYS, round(turn_us / first_us[name])))
        taken[name].append(clock(replays[name], count))
    return taken


def _turns(groups: list[list[str]], rounds: int, shuffled: random.Random) -> Iterator[str]:
    """Who comes when: in every round all, those of a group one after the other."""
    for _ in range(rounds):
        shuffled.shuffle(groups)
        for group in groups:
            shuffled.shuffle(group)
            yield from group


def free_memory(device: torch.device) -> None:
    """Give back what the last shape's tensors and graphs held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def clean_up(device: str) -> bool:
    """Free memory. Returns whether the device's context is alive."""
    try:
        free_memory(torch.device(device))
        if device != "cpu":
            torch.cuda.synchronize()
    except Exception:  # torch.AcceleratorError, or a RuntimeError
        return False
    return True


def installed(*packages: str) -> tuple[str, ...]:
    """Those of these distributions that are here and can tell their version."""
    return tuple(name for name in packages if _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False

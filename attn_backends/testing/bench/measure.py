"""A run within its minutes: load after load, all backends in turns; what each took, or why it dropped out."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from attn_backends.interface import AttentionBackend
from attn_backends.registry.user_table import Layer, Row
from attn_backends.spec import AttentionSpec, KVCacheSpec
from attn_backends.testing.bench.clocks import Clock, Run
from attn_backends.testing.bench.loads import LoadCase
from attn_backends.testing.bench.problem import check, make_run

MOST_ROUNDS, FEWEST_ROUNDS = 30, 3
SLOW = 10  # times as long as the fastest: its first time is all that it gets
Now = Callable[[], float]  # seconds


class Contender(NamedTuple):
    """A backend, and the pool that it serves the layers with."""

    backend: type[AttentionBackend]
    cache: KVCacheSpec


@dataclass(frozen=True)
class Measurement:
    """One load of one layer: the median time of each backend, and why others have none."""

    spec: AttentionSpec
    case: LoadCase
    us: dict[str, float]
    rounds: int  # of those that are not much slower than the fastest
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def layer(self) -> str:
        """The layer in words: "8/2 heads of 64, window_left 127"."""
        spec = self.spec
        window = f", window_left {spec.window_left}" if spec.window_left >= 0 else ""
        return f"{spec.num_qo_heads}/{spec.num_kv_heads} heads of {spec.head_dim}{window}"

    def row(self) -> Row:
        """What the table keeps of it."""
        return Row(Layer.of(self.spec), self.case.phase, self.case.load, self.us)


class Bench:
    """All loads of all layers, one after the other.

    Args:
        contenders: by name; all serve all layers.
        seconds: for everything; each load has an equal part of what is left, and FEWEST_ROUNDS at least.
        clock, now: what times a call, and what tells the seconds.
    """

    def __init__(
        self, contenders: Mapping[str, Contender], device: torch.device, seconds: float, clock: Clock,
        now: Now = time.monotonic,
    ) -> None:  # fmt: skip
        self.contenders, self.device, self.clock, self.now = dict(contenders), device, clock, now
        self.deadline = now() + seconds
        self._wrong: dict[tuple[str, AttentionSpec, str], str | None] = {}  # what a check found, once a phase

    def run(self, specs: Sequence[AttentionSpec], cases: Sequence[LoadCase]) -> Iterator[Measurement]:
        """Measurements as they are made, for as long as there is time; the first of each phase always."""
        asked = [(spec, case) for case in cases for spec in specs]
        begun = set()
        for place, (spec, case) in enumerate(asked):
            left = self.deadline - self.now()
            if left <= 0 and (spec, case.phase) in begun:
                continue
            begun.add((spec, case.phase))
            yield self._measure(spec, case, self.now() + max(0.0, left) / (len(asked) - place))

    def _measure(self, spec: AttentionSpec, case: LoadCase, until: float) -> Measurement:
        runs: dict[str, Run] = {}
        failed: dict[str, str] = {}
        for name, contender in self.contenders.items():
            try:
                self._check(name, contender, spec, case)
                runs[name] = make_run(contender.backend, spec, contender.cache, self.device, case)
            except Exception as error:  # whatever a kernel library raises is why it has no time
                failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        times = self._rounds(runs, until)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        by_time = dict(sorted(medians.items(), key=lambda pair: pair[1]))
        runs.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return Measurement(spec, case, by_time, max((len(each) for each in times.values()), default=0), failed)

    def _check(self, name: str, contender: Contender, spec: AttentionSpec, case: LoadCase) -> None:
        key = name, spec, case.phase
        if key not in self._wrong:
            self._wrong[key] = None
            try:
                check(contender.backend, spec, contender.cache, self.device, case.phase)
            except Exception as error:
                self._wrong[key] = str(error)
                raise
        if self._wrong[key]:
            raise AssertionError(self._wrong[key])

    def _rounds(self, runs: Mapping[str, Run], until: float) -> dict[str, list[float]]:
        """Times of each call in rounds in which all have their turn, in an order that changes."""
        first = {name: self.clock(run) for name, run in runs.items()}
        slow = {name: [us] for name, us in first.items() if us >= SLOW * min(first.values())}
        names = [name for name in runs if name not in slow]
        taken: dict[str, list[float]] = {name: [] for name in names}
        shuffled = random.Random(0)
        for done in range(MOST_ROUNDS if runs else 0):
            if done >= FEWEST_ROUNDS and self.now() >= until:
                break
            shuffled.shuffle(names)
            for name in names:
                taken[name].append(self.clock(runs[name]))
        return taken | slow

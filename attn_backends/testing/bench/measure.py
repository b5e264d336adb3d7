"""A run within its minutes: each backend checked against float64 at a small batch, then load after load, all in turns;
what each took, or why it dropped out.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import allocate_kv_cache
from attn_backends.graphs.recorder import CudaRecorder
from attn_backends.interface import AttentionBackend, CudaGraphSupport, Plans
from attn_backends.registry.user_table import Layer, Row
from attn_backends.spec import FP8_DTYPES, AttentionSpec, KVCacheSpec, Limits, new_kv_shapes
from attn_backends.testing.bench.loads import LoadCase
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, run_backend

MOST_ROUNDS, FEWEST_ROUNDS = 30, 3
SLOW = 10  # times as long as the fastest: its first time is all that it gets
Now = Callable[[], float]  # seconds
Run = Callable[[], object]
Clock = Callable[[Run], float]  # microseconds of one call
FRONT_BYTES = 1 << 28  # written before each turn: more than any L2 holds, and the host queues calls meanwhile
TURN_US, MOST_CALLS = 2_000, 20  # of one turn
CHECKED = {"decode": ((33, 70, 5), (1, 1, 1)), "prefill": ((33, 40, 5), (33, 17, 5))}  # lengths, and query lengths


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
            runs: dict[str, Run] = {}
            failed: dict[str, str] = {}
            for name, contender in self.contenders.items():
                try:
                    self._check(name, contender, spec, case)
                    runs[name] = make_run(contender.backend, spec, contender.cache, self.device, case)
                except Exception as error:  # whatever a kernel library raises is why it has no time
                    failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            times = self._rounds(runs, (self.now() + max(0.0, left) / (len(asked) - place)))
            medians = {name: statistics.median(taken) for name, taken in times.items()}
            by_time = dict(sorted(medians.items(), key=lambda pair: pair[1]))
            runs.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            yield Measurement(spec, case, by_time, max((len(each) for each in times.values()), default=0), failed)

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


def check(backend: type[AttentionBackend], spec: AttentionSpec, cache: KVCacheSpec, device: torch.device,
          phase: str) -> None:  # fmt: skip
    """A small batch of the layer equals the float64 reference.

    Raises:
        AssertionError: it does not; says by how much.
    """
    seq_lens, query_lens = CHECKED[phase]
    batch = random_batch(
        backend, spec, seq_lens, query_lens, page_size=cache.page_size, layout=cache.layout, device=device,
        fp8_queries=backend.capabilities().fp8_queries,
    )  # fmt: skip
    assert_matches(run_backend(backend, batch), batch, f"{phase} rows")


def make_run(
    backend: type[AttentionBackend], spec: AttentionSpec, cache: KVCacheSpec, device: torch.device, case: LoadCase
) -> Run:
    """A call that attends and writes the new keys, planned before; on a GPU the replay of a CUDA graph of it."""
    num_requests, num_keys = case.load
    pages = -(-num_keys // cache.page_size)
    pool = replace(cache, num_pages=num_requests * pages)
    limits = Limits(num_requests, num_requests * case.query_len, num_keys)
    plans = Plans(backend, {0: spec}, pool, limits, device)
    kv_cache = allocate_kv_cache(backend, {0: spec}, pool, device).layers[0]
    for cached in kv_cache:
        if cached.dtype in FP8_DTYPES:
            cached.view(torch.uint8).random_(0, 0x40)  # finite, and no larger than a normal number
        else:
            cached.normal_()
    plans.bind(0, **random_batch(backend, spec, (1,), (1,), page_size=cache.page_size, layout=cache.layout,
                                 device=device).weights)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_requests * pages, generator=generator, device="cpu").view(num_requests, pages)
    rows = [SequenceData(num_keys - case.query_len, case.query_len, list_) for list_ in order.numpy()]
    groups = [SequenceGroup(str(i), (row,)) for i, row in enumerate(rows)]
    common = CommonAttentionMetadata.from_sequence_groups(groups, cache.page_size, device)
    shapes = ((spec.num_qo_heads, spec.head_dim), *new_kv_shapes(spec))
    query, key, value = [torch.randn(common.num_tokens, *shape, dtype=spec.dtype, device=device) for shape in shapes]
    if (
        device.type == "cuda"
        and case.phase == "decode"
        and backend.capabilities().cuda_graph > CudaGraphSupport.NEVER
        and plans.can_run_in_cudagraph(common)
    ):
        plans.state.hold_graph_buffers(num_requests)
        common = replace(common, for_graph=True)
    steps = plans.plan(common)
    output = plans.forward(0, query, key, value, kv_cache, steps)

    def run() -> torch.Tensor:
        return plans.forward(0, query, key, value, kv_cache, steps, output)

    return CudaRecorder().capture(run, [plans, steps, kv_cache, output]).replay if device.type == "cuda" else run

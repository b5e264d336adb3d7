"""Runs one case: layers over one state, step after step, eager or in a graph, each compared with the reference."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add
from typing import Any

import torch

from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface.capabilities import Unsupported
from attn_backends.machine import pretend_multiprocessors
from attn_backends.spec import dtype_name
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.graphs.harness import CapturedStep, capture, graph_batch, step_table
from attn_backends.testing.graphs.mixed import capture_mixed, engine_tensors
from attn_backends.testing.harness import (
    Backend,
    Expected,
    Result,
    assert_pool,
    lse_off_by,
    make_layers,
    output_error,
    padded,
)
from attn_backends.testing.verify.cases import Case, Episode
from attn_backends.testing.verify.data import LayerData
from attn_backends.testing.verify.factors import factors
from attn_backends.testing.verify.values import values_of


def run_case(backend: Backend, case: Case, device: str) -> Outcome:
    """Run a case to its end, or to what is wrong first.

    Raises:
        Exception: what is wrong: a mismatch, a write beyond a tensor, or whatever a library raises.
    """
    started, outcome = time.perf_counter(), Outcome(case.seed, case.kind, refused=case.form.refused)
    with torch.no_grad(), pretend_multiprocessors(case.multiprocessors):
        try:
            run = _Run(backend, case, torch.device(device), outcome)
            run.episodes()
            outcome.values = values_of(case, factors(backend), run.in_graph)
        except Unsupported as refusal:
            outcome.refused["+".join(sorted(rejection.code for rejection in refusal.rejections))] += 1
        except ValueError as error:
            if not (case.form.interleaved and "kv_cache." in str(error)):
                raise
            outcome.refused["interleaved caches"] += 1
    outcome.seconds = time.perf_counter() - started
    return outcome


class _Run:
    """One case under way."""

    def __init__(self, backend: Backend, case: Case, device: torch.device, outcome: Outcome) -> None:
        self.case, self.device, self.outcome = case, device, outcome
        self.data = [LayerData(backend, case, i, device) for i in range(len(case.form.specs))]
        wholes = [data.batch(number) for number in range(len(case.episodes)) for data in self.data[:1]]
        firsts = [data.batch(0) for data in self.data]
        of_graph = case.graph_rows * max(case.episodes[0].steps[0])
        if case.mixed_tokens:  # of which rows may have none
            of_graph = max(case.mixed_tokens, case.graph_rows)
        more = max([of_graph, *(episode.num_padded_reqs for episode in case.episodes)])
        self.layers = make_layers(backend, firsts, *wholes, num_padded_reqs=more, roomy=case.roomy)
        self.guards = self.layers[0].guards
        self.pools = [KVCache(*map(self.guards.place, data.template)) for data in self.data]
        self.captured: CapturedStep | None = None
        self.in_graph = case.graph_rows > 0 and self._graph_serves(wholes)

    def _graph_serves(self, wholes: list[Batch]) -> bool:
        """Whether the backend can run every step in a graph; if not, all of them run eager."""
        if self.case.mixed_tokens:  # what declares such graphs has to
            return True
        for whole, episode in zip(wholes, self.case.episodes, strict=True):
            for step, lens in enumerate(episode.steps):
                common = graph_batch(_step_of(whole, episode, step), self.case.graph_rows, lens[0])
                if not all(layer.builder.can_run_in_cudagraph(common) for layer in self.layers):
                    self.outcome.refused["graph of a batch"] += 1
                    return False
        return True

    def episodes(self) -> None:
        for number, episode in enumerate(self.case.episodes):
            wholes = [data.batch(number) for data in self.data]
            expected = [whole.expected() if whole.spec.causal else None for whole in wholes]
            pools = self.captured.caches if self.captured else self.pools
            for pool, data in zip(pools, self.data, strict=True):
                for tensor, now in zip(pool, data.template, strict=True):
                    tensor.copy_(now)
            for step in range(len(episode.steps)):
                batches = [_step_of(whole, episode, step) for whole in wholes]
                answers = [  # where queries see keys ahead of them, a later step's are not there yet
                    batch.expected() if each is None else _answers_of(each, episode, step)
                    for batch, each in zip(batches, expected, strict=True)
                ]
                what = f"episode {number} ({episode.kind}), step {step}"
                if self.in_graph:
                    self.captured = self.captured or self._capture(batches)
                    self.captured.fill(batches, keep_pools=step > 0)
                    results = self.captured.replay()
                else:
                    results = self._eager_step(batches, episode)
                self.outcome.kinds[episode.kind] += 1
                self._compare(results, batches, answers, what)

    def _compare(self, results: list[Result], batches: list[Batch], answers: list[Expected], what: str) -> None:
        for i, (result, batch, expected) in enumerate(zip(results, batches, answers, strict=True)):
            named = f"{what}, layer {i}"
            compare(self.outcome, result, batch, expected, named)
            if batch.pool is not None and result.kv_cache is not None:
                for row in batch.rows:
                    batch.store(batch.pool, row, row.num_cached, row.data.seq_len)
                assert_pool(result.kv_cache, batch.pool, named, batch.has_exact_scales)

    def _eager_step(self, batches: list[Batch], episode: Episode) -> list[Result]:
        """All layers one behind the other; borders are compared once all have run."""
        hint = episode.shared_len if episode.hint else 0
        steps = [
            layer.begin(batch, hint, episode.num_padded_reqs) for layer, batch in zip(self.layers, batches, strict=True)
        ]
        calls = zip(self.layers, batches, steps, self.pools, strict=True)
        inputs = [self._inputs(batch, episode.num_padded_reqs) for batch in batches]
        results = []
        with self.guards.watching():
            for (layer, batch, step, pool), given in zip(calls, inputs, strict=True):
                query, key, value = given
                assert query is not None
                lse = query.new_empty(query.shape[:2], dtype=torch.float32) if self.case.want_lse else None
                cache = pool if batch.pool is not None else None
                output = layer.impl.forward(query, key, value, cache, step, lse=lse)
                results.append(Result(output, lse, cache))
        self.guards.check("after a step")
        return results

    def _inputs(self, batch: Batch, num_padded_reqs: int) -> list[torch.Tensor | None]:
        """Queries, keys and values with NaN behind them: guarded, and slices of one tensor where the case says so."""
        tensors = [padded(new, num_padded_reqs) for new in (batch.query, batch.key, batch.value)]
        if not self.case.fused or len({len(tensor) for tensor in tensors}) > 1:
            return [self.guards.place(new, read_only=True) if len(new) else None for new in tensors]
        whole = self.guards.place(torch.cat([tensor.flatten(1) for tensor in tensors], dim=1), read_only=True)
        parts = whole.split([tensor[0].numel() for tensor in tensors], dim=1)
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _capture(self, batches: list[Batch]) -> CapturedStep:
        case, state = self.case, self.layers[0].state
        if case.mixed_tokens:
            shared, pages = case.over_table and len(self.layers) == 1, state.limits.max_model_len // case.form.page_size
            held = engine_tensors(case.graph_rows, case.mixed_tokens, pages + 1, self.device)
            with self.guards.watching():
                return capture_mixed(self.layers, batches, held, (case.graph_rows, case.mixed_tokens), shared)
        table = step_table(state.limits, batches[0].cache, self.device) if case.over_table else None
        with self.guards.watching():
            return capture(self.layers, batches, case.graph_rows, case.episodes[0].steps[0][0], table)


def _step_of(whole: Batch, episode: Episode, step: int) -> Batch:
    """The batch of one step of an episode."""
    if len(episode.steps) == 1:
        return whole
    news = enumerate(zip(episode.done(step), episode.steps[step], strict=True))
    return whole.cut([(i, start, start + new) for i, (start, new) in news])


def _answers_of(expected: Expected, episode: Episode, step: int) -> Expected:
    """The reference's rows of one step, of those of all steps."""
    firsts = map(add, accumulate(episode.done(len(episode.steps)), initial=0), episode.done(step))
    rows = [first + i for first, new in zip(firsts, episode.steps[step], strict=True) for i in range(new)]
    out, lse = expected
    return out[rows], lse[rows]


class Mismatch(AssertionError):
    """A result that is not as it should be."""


@dataclass
class Outcome:
    """One case: what was compared, how near it was, and what was found."""

    seed: int
    kind: str
    kinds: Counter[str] = field(default_factory=Counter)  # steps, by kind
    refused: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)  # largest error relative to its tolerance, by what it is of
    finding: str | None = None
    values: list[dict[str, Any]] = field(default_factory=list)  # declared ones, together; of a case that passed whole
    seconds: float = 0.0

    def note(self, name: str, error: float, allowed: float, what: str) -> None:
        """Keep an error if it is the worst.

        Raises:
            Mismatch: it is above what is allowed.
        """
        if not error <= allowed:
            raise Mismatch(f"{what}: the {name} is off by {error:.2e}; allowed {allowed:.0e}")
        self.worst[name] = max(self.worst.get(name, 0.0), error / allowed)


def compare(outcome: Outcome, result: Result, batch: Batch, expected: Expected, what: str) -> None:
    """A step's output and LSE against the reference, and zeros and -inf in padded rows.

    Raises:
        Mismatch: they differ; says in what.
    """
    out, lse = expected
    live = len(out)
    if result.output.dtype != batch.spec.dtype or len(result.output) < live:
        raise Mismatch(f"{what}: the output is {list(result.output.shape)} {result.output.dtype}")
    dtype, cached = dtype_name(batch.spec.dtype), dtype_name(batch.spec.cache_dtype)
    allowed = batch.tolerance
    outcome.note(f"{dtype} output over {cached}", output_error(result.output[:live], out), allowed, what)
    if not bool((result.output[live:] == 0).all()):
        raise Mismatch(f"{what}: padded rows of the output are not zero")
    if result.lse is not None:
        error, allowed = lse_off_by(result.lse[:live], lse, batch)
        outcome.note(f"{dtype} lse over {cached}", error, allowed, what)
        if not bool((result.lse[live:] == -torch.inf).all()):
            raise Mismatch(f"{what}: the lse of padded rows is not -inf")

"""Many cases over several processes that are kept alive: hands out seeds, and starts anew what a case has killed."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from pydantic import TypeAdapter

from attn_backends.testing.verify.factors import factors
from attn_backends.testing.verify.pairs import Pairs, Row
from attn_backends.testing.verify.run import Outcome
from attn_backends.testing.verify.worker import Asked, may_lack_memory, prepare

SEEDS_OF_A_RUN = 1 << 20  # so many cases lie between two seeds of a run
MOST_CASE = (1 << 60) - 1  # a layer's numbers have eight times as large a seed, and torch takes 64 bits
MOST_SEED = MOST_CASE // SEEDS_OF_A_RUN
_SILENT_AFTER_S = {"cpu": 300.0, "cuda": 900.0}  # a case that takes longer hangs; libraries compile for minutes
MOST_FINDINGS = 100  # after so many a run ends: more tell nothing
_GRACE_S = 60.0  # once the time is over, for cases that are under way
_LAST_LINES = 12  # of what a process that died has printed

Job = tuple[int, Row | None]  # a case's seed, and the values that it is to have if it is of a covering array


@dataclass
class Tally:
    """What became of all cases so far."""

    pairs: Pairs  # of declared values that ran
    values: Counter[tuple[str, str]] = field(default_factory=Counter)  # cases that ran, by factor and value
    num_cases: int = 0
    num_steps: int = 0
    cases: Counter[str] = field(default_factory=Counter)  # by kind
    steps: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    worst_seeds: dict[str, int] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False  # by Ctrl-C
    unfinished: bool = False  # what was under way at the end is not among the cases

    def add(self, outcome: Outcome) -> None:
        self.num_cases += 1
        self.num_steps += sum(outcome.kinds.values())
        self.cases[outcome.kind] += 1
        self.steps.update(outcome.kinds)
        self.refused.update(outcome.refused)
        for name, error in outcome.worst.items():
            if error > self.worst.get(name, -1.0):
                self.worst[name], self.worst_seeds[name] = error, outcome.seed
        if outcome.finding is not None:  # then the case has not shown that its values work
            self.findings.append({"seed": outcome.seed, "kind": outcome.kind, "what": outcome.finding})
            return
        for row in outcome.values:
            self.pairs.add(row)
        self.values.update({(name, str(value)) for row in outcome.values for name, value in row.items()})


def random_blocks(first: int, num_cases: int | None, siblings: int) -> Iterator[list[Job]]:
    """Seeds of random cases in blocks of siblings, without end if no number is given."""
    for start in count(0, siblings):
        stop = start + siblings if num_cases is None else min(start + siblings, num_cases)
        if start >= stop:
            return
        yield [(first + number, None) for number in range(start, stop)]


class Jobs:
    """The blocks of a run, until there are no more or the time is over."""

    def __init__(self, blocks: Iterable[list[Job]], deadline: float) -> None:
        self._blocks = iter(blocks)
        self._deadline = deadline
        self._lock = threading.Lock()

    def end(self) -> None:
        """No case follows."""
        self._deadline = min(self._deadline, time.monotonic())

    def next_block(self) -> list[Job]:
        """Empty at the end."""
        with self._lock:
            return next(self._blocks, []) if time.monotonic() < self._deadline else []

    @property
    def awaited_s(self) -> float:
        """Seconds until what is under way is awaited no longer, at most what a lock can wait."""
        return min(max(0.0, self._deadline + _GRACE_S - time.monotonic()), threading.TIMEOUT_MAX)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline


def run_campaign(
    asked: Asked, blocks: Iterable[list[Job]], minutes: float, workers: int, on_case: Callable[[Tally], None]
) -> Tally:
    """Run cases in `workers` processes until all have run, or so many minutes are over.

    Args:
        on_case: called after each case with what there is so far, one call at a time.
    """
    tally, outcomes = Tally(Pairs(factors(prepare(asked)))), queue.Queue[Outcome | None]()
    jobs = Jobs(blocks, time.monotonic() + 60 * minutes)
    threads = [threading.Thread(target=_drive, args=(asked, jobs, outcomes), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            outcome = outcomes.get(timeout=jobs.awaited_s)
            if outcome is None:
                running -= 1
            else:
                tally.add(outcome)
                on_case(tally)
                if len(tally.findings) >= MOST_FINDINGS:
                    jobs.end()
    except KeyboardInterrupt:  # what ran until then is reported
        tally.interrupted = True
    except queue.Empty:  # what hangs at the end is not awaited
        tally.unfinished = True
    return tally


def _drive(asked: Asked, jobs: Jobs, outcomes: queue.Queue[Outcome | None]) -> None:
    """Keep one process busy, and start another where one dies; for the same case once, if memory was short."""
    process: _Process | None = None
    try:
        while block := jobs.next_block():
            for job in block:
                if jobs.is_over:
                    break
                for may_run_again in (True, False):
                    process = process or _Process(asked)
                    outcome, is_alive = process.run(job)
                    if not is_alive:
                        process.close()
                        process = None
                    if is_alive or not (may_run_again and may_lack_memory(outcome.finding)):
                        break
                outcomes.put(outcome)
    except Exception as error:  # the run is told of it, rather than waiting for ever
        outcomes.put(Outcome(-1, "(worker)", finding=f"{type(error).__name__}: {error}"))
    finally:
        if process is not None:
            process.close()
        outcomes.put(None)


class _Process:
    """One worker process."""

    def __init__(self, asked: Asked) -> None:
        command = [sys.executable, "-m", "attn_backends.testing.verify.worker", json.dumps(asdict(asked))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
        self._printed = deque[str](maxlen=_LAST_LINES)
        self._lines = queue.Queue[str]()
        self._limit_s = _SILENT_AFTER_S["cpu" if asked.device.startswith("cpu") else "cuda"]
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for lines, take in ((self._process.stdout, self._lines.put), (self._process.stderr, self._printed.append)):
            threading.Thread(target=_read, args=(lines, take), daemon=True).start()
        if self._next_line() is None:
            raise RuntimeError(f"a worker process did not start: {self._last_words()}")

    def run(self, job: Job) -> tuple[Outcome, bool]:
        """The outcome of a case, and whether the process can run another."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError:  # it died between two cases: the next line is empty, which says so
            pass
        line = self._next_line()
        if line is None:
            return Outcome(job[0], "(process died)", finding=self._last_words()), False
        outcome = TypeAdapter(Outcome).validate_json(line)
        dead = outcome.finding is not None and self._has_ended()
        return outcome, not dead

    def close(self) -> None:
        """Let it end by itself, or kill it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _has_ended(self) -> bool:
        """Whether it left after a finding, as it does with `EXIT_DEAD_DEVICE` where the device is."""
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _next_line(self) -> str | None:
        """None: it died, or says nothing for so long that it hangs."""
        try:
            return self._lines.get(timeout=self._limit_s) or None
        except queue.Empty:
            self._process.kill()
            return None

    def _last_words(self) -> str:
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        said = "".join(self._printed).strip()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"the process {how} (or hung for {self._limit_s:.0f} s). Its last lines:\n{said or '(none)'}"


def _read(lines: Iterable[str], take: Callable[[str], object]) -> None:
    """Hand all lines of a pipe on; an empty one is its end."""
    for line in lines:
        take(line)
    take("")

"""Who runs what under compute-sanitizer, and what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.correctness.sanitizer_process import Case, Kind, Plan, Waiting
from benchmarks.correctness.sanitizer_reports import Log, Reports

GRACE_S = 20.0  # for a tool to write what it found, once its program has ended


@dataclass
class Record:
    """What came of a run so far."""

    reports: Reports = field(default_factory=Reports)
    outcomes: list[tuple[str, Case, dict[str, Any] | None]] = field(default_factory=list)  # None: cut off
    processes: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, tool: str, case: Case, outcome: dict[str, Any] | None) -> None:
        with self.lock:
            self.outcomes.append((tool, case, outcome))

    def add_reports(self, tool: str, log: Log, case: Case | None, ended: bool = False) -> None:
        with self.lock:
            for report in log.new_reports(ended):
                self.reports.add(tool, report, case.backend if case else "(none)", case.seed if case else None)

    def rows(self, backends: Sequence[str], tools: Sequence[str]) -> list[dict[str, Any]]:
        """One for each backend and tool."""
        with self.lock:
            return [self._row(backend, tool) for backend in ("(none)", *backends) for tool in tools
                    if backend != "(none)" or any(self.reports.counts(tool, backend))]  # fmt: skip

    def _row(self, backend: str, tool: str) -> dict[str, Any]:
        mine = [(case, done) for name, case, done in self.outcomes if (name, case.backend) == (tool, backend)]
        done = [(case, outcome) for case, outcome in mine if outcome is not None]
        new, explained = self.reports.counts(tool, backend)
        return {
            "backend": backend, "tool": tool, "eager": sum(not case.in_graph for case, _ in done),
            "graphs": sum(case.in_graph for case, _ in done),
            "steps": sum(sum(outcome["kinds"].values()) for _, outcome in done),
            "new": new, "explained": explained,
            "mismatches": sum(outcome["finding"] is not None for _, outcome in done), "cut off": len(mine) - len(done),
            "first": [outcome["finding"][:300] for _, outcome in done if outcome["finding"]][:3],
        }  # fmt: skip


def survey(plan: Plan, backend: str, first_seed: int, most: int, waiting: dict[Kind, Waiting], record: Record) -> None:
    """Run cases of a backend without a tool, until there are `most` eager and as many in graphs: Triton then has their
    kernels on disk, and what goes wrong by itself is told from what goes wrong under a tool."""
    child, _ = plan.child([backend])
    left, seed = {False: most, True: most}, first_seed
    while (answer := child.answer(plan.deadline)) is not None:
        if not answer.get("ready"):
            case = Case(backend, seed, answer["kind"].endswith("graph"))
            seed += 1
            if answer["finding"] is not None:
                record.add("none", case, answer)
            elif answer["kinds"] and left[case.in_graph]:
                left[case.in_graph] -= 1
                record.add("none", case, answer)
                for kind, cases in waiting.items():
                    if kind.takes(case):
                        cases.put(case)
        if not any(left.values()) or seed - first_seed >= 8 * most:
            break
        child.ask(Case(backend, seed, False))
    else:
        case = Case(backend, seed, False)
        record.add("none", case, plan.lost(case))
    status, said = child.end(GRACE_S)
    with record.lock:
        record.processes.append({"tool": "none", "backend": backend, "status": status, "said": said})


def drive(plan: Plan, kind: Kind, backends: Sequence[str], waiting: Waiting, record: Record) -> None:
    """Keep one process under a tool busy, and start another where one dies, until there is nothing to do."""
    case: Case | None = None
    while True:
        begun = time.monotonic()
        child, log = plan.child(backends, kind)
        ready = child.answer(plan.deadline) is not None
        about: dict[str, Any] = {"tool": kind.tool, "cached": kind.cached, "ready": ready}
        about["ready s"] = round(time.monotonic() - begun, 1)
        alive, cases = ready, 0
        while alive and (taken := waiting.take(plan.deadline)) is not None:
            case = taken
            child.ask(case)
            outcome = child.answer(min(plan.deadline, time.monotonic() + plan.case_s))
            record.add(kind.tool, case, outcome or plan.lost(case))
            record.add_reports(kind.tool, log, case)
            alive, cases = outcome is not None, cases + 1
        status, said = child.end(GRACE_S if alive else 5.0)
        record.add_reports(kind.tool, log, case, ended=True)
        with record.lock:
            about |= {"cases": cases, "status": status, "said": said, "summaries": log.summaries}
            record.processes.append(about)
        if alive or not ready or time.monotonic() > plan.deadline:
            return

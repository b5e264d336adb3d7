"""What `benchmarks/engine/warm_up.py` says of two loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine import warm_up


def test_loads_are_compared_step_by_step() -> None:
    first = [warm_up.Step("eager", 8192, 0.5), warm_up.Step("graph", 64, 0.2), warm_up.Step("graph", 48, 0.1)]
    second = [warm_up.Step("eager", 8192, 0.25), warm_up.Step("graph", 64, 0.21), warm_up.Step("graph", 48, 0.05)]
    made = warm_up.compared(first, second, most=2)
    assert made["seconds"] == {"eager": [0.5, 0.25], "graph": [pytest.approx(0.3), pytest.approx(0.26)]}
    assert [(each["kind"], each["tokens"]) for each in made["slower"]] == [("eager", 8192), ("graph", 48)]
    assert made["slower"][0]["ms"] == [500, 250]
    assert warm_up.compared(first, second[:2]) == {"steps": [3, 2], "same": False}


def test_steps_are_seen_with_what_ran_them() -> None:
    class Runner:
        num_replays = 0

        def run(self, batch: int) -> str:
            self._step = SimpleNamespace(common=SimpleNamespace(num_tokens=batch))
            return "logits"

        def run_next(self, tokens: int) -> str:
            self.num_replays += 1
            self._step = SimpleNamespace(common=SimpleNamespace(num_tokens=tokens))
            return "logits"

    llm: Any = SimpleNamespace(runner=Runner())
    steps = warm_up.Steps(llm)
    assert llm.runner.run(300) == "logits"
    assert llm.runner.run_next(64) == "logits"
    assert [step[:2] for step in steps.pop()] == [("eager", 300), ("graph", 64)]
    assert steps.pop() == []


def test_warm_processes_have_medians() -> None:
    rows = [
        {"model": "A", "caches": name, "backend": "B", "first/second": ratio, "compilations": {}}
        for name, ratio in (("warm", 1.3), ("warm 2", 1.0), ("warm 3", 1.1))
    ]
    made = warm_up.medians(rows)
    assert made == {"model": "A", "caches": "median of 3 warm", "backend": "B", "first/second": 1.1}
    assert [*warm_up.turned([*rows, made])[1].values()] == ["first/second", 1.3, 1.0, 1.1, 1.1]

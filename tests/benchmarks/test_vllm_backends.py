"""vLLM's backends in one process take each load in turns, and the ratio is that of each turn."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

script = importlib.import_module("benchmarks.engine.vllm_backends")


class Loads:
    """An engine whose speed changes from turn to turn; the second backend takes half as long in each."""

    order: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, model: str, backend: str, *given: Any) -> None:
        self.backend, self.turn = backend, 0

    def figures(self, kind: str, once: bool = False) -> list[dict[str, Any]]:
        self.order.append((kind, self.backend))
        self.turn += kind == "step"
        value = [0.0, 8.0, 2.0, 6.0][self.turn] / (2 if self.backend == "AB_TORCH" else 1)
        return [{"what": f"{kind}, 1 x 2", "unit": "ms", "value": value, "all": []}]


@pytest.fixture
def _together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.import_module("benchmarks.lib.harness"), "RESULTS", tmp_path)
    monkeypatch.setattr(script, "Loads", Loads)
    monkeypatch.setattr(script.os, "environ", {})
    monkeypatch.setattr(Loads, "order", [])


@pytest.mark.usefixtures("_together")
def test_turns_of_one_process(tmp_path: Path) -> None:
    script.main(["--together", "--model", "toy", "--backend", "CPU_ATTN", "AB_TORCH", "--rows", "check", "step",
                 "mix", "--repeat", "3"])  # fmt: skip
    there, back = ["CPU_ATTN", "AB_TORCH"], ["AB_TORCH", "CPU_ATTN"]
    assert [backend for kind, backend in Loads.order if kind == "step"] == [*there, *back, *there]
    (path,) = tmp_path.glob("*_together.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["what"], row["backend"], row["value"], row["of first"]) for row in rows] == [
        (f"{kind}, 1 x 2", backend, value, ratio)
        for kind in ("step", "mix") for backend, value, ratio in (("CPU_ATTN", 6.0, 1.0), ("AB_TORCH", 3.0, 0.5))
    ]  # fmt: skip


@pytest.mark.usefixtures("_together")
def test_turns_that_were_taken_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(loads: Loads, kind: str, once: bool = False) -> list[dict[str, Any]]:
        if loads.turn == 2:
            raise KeyboardInterrupt
        return as_it_is(loads, kind, once)

    as_it_is = Loads.figures
    monkeypatch.setattr(Loads, "figures", figures)
    with pytest.raises(KeyboardInterrupt):
        script.main(["--together", "--model", "toy", "--backend", "CPU_ATTN", "AB_TORCH", "--rows", "step",
                     "--repeat", "3"])  # fmt: skip
    (path,) = tmp_path.glob("*_together.json")
    assert [row["all"] for row in json.loads(path.read_text())["rows"]] == [[8.0, 2.0], [4.0, 1.0]]


@pytest.mark.parametrize("held", [8, 5])
def test_a_step_is_of_all_requests(held: int) -> None:
    """Prompts are taken in by as many tokens a step as the budget has, so requests end as they began, one behind the
    other. Where the cache holds fewer, some wait for others' ends, and a step's time would be of the rest."""
    loads_of = importlib.import_module("benchmarks.engine.vllm_loads")
    loads = object.__new__(loads_of.Loads)
    loads.sizes, loads._warm = loads_of.Sizes((8,), 20, 2, (1, 1), (), 1, (1, 1), (), 99, 64), set()

    def run(lens: list[int], new: list[int], seed: int) -> None:
        """Steps of as many ms as requests decode in them."""
        loads._steps, waiting, left, now = [], list(lens), [], 0.0
        while waiting or left:
            now += (len(left) or 1) / 1e3
            budget = loads.sizes.budget - len(left)
            left = [each - 1 for each in left]
            while waiting and budget and len(left) < held:
                taken = min(budget, waiting[0])
                waiting[0], budget = waiting[0] - taken, budget - taken
                if not waiting[0]:
                    waiting.pop(0)
                    left.append(new[0] - 1)
            loads._steps.append((now, left.count(0)))
            left = [each for each in left if each]

    loads.run = run
    if held == 8:
        assert loads.step_ms(8, 20) == pytest.approx([8.0, 8.0, 8.0])
    else:
        with pytest.raises(RuntimeError, match="they did not decode together"):
            loads.step_ms(8, 20)


@pytest.mark.usefixtures("_together")
def test_two_of_ours_are_refused() -> None:
    with pytest.raises(SystemExit, match="AB_TORCH, AB_TRITON has two of ours"):
        script.main(["--together", "--model", "toy", "--backend", "AB_TORCH", "AB_TRITON"])

"""Processes that make cases ready, and measure one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import processes
from benchmarks.lib.processes import Failed, Work, rows_of
from tests.helpers import work
from tests.helpers.work import Case

WORK = Work(work.prepare, work.measure, work.clean_up)


def found(cases: list[Case], count: int, of: Work = WORK, most: int = 99) -> dict[str, Any]:
    begun = iter(range(most))
    return {case.name: row for case, row in rows_of(cases, count, of, lambda: next(begun, None) is not None)}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_case_has_a_row(count: int, tmp_path: Path) -> None:
    rows = found([*(Case(f"{i}", tmp_path) for i in range(4)), Case("no", tmp_path, "raises")], count)
    assert rows.pop("no") == Failed("ValueError: no such shape")
    assert {name: row["name"] for name, row in rows.items()} == {name: name for name in "0123"}
    assert len({row["process"] for row in rows.values()}) <= max(count, 1)


@pytest.mark.parametrize("count", [0, 1])
def test_cases_are_begun_in_order_and_no_more_than_may(count: int, tmp_path: Path) -> None:
    assert list(found([Case(f"{i}", tmp_path) for i in range(4)], count, most=2)) == ["0", "1"]


def test_others_stand_still_while_one_is_measured(tmp_path: Path) -> None:
    rows = found([Case("counts", tmp_path, "counts"), Case("watches", tmp_path, "watches")], 2)
    assert rows["watches"]["counted"] == 0
    assert rows["counts"]["counted"] == 0, "it goes on behind that, and ends"


def test_a_case_that_ends_its_process_has_why_and_the_next_ones_go_on(tmp_path: Path) -> None:
    rows = found([Case("a", tmp_path, "ends"), Case("b", tmp_path)], 1)
    assert rows["a"] == Failed("the process ended with 7")
    assert rows["b"]["name"] == "b"


def test_a_case_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_SECONDS", 5.0)
    rows = found([Case("a", tmp_path, "hangs"), Case("b", tmp_path)], 1)
    assert rows["a"] == Failed("not done after 5 s")
    assert rows["b"]["name"] == "b"


def test_a_process_that_cannot_go_on_is_begun_anew(tmp_path: Path) -> None:
    rows = found([Case("a", tmp_path), Case("b", tmp_path)], 1, WORK._replace(clean_up=work.is_broken))
    assert rows["a"]["process"] != rows["b"]["process"]

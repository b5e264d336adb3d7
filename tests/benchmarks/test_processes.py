"""Processes that make cases ready, and measure one at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import processes
from benchmarks.lib.processes import Failed, Work, rows_of
from tests.helpers import work
from tests.helpers.forked import ROOT
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


@pytest.mark.parametrize("other", ["counts", "by another"])
def test_others_stand_still_while_one_is_measured(other: str, tmp_path: Path) -> None:
    """With what they have begun."""
    rows = found([Case("counts", tmp_path, other), Case("watches", tmp_path, "watches")], 2)
    assert rows["watches"]["counted"] == 0
    assert rows["counts"]["counted"] == 0, "it goes on behind that, and ends"


def up() -> processes._Worker:
    """A worker without a case."""
    worker = processes._Worker(WORK)
    assert worker.connection.recv() == "up"
    worker._is_up = True
    return worker


def test_who_stands_still_is_not_late_for_that() -> None:
    worker = up()
    worker.until, began = 1000.0, time.monotonic()
    with processes._standing_still([worker]):
        assert time.monotonic() - began >= processes.DRAIN_SECONDS, "the device has ended what they had queued"
    assert worker.until >= 1000.0 + processes.DRAIN_SECONDS
    worker.signal(signal.SIGSTOP)
    worker.end()  # though it stands still
    assert not worker._process.is_alive()


@pytest.mark.parametrize("ends", ["ends", "waits to be killed"])
def test_a_case_that_ends_its_process_has_why_and_the_next_ones_go_on(ends: str, tmp_path: Path) -> None:
    killer = [Case("killer", tmp_path, "kills")] if ends != "ends" else []
    rows = found([Case("a", tmp_path, ends), *killer, Case("b", tmp_path)], 1 + len(killer))
    assert rows["a"] == Failed(f"the process ended with {'7' if ends == 'ends' else '-9'}")
    assert rows["b"]["name"] == "b"


def test_a_process_that_ended_idle_is_begun_anew(tmp_path: Path) -> None:
    worker = up()
    os.kill(worker._process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    worker._process.join()
    worker.begin(Case("a", tmp_path))
    assert worker.answer([worker]) is None
    assert worker.answer([worker])["name"] == "a"  # type: ignore[index,call-overload]
    worker.end()


@pytest.mark.parametrize("hangs", ["hangs", "hangs when measured"])
@pytest.mark.sampled
def test_a_case_that_takes_too_long_is_given_up(hangs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_SECONDS", 5.0)
    rows = found([Case("a", tmp_path, hangs), Case("b", tmp_path)], 1)
    assert rows["a"] == Failed("not done after 5 s")
    assert rows["b"]["name"] == "b"


def test_a_process_that_cannot_go_on_is_begun_anew(tmp_path: Path) -> None:
    broken = WORK._replace(clean_up=work.is_broken)
    rows = found([Case("a", tmp_path), Case("b", tmp_path)], 1, broken)
    assert rows["a"]["process"] != rows["b"]["process"]
    with pytest.raises(RuntimeError, match="ask for --processes 1"):
        found([Case("a", tmp_path), Case("b", tmp_path)], 0, broken)


def test_none_stands_still_for_ever_where_the_run_is_killed(tmp_path: Path) -> None:
    """In the middle of a measurement."""
    code = (
        "from pathlib import Path; from benchmarks.lib.processes import rows_of; from tests.benchmarks.test_processes "
        f"import WORK; from tests.helpers.work import Case; at = Path({str(tmp_path)!r}); "
        "[*rows_of([Case('a', at, 'hangs when measured'), Case('b', at, 'counts')], 2, WORK, lambda: True)]"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    while not (tmp_path / "pid").exists():
        time.sleep(0.05)
        assert run.poll() is None
    workers = _children(run.pid)
    assert len(workers) >= 2
    run.kill()
    run.wait()
    ends = time.monotonic() + 30
    while any(map(_is_there, workers)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(map(_is_there, workers))


def _children(pid: int) -> list[int]:
    """Of a process, but for the one that tracks its resources."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = path.read_text().rpartition(")")[2].split()
        if int(fields[1]) == pid and b"spawn_main" in (path.parent / "cmdline").read_bytes():
            found.append(int(path.parent.name))
    return found


def _is_there(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

"""Runs of `verify` side by side end in one report, and in its exit status."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.correctness.verify_lanes import Lane, covered, main


@pytest.mark.first
@pytest.mark.rest
def test_lanes_end_in_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lane", "TORCH:1", "--minutes", "0.05", "--seed", "7", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--folder", str(tmp_path)])
    assert ended.value.code == 0
    merged = json.loads((tmp_path / "merged_7.json").read_text())
    assert [(run["backend"], run["declared"]) for run in merged["runs"]] == [("TORCH", True), ("TORCH", False)]
    assert merged["num_cases"] > 0
    assert "0 findings" in capsys.readouterr().out


def test_runs_that_fail_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no run wrote a report: see .*\.log"):
        main(["--lane", "NOBODY:1", "--minutes", "0.02", "--device", "cpu", "--folder", str(tmp_path)])
    assert "NOBODY" in (tmp_path / "nobody_random_0.log").read_text()


def test_backends_that_an_earlier_report_has_not_run_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` refuses a report that says nothing of its backend."""
    started: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"backends": {"TRITON": {}}}))
    words = ["--lane", "TORCH:1", "TRITON:1", "--minutes", "0.05", "--covered", str(earlier)]
    with pytest.raises(SystemExit, match="no run wrote a report"):
        main([*words, "--folder", str(tmp_path)])
    told = {command[4]: "--covered" in command for command in started if "--declared" in command}
    assert told == {"TORCH": False, "TRITON": True}
    one = tmp_path / "one.json"
    one.write_text(json.dumps({"backend": "TORCH"}))
    assert covered(one) == {"TORCH"}


@pytest.mark.parametrize("text", ["TRITON", "TRITON:0", ":3", "TRITON:x"])
def test_what_is_no_lane(text: str) -> None:
    with pytest.raises(Exception, match="write NAME:WORKERS"):
        Lane.parsed(text)

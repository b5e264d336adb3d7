"""Runs of `verify` side by side end in one report, and in its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.verify_lanes import Lane, main


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


@pytest.mark.parametrize("text", ["TRITON", "TRITON:0", ":3", "TRITON:x"])
def test_what_is_no_lane(text: str) -> None:
    with pytest.raises(Exception, match="write NAME:WORKERS"):
        Lane.parsed(text)

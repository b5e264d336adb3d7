"""The benchmark of the engine's own time runs, and its phases are all of a step."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = importlib.import_module("benchmarks.host.engine_host")
    monkeypatch.setattr(importlib.import_module("benchmarks.lib.harness"), "RESULTS", tmp_path)
    monkeypatch.setattr(script, "NEW", 12)
    script.main(["--requests", "2", "--steps", "1", "4", "--repeats", "1"])
    rows = json.loads((tmp_path / "engine_host.json").read_text())["rows"]
    assert [(row["load"], row["steps"]) for row in rows] == [
        (load, steps) for load in ("same", "spread", "stream") for steps in (1, 4)
    ]
    for row in rows:
        assert sum(row[name] for name in (*script.PHASES, "hand out")) == pytest.approx(row["total"])
        assert all(row[name] > 0 for name in script.PHASES)

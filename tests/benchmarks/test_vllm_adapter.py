"""The host time of vLLM's adapter: layers behind a step's first one repeat its launches, and each is counted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")


def test_layers_are_timed_that_repeat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from attn_backends.kernels.launch import INTERPRETED
    from attn_backends.kernels.repeats import LayerLaunches

    if INTERPRETED:
        pytest.skip("interpreted kernels are launched one by one")
    script, started = importlib.import_module("benchmarks.host.vllm_adapter"), []
    monkeypatch.setattr(importlib.import_module("benchmarks.lib.harness"), "RESULTS", tmp_path)
    start = LayerLaunches.start
    monkeypatch.setattr(LayerLaunches, "start", lambda *given: started.append(0) or start(*given))
    monkeypatch.setattr(script, "WARMUP", 2)
    script.main(["--requests", "2", "--calls", "20"])
    rows = json.loads((tmp_path / "vllm_adapter.json").read_text())["rows"]
    eager = [row for row in rows if row["forward us"]]
    assert [row["forward launches"] for row in eager] == [2, 3, 2]
    assert len(started) >= 20 * len(eager)
    assert all(row["step us"] > row["first us"] > 0 for row in eager)

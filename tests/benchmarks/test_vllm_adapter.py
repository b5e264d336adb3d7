"""The host time of vLLM's adapter: layers behind a step's first one repeat its launches, and each is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")

# Of a process of its own, as vLLM's modules are stand-ins when the adapter is first imported.
PROGRAM = """
import json, pathlib, sys
from attn_backends.kernels.repeats import LayerLaunches
from benchmarks.host import vllm_adapter
from benchmarks.lib import harness

start, started = LayerLaunches.start, []
LayerLaunches.start = lambda *given: started.append(0) or start(*given)
harness.RESULTS, vllm_adapter.WARMUP = pathlib.Path(sys.argv[1]), 2
vllm_adapter.main(["--requests", "2", "--calls", "20"])
print(len(started))
"""


@pytest.mark.first
@pytest.mark.rest
def test_layers_are_timed_that_repeat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "vllm_adapter.json").read_text())["rows"]
    eager = [row for row in rows if row["forward us"]]
    assert [row["forward launches"] for row in eager] == [2, 3, 2]
    assert int(done.stdout.splitlines()[-1]) >= 20 * len(eager)
    assert all(row["step us"] > row["first us"] > 0 for row in eager)

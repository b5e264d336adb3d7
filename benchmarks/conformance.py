"""The tests that want a GPU, run and counted by class: writes results/conformance_<name>.json.

    python benchmarks/conformance.py [tests/backends/test_triton.py ...] [--name NAME] [--workers N]
        [--under "compute-sanitizer --target-processes all --error-exitcode 86"]

"graphs" are those of the passed whose names tell of graphs or replays. `--under` starts pytest by another command; if
that ends with a status that is not one of pytest's for tests that ran, no result is written.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from gpu_harness import PACKAGES, installed
from harness import report

ROOT = Path(__file__).parents[1]
NOT_PASSED = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def run(files: Sequence[str], marker: str, workers: int, under: Sequence[str], log: Path) -> int:
    """Pytest's exit status; `log` gets what JUnit's XML says of each test."""
    command = [*under, sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider",
               "-n", str(workers), "--junitxml", str(log), *files]  # fmt: skip
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if under else {}  # or a checker sees one large allocation
    env = {"OMP_NUM_THREADS": "1"} | dict(os.environ) | apart
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def counted(log: Path) -> list[dict[str, Any]]:
    """A row a class, or a module's functions."""
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(log).iter("testcase"):
        counts = found.setdefault(case.get("classname", ""), Counter())
        outcome = next((NOT_PASSED[child.tag] for child in case if child.tag in NOT_PASSED), "passed")
        counts[outcome] += 1
        name = case.get("name", "")
        counts["graphs"] += outcome == "passed" and any(word in name for word in ("graph", "replay"))
        counts["ms"] += round(1e3 * float(case.get("time", 0)))
    return [
        {"tests": name} | {kind: counts[kind] for kind in ("passed", "graphs", "failed", "skipped")}
        | {"seconds": counts["ms"] / 1e3}
        for name, counts in sorted(found.items())
    ]  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=["tests/backends"])
    parser.add_argument("--name", help="of the result; that of the files if not given")
    parser.add_argument("--marker", default="gpu", help="which tests, as pytest's -m takes it")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--under", type=shlex.split, default=[], help="a command that starts the tests' process")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "tests.xml"
        status = run(arguments.files, arguments.marker, arguments.workers, arguments.under, log)
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise SystemExit(f"the tests ended with status {status}: no result is written")
        rows = counted(log)
    names = [Path(file.partition("::")[0]).stem.removeprefix("test_") for file in arguments.files]
    name = arguments.name or "_".join(dict.fromkeys(names))
    title = ", under ".join([f"tests marked {arguments.marker}", *filter(None, [shlex.join(arguments.under)])])
    report(f"conformance_{name}", title, rows, installed(*PACKAGES))
    raise SystemExit(status)


if __name__ == "__main__":
    main()

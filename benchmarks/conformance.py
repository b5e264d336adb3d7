"""The tests that want a GPU, run and counted by class: writes results/conformance_<files>.json.

    python benchmarks/conformance.py [tests/backends/test_triton.py ...] [--workers N] [--under compute-sanitizer ...]

"graphs" are those of the passed whose names tell of graphs or replays. `--under` starts pytest by another command, such
as `compute-sanitizer --error-exitcode 86`, in one process.
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

from gpu_harness import PACKAGES, installed
from harness import report

ROOT = Path(__file__).parents[1]
NOT_PASSED = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def run(files: Sequence[str], marker: str, workers: int, under: Sequence[str], log: Path) -> int:
    """Pytest's exit status; `log` gets what JUnit's XML says of each test."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider", "--junitxml", str(log)]
    if under:
        command, env = [*under, *command], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or it sees one large allocation
    else:
        command, env = [*command, "-n", str(workers)], {}
    return subprocess.run([*command, *files], cwd=ROOT, env={"OMP_NUM_THREADS": "1"} | dict(os.environ) | env,
                          check=False).returncode  # fmt: skip


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
    parser.add_argument("--marker", default="gpu", help="which tests, as pytest's -m takes it")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--under", type=shlex.split, default=[], help="a command that starts the tests' process")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "tests.xml"
        status = run(arguments.files, arguments.marker, arguments.workers, arguments.under, log)
        rows = counted(log) if log.exists() else []
    if rows:
        names = [Path(file.partition("::")[0]).stem.removeprefix("test_") for file in arguments.files]
        how = [Path(arguments.under[0]).name] if arguments.under else []
        title = ", under ".join([f"tests marked {arguments.marker}", *filter(None, [shlex.join(arguments.under)])])
        report("_".join(["conformance", *how, *dict.fromkeys(names)]), title, rows, installed(*PACKAGES))
    raise SystemExit(status)


if __name__ == "__main__":
    main()

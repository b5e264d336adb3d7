"""The tests that want a GPU, run and counted by class: writes results/conformance_<name>.json.

    python -m benchmarks correctness conformance [tests/backends/triton/test_triton.py ...] [-k KEYWORD] [--name NAME]
        [--workers N] [--under "compute-sanitizer --error-exitcode 86"]

"graphs" are those of the passed whose names tell of graphs or replays. `--under` starts each worker by another command;
if one ends with a status that is not pytest's for tests that ran, no result is written.
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
from itertools import chain
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.lib.gpu_harness import PACKAGES, installed
from benchmarks.lib.harness import report

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
ENVIRON = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
NOT_PASSED = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def run(select: Sequence[str], workers: int, folder: Path) -> list[int]:
    """Pytest's exit status; what JUnit's XML says of each test goes to the folder."""
    command = [*PYTEST, *select, "-n", str(workers), "--junitxml", str(folder / "tests.xml")]
    return [subprocess.run(command, cwd=ROOT, env=ENVIRON, check=False).returncode]


def run_under(under: Sequence[str], select: Sequence[str], workers: int, folder: Path) -> list[int]:
    """Every worker's exit status. A checker does not follow pytest-xdist's: each is one of its own, with its share."""
    listed = subprocess.run([*PYTEST, *select, "--collect-only"], cwd=ROOT, env=ENVIRON, stdout=subprocess.PIPE,
                            text=True, check=False)  # fmt: skip
    if listed.returncode:
        print(listed.stdout)
        return [listed.returncode]
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    env = ENVIRON | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or the checker sees one large allocation
    started = [
        subprocess.Popen([*under, *PYTEST, "--junitxml", str(folder / f"{i}.xml"), *share], cwd=ROOT, env=env)
        for i in range(workers) if (share := tests[i::workers])
    ]  # fmt: skip
    return [process.wait() for process in started]


def counted(folder: Path) -> list[dict[str, Any]]:
    """A row a class, or a module's functions."""
    found: dict[str, Counter[str]] = {}
    for case in chain.from_iterable(ElementTree.parse(log).iter("testcase") for log in folder.iterdir()):
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
    parser.add_argument("-k", dest="keyword", help="which of them, as pytest's -k takes it")
    parser.add_argument("--under", type=shlex.split, default=[], help="a command that starts the tests' processes")
    arguments = parser.parse_args(given)
    select = [*arguments.files, "-m", arguments.marker, *(["-k", arguments.keyword] if arguments.keyword else [])]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if arguments.under:
            statuses = run_under(arguments.under, select, arguments.workers, folder)
        else:
            statuses = run(select, arguments.workers, folder)
        if not set(statuses) <= {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
            raise SystemExit(f"the tests ended with status {statuses}: no result is written")
        rows = counted(folder)
    names = [Path(file.partition("::")[0]).stem.removeprefix("test_") for file in arguments.files]
    name = arguments.name or "_".join(dict.fromkeys(names))
    title = ", under ".join([f"tests marked {arguments.marker}", *filter(None, [shlex.join(arguments.under)])])
    report(f"conformance_{name}", title, rows, installed(*PACKAGES))
    raise SystemExit(max(statuses))


if __name__ == "__main__":
    main()

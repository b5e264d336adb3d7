"""Run `attn-backends verify` for several backends side by side, all they declare and random layers, into one report.

python -m benchmarks correctness verify_lanes --lane TRITON:6 TRITON_MLA:4 FLASHMLA,FLASHINFER_MLA:3
    --minutes 8 --seed 81

A lane is backends that run one after the other in so many processes. Each has an equal share of the minutes: half of it
at most for what it declares, by a covering array, and the rest for random layers. Another seed gives other cases of
both; `--covered` leaves out of the arrays what an earlier report has. Exit status 1: something was found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.correctness.merge_verify import merge

_LEFT_OVER_S = 120.0  # of a run beside its minutes: its start, and cases that are under way as they end


@dataclass(frozen=True)
class Lane:
    """Backends that run one after the other, each in so many processes."""

    backends: tuple[str, ...]
    workers: int

    @staticmethod
    def parsed(text: str) -> Lane:
        names, _, workers = text.partition(":")
        if not names or not workers.isdigit() or int(workers) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is no lane; write NAME:WORKERS or NAME,NAME:WORKERS")
        return Lane(tuple(names.split(",")), int(workers))


def run_lane(lane: Lane, given: argparse.Namespace) -> list[Path]:
    """Runs a lane to its end; returns the reports that it wrote."""
    share = 60 * given.minutes / len(lane.backends)
    reports = []
    for backend in lane.backends:
        ends = time.monotonic() + share
        for declared in (True, False):
            left = (ends - time.monotonic()) / (2 if declared else 1)
            report = given.folder / f"{backend.lower()}_{'declared' if declared else 'random'}_{given.seed}.json"
            if run_verify(backend, lane.workers, declared, left, report, given):
                reports.append(report)
    return reports


def run_verify(
    backend: str, workers: int, declared: bool, seconds: float, report: Path, given: argparse.Namespace
) -> bool:
    """Whether a run wrote its report. What it printed is beside it."""
    command = [sys.executable, "-m", "attn_backends.cli.app", "verify", backend, "--device", given.device,
               "--minutes", f"{max(seconds, 1) / 60:.3f}", "--workers", str(workers),
               "--seed", str(given.seed + (not declared)), "--json", str(report)]  # fmt: skip
    command += [word for module in given.imports for word in ("--import", module)]
    if declared:
        command += ["--declared", *(["--covered", str(given.covered)] if backend in covered(given.covered) else [])]
    report.unlink(missing_ok=True)
    with report.with_suffix(".log").open("w") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=log, timeout=seconds + _LEFT_OVER_S, check=False)
            print(f"{report.stem}: exit status {done.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{report.stem}: cut off {_LEFT_OVER_S:.0f} s behind its end", flush=True)
    return report.exists()


def covered(report: Path | None) -> set[str]:
    """Backends that a report, or several merged, is of."""
    if report is None:
        return set()
    found = json.loads(report.read_text())
    return set(found["backends"]) if "backends" in found else {found["backend"]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", dest="lanes", nargs="+", type=Lane.parsed, required=True, metavar="NAMES:WORKERS")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all lanes, which run side by side")
    parser.add_argument("--seed", type=int, default=0, help="of the arrays; random layers are drawn from the next one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--import", dest="imports", nargs="*", default=[], help="modules that register backends")
    parser.add_argument("--covered", type=Path, help="a report: what it has is left out of the arrays")
    parser.add_argument("--folder", type=Path, default=Path("verify_reports"), help="of each run's report and output")
    given = parser.parse_args(words)
    given.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(given.lanes)) as pool:
        written = [
            report for reports in pool.map(lambda lane: run_lane(lane, given), given.lanes) for report in reports
        ]
    if not written:
        sys.exit(f"no run wrote a report: see {given.folder}/*.log")
    merged = merge([json.loads(report.read_text()) for report in written])
    out = given.folder / f"merged_{given.seed}.json"
    out.write_text(json.dumps(merged, indent=1) + "\n")
    print(f"{merged['num_cases']} cases of {len(written)} runs, {merged['num_findings']} findings: {out}")
    sys.exit(int(merged["num_findings"] > 0))


if __name__ == "__main__":
    main()

"""Merge the reports of several runs of `attn-backends verify` into one file.

attn-backends verify TRITON --seed 1 --cases 2000 --json one.json        and so on, with other seeds
python benchmarks/merge_verify.py one.json two.json --out benchmarks/results/verify_h200.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SUMS = ("num_cases", "num_steps", "seconds")
_COUNTS = ("cases", "steps", "refused")


def merge(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several, with a row for each backend and each run as it was.

    Raises:
        ValueError: two runs of one backend began at the same seed, so their cases are the same.
    """
    runs = Counter((report["backend"], report["size"], report["first_seed"]) for report in reports)
    twice = [f"{backend} from seed {seed}" for (backend, _, seed), times in runs.items() if times > 1]
    if twice:
        raise ValueError(f"the same cases are in two reports: {', '.join(twice)}; give each run another --seed")
    backends = dict.fromkeys(report["backend"] for report in reports)
    return {
        "title": "attn-backends verify: random cases against float64 and guard bands",
        "num_cases": sum(report["num_cases"] for report in reports),
        "num_steps": sum(report["num_steps"] for report in reports),
        "num_findings": sum(len(report["findings"]) for report in reports),
        "backends": {
            name: _merged([report for report in reports if report["backend"] == name]) for name in backends
        },
        "runs": [
            {key: report[key] for key in ("command", "backend", "device", "date", "machine", "versions", "first_seed",
                                          *_SUMS)}
            for report in reports
        ],
    }  # fmt: skip


def _merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one backend."""
    merged: dict[str, Any] = {name: sum(report[name] for report in reports) for name in _SUMS}
    for name in _COUNTS:
        merged[name] = dict(sorted(sum((Counter(report[name]) for report in reports), Counter()).items()))
    worst: dict[str, Any] = {}
    for report in reports:
        for name, each in report["worst"].items():
            if name not in worst or each["of_tolerance"] > worst[name]["of_tolerance"]:
                worst[name] = each
    return merged | {
        "worst": dict(sorted(worst.items())),
        "findings": [finding for report in reports for finding in report["findings"]],
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(given)
    merged = merge([json.loads(path.read_text()) for path in arguments.reports])
    arguments.out.write_text(json.dumps(merged, indent=1) + "\n")
    print(
        f"{merged['num_cases']} cases of {len(merged['runs'])} runs, {merged['num_findings']} findings: {arguments.out}"
    )


if __name__ == "__main__":
    main()

"""Merge the reports of several runs of `attn-backends verify`, or what was merged before, into one file.

attn-backends verify TRITON --seed 1 --cases 2000 --json one.json        and so on, with other seeds
attn-backends verify TRITON --declared --json two.json
python -m benchmarks correctness merge_verify one.json two.json --out benchmarks/results/verify.json
python -m benchmarks correctness merge_verify verify.json three.json --out verify.json

With `--alone`, what `verify NAME --case` printed of cases that the device's memory was too little for, beside others:
{"cases": [{"command": "attn-backends verify ...", "printed": ["seed: 7", ..., "found: nothing"]}]}. Those in which
nothing was found are no findings then, but `ran_alone`, with the words of both. `--mended` takes the same of findings
whose cause was mended since, with a `cause` for each, or with what such a layer gets where it is `refused: ` since.
They become `mended`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_backends.testing.verify.pairs import Pairs, counted, values_in
from attn_backends.testing.verify.sizes import default_size
from attn_backends.testing.verify.worker import may_lack_memory

_SUMS = ("num_cases", "num_steps", "seconds")
_COUNTS = ("cases", "steps", "refused")
_SETTLED = ("ran_alone", "mended")  # findings that are none any more
_OF_A_RUN = ("command", "backend", "device", "date", "machine", "versions", "declared", "first_seed", *_SUMS)


def merge(
    reports: Sequence[dict[str, Any]],
    alone: Sequence[Mapping[str, Any]] = (),
    mended: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """One report of several, with a row for each backend and each run as it was.

    Args:
        alone: cases that ran by themselves afterwards, as `command` and what it `printed`.
        mended: cases that ran again once the `cause` of what was found in them was mended, likewise.

    Raises:
        ValueError: two runs of one backend began at the same seed, so their cases are the same; or they were on
            different machines, of which one would seem to have run what the other did.
    """
    reports = [part for report in reports for part in _by_backend(report)]
    runs = Counter(_first_case(run) for report in reports for run in report.get("runs", [report]) if _is_whole(run))
    twice = [f"{backend} from seed {seed}" for (backend, _, seed, _), times in runs.items() if times > 1]
    if twice:
        raise ValueError(f"the same cases are in two reports: {', '.join(twice)}; give each run another --seed")
    _check_machines(reports)
    reports = [_settled(report, alone, mended) for report in reports]
    backends = dict.fromkeys(report["backend"] for report in reports)
    return {
        "title": "attn-backends verify: random cases against float64 and guard bands",
        "num_cases": sum(report["num_cases"] for report in reports),
        "num_steps": sum(report["num_steps"] for report in reports),
        "num_findings": sum(len(report["findings"]) for report in reports),
        "backends": {name: _merged([report for report in reports if report["backend"] == name]) for name in backends},
        "runs": [
            {key: run[key] for key in _OF_A_RUN if key in run}
            for report in reports
            for run in report.get("runs", [report])
        ],
    }


def _by_backend(report: dict[str, Any]) -> list[dict[str, Any]]:
    """A report as it is; of several merged, one for each backend, with its runs."""
    if "backends" not in report:
        return [report]
    of_backend = {name: [run for run in report["runs"] if run["backend"] == name] for name in report["backends"]}
    return [
        {**row, "backend": name, "machine": of_backend[name][0]["machine"], "runs": of_backend[name]}
        for name, row in report["backends"].items()
    ]


def _is_whole(run: Mapping[str, Any]) -> bool:
    """Whether a run left out nothing for what had run before it."""
    return not run.get("continued") and "--covered" not in run["command"].split()


def _first_case(run: Mapping[str, Any]) -> tuple[str, str, int, bool]:
    """Two runs that begin at one case have the same ones."""
    size = run.get("size") or default_size(run["device"])
    return run["backend"], size, run["first_seed"], run.get("declared", False)


def _settled(
    report: Mapping[str, Any], alone: Sequence[Mapping[str, Any]], mended: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A report, with findings apart in whose cases nothing was found later: those of memory alone, and mended ones."""
    by_memory, by_cause = _passed(alone), _passed(mended)
    kept: dict[str, list[dict[str, Any]]] = {"findings": []}
    kept |= {name: [*report.get(name, [])] for name in _SETTLED}
    for finding in report["findings"]:
        command = finding["command"]
        if may_lack_memory(finding["what"]) and command in by_memory:
            kept["ran_alone"].append({**finding, "printed_alone": by_memory[command]["printed"]})
        elif command in by_cause:
            again = by_cause[command]
            kept["mended"].append({**finding, "cause": again["cause"], "printed_again": again["printed"]})
        else:
            kept["findings"].append(finding)
    return {**report, **kept}


def _passed(cases: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """By command, where nothing is found any more, or the layer is refused."""
    return {each["command"]: each for each in cases if each["printed"][-1].startswith(("found: nothing", "refused: "))}


def _check_machines(reports: Sequence[dict[str, Any]]) -> None:
    machines: dict[str, set[str]] = {}
    for report in reports:
        machine = report["machine"]
        machines.setdefault(report["backend"], set()).add(machine.get("gpu") or machine.get("cpu") or "an unknown CPU")
    for backend, names in machines.items():
        if len(names) > 1:
            raise ValueError(f"{backend} ran on {' and on '.join(sorted(names))}: merge the runs of each into a file")


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
    recorded = [report for report in reports if "values" in report]
    return merged | {
        "worst": dict(sorted(worst.items())),
        "findings": [finding for report in reports for finding in report["findings"]],
        **{name: [each for report in reports for each in report[name]] for name in _SETTLED},
        **(_merged_values(recorded) if recorded else {}),
    }


def _merged_values(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many cases had each declared value, and which pairs of values ran, are refused, or did neither."""
    values: dict[str, Counter[str]] = {}
    for report in reports:
        for name, counts in report["values"].items():
            found = values.setdefault(name, Counter())
            for value, times in counts.items():
                found[value] += times
    run, refused = Pairs(values), dict[str, Pairs]()
    for report in reports:
        numbered = values_in(report["values"])
        run.merge(numbered, report["pairs"]["run"])
        for why, masks in report["pairs"]["refused"].items():
            refused.setdefault(why, Pairs(values)).merge(numbered, masks)
    return {"values": {name: dict(counts) for name, counts in values.items()}, **counted(run, refused)}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--alone", type=Path, help="what cases printed that ran by themselves")
    parser.add_argument("--mended", type=Path, help="what cases printed that ran again, with the cause that was mended")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(given)
    later = [json.loads(path.read_text())["cases"] if path else [] for path in (arguments.alone, arguments.mended)]
    merged = merge([json.loads(path.read_text()) for path in arguments.reports], *later)
    arguments.out.write_text(json.dumps(merged, indent=1) + "\n")
    print(
        f"{merged['num_cases']} cases of {len(merged['runs'])} runs, {merged['num_findings']} findings: {arguments.out}"
    )


if __name__ == "__main__":
    main()

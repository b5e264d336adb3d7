"""Write docs/what-ran.md and attn_backends/registry/ran.json: which declared values have run, by results/verify.json.

python -m benchmarks correctness what_ran
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_backends.registry.table import BUILT_IN
from attn_backends.testing.verify.pairs import Pairs, values_in

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "verify.json"
PAGE = ROOT / "docs" / "what-ran.md"
SHIPPED = ROOT / "attn_backends" / "registry" / "ran.json"
_HEAD = """# What ran

What a backend declares (`python registry.py` prints it), and which of it `attn-backends verify` has run: against
float64, between guard bands, in cases in which nothing was found. `--declared` draws cases that have each declared
value and each pair of values that the backend serves together; an open range has its ends and some values between. What
the backend refuses, by the rule that it declares with, stands with the code of its refusal. `no such case`: the two
exclude each other in what they mean, as a window does a chunk.

This page is made by `python -m benchmarks correctness what_ran` from [verify.json](../benchmarks/results/verify.json);
[measuring.md](measuring.md#right) has the commands that make that."""
_NOT_RECORDED = (
    """Which declared values these cases had was not recorded; `attn-backends verify {name} --declared` does."""
)
_MOST_LISTED = 40  # pairs that did not run; verify.json has all


def page(results: Mapping[str, Any]) -> str:
    """The Markdown page."""
    parts = [_HEAD]
    for name in _names(results):
        parts.append(f"## {_title(name)}")
        found = results["backends"].get(name)
        if found is None:
            parts.append("Not run.")
            continue
        parts.append(_where(name, found, results["runs"]))
        parts += _values(found) if "values" in found else [_NOT_RECORDED.format(name=name)]
    return "\n\n".join(parts) + "\n"


def shipped(results: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What the support table says of each backend: a line for each of its providers that ran."""
    found: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in BUILT_IN}
    for name, backend in results["backends"].items():
        registered, provider = _provider(name)
        if registered in found:
            machine = next(run["machine"] for run in results["runs"] if run["backend"] == name)
            counts = _counts(backend) if "values" in backend else {}
            line = {"provider": provider, "machine": machine["gpu"] or machine["cpu"], "cases": backend["num_cases"]}
            found[registered].append(line | counts)
    return found


def _counts(backend: Mapping[str, Any]) -> dict[str, int]:
    values = [times for counts in backend["values"].values() for times in counts.values()]
    pairs = backend["num_pairs"]
    refused = _refusals(backend)
    return {
        "values": len(values) - len(refused),
        "values_run": sum(times > 0 for times in values),
        "pairs": pairs["run"] + pairs["not_run"],
        "pairs_run": pairs["run"],
    }


def _names(results: Mapping[str, Any]) -> list[str]:
    """The built-in backends in the registry's order, each with its providers' names behind it."""
    names: list[str] = []
    for entry in BUILT_IN:
        mine = [name for name in results["backends"] if _provider(name)[0] == entry.name]
        names += mine or [entry.name]
    return names


def _provider(name: str) -> tuple[str, str | None]:
    """The registered backend and its one provider, of a name that the tests register."""
    registered = [entry.name for entry in BUILT_IN if name == entry.name or name.startswith(f"{entry.name}_")]
    longest = max(registered, key=len, default=name)
    return longest, name[len(longest) + 1 :].lower() or None


def _title(name: str) -> str:
    registered, provider = _provider(name)
    return registered if provider is None else f"{registered} with {provider}"


def _where(name: str, found: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """GPU, versions, day, how many cases, and how near to the tolerance."""
    mine = [run for run in runs if run["backend"] == name]
    machine, versions = mine[0]["machine"], dict[str, list[str]]()
    for run in mine:
        for package, version in run["versions"].items():
            if version and version not in versions.setdefault(package, []):
                versions[package].append(version)
    where = machine["gpu"] or machine["cpu"]
    if machine.get("compute_capability"):
        where += f" (compute capability {machine['compute_capability']})"
    known = ", ".join(f"{package} {' and '.join(each)}" for package, each in versions.items() if each)
    worst, error = max(found["worst"].items(), key=lambda item: item[1]["of_tolerance"], default=("nothing", None))
    near = "" if error is None else f" The worst error is {error['of_tolerance']:.2f} of its tolerance: {worst}."
    alone = len(found.get("ran_alone", ()))
    again = f" The device's memory was too little for {alone}, which then ran by themselves." if alone else ""
    if mended := len(found.get("mended", ())):
        again += (
            f" {mended} more were findings whose cause was mended: nothing is found in them since, or they are refused."
        )
    days = " and ".join(dict.fromkeys(run["date"] for run in mine))
    return (
        f"{where}, {days}; {known}.\n\n{found['num_cases']:,} cases, {found['num_steps']:,} steps, "
        f"{len(found['findings'])} findings.{again}{near}"
    )


def _values(found: Mapping[str, Any]) -> list[str]:
    """Each declared value with how many cases had it, and how many pairs ran."""
    refused, lines = _refusals(found), ["| declared | value: cases |", "|---|---|"]
    for factor, counts in found["values"].items():
        words = []
        for value, times in counts.items():
            none = f"refused ({refused[factor, value]})" if (factor, value) in refused else "**not run**"
            words.append(f"{value}: {times or none}")
        lines.append(f"| {factor} | {', '.join(words)} |")
    pairs = found["num_pairs"]
    told = ", ".join(f"{times:,} refused ({why})" for why, times in pairs["refused"].items() if times)
    text = f"Pairs of values: {pairs['declared']:,} declared, {pairs['run']:,} run, {told or 'none refused'}, "
    return ["\n".join(lines), text + f"{pairs['not_run']:,} not run.", *_not_run(found["pairs_not_run"])]


def _refusals(found: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Declared values that no layer has which the backend serves, with the codes."""
    refused, values = dict[tuple[str, str], str](), values_in(found["values"])
    for why, masks in found["pairs"]["refused"].items():
        pairs = Pairs(found["values"])
        pairs.merge(values, masks)
        refused |= {
            value: why for i, value in enumerate(values) if pairs.has(i, i) and not found["values"][value[0]][value[1]]
        }
    return refused


def _not_run(pairs: Mapping[str, Sequence[str]]) -> list[str]:
    every = [f"{one} with {other}" for one, others in pairs.items() for other in others]
    if not every:
        return []
    more = f"; and {len(every) - _MOST_LISTED:,} more, in verify.json" if len(every) > _MOST_LISTED else ""
    return [f"Not run: {', '.join(every[:_MOST_LISTED])}{more}."]


def main() -> None:
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(page(results))
    SHIPPED.write_text(json.dumps(shipped(results), indent=1) + "\n")
    print(f"{PAGE.relative_to(ROOT)}, {SHIPPED.relative_to(ROOT)}; then `python -m benchmarks docs support`")


if __name__ == "__main__":
    main()

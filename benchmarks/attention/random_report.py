"""The report over random shapes, in Markdown: the distribution of ratios, as a whole and by family."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.attention.random_statistics import (
    ENOUGH_OTHERS,
    LIMIT,
    Row,
    bucket,
    counts,
    grouped,
    quantile,
    summary,
)
from benchmarks.docs.tables import figure, table

TITLES = ("shapes", "geometric mean", "median", "99 % up to", "worst", "share won")
FAMILIES: Mapping[str, Callable[[Row], Any]] = {
    "kind": lambda row: row["kind"],
    "head dim": lambda row: row["heads"][2],
    "query heads a KV head": lambda row: row["heads"][0] // row["heads"][1],
    "KV heads": lambda row: _Bucket(row["heads"][1]),
    "requests": lambda row: _Bucket(row["requests"]),
    "cache": lambda row: row["dtype"],
    "page size": lambda row: row["page"],
    "lengths": lambda row: row["lengths"],
}
AUTO_LIMIT = 1.03
MOST_WHY = 110  # letters
OF_ONE_BATCH = ("fixed lengths", "scheduled once")  # contenders of decodes whose graphs serve no other lengths


class _Bucket(str):
    """A range of numbers, ordered by the numbers."""

    def __new__(cls, value: int) -> _Bucket:
        return super().__new__(cls, bucket(value))

    def __lt__(self, other: str) -> bool:
        return int(self.partition(" ")[0]) < int(other.partition(" ")[0])


def report_of(result: Mapping[str, Any]) -> str:
    """All of the report."""
    return "\n\n".join(_parts(result, result["rows"])) + "\n"


def _parts(result: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    counted = [row for row in rows if counts(row)]
    apart = [row for row in rows if row.get("ratio") is not None and not counts(row)]
    of, seeds = result["of"], ", ".join(map(str, result["seed"]))
    yield (
        f"{len(rows)} shapes of seed {seeds}, which is for {result['purpose']}. Ratios are {of}'s time over that of "
        f"the best of all others, and count where {ENOUGH_OTHERS} other libraries or more serve the shape."
    )
    if result["purpose"] == "tuning":
        yield "**Tiles and rules may be tuned on these shapes: no claim stands on this report.**"
    yield from _counted(of, counted)
    if apart:
        yield f"{len(apart)} more shapes have fewer than {ENOUGH_OTHERS} others, and stand apart:"
        yield by_family("others", grouped(apart, lambda row: row["others"]))
    yield from _reads(of, rows)
    yield from _auto(rows)
    yield from _missing(of, rows)
    yield from _above(of, [*counted, *apart])
    yield from _dropped(rows)


def _counted(of: str, counted: Sequence[Row]) -> Iterator[str]:
    """What the headline is of."""
    if not counted:
        yield "No shape was served by enough of them."
        return
    yield headline(of, counted)
    yield from _one_graph(of, counted)
    for name, key in {"": lambda row: "all", **FAMILIES}.items():
        yield by_family(name, grouped(counted, key))
    yield "Who was the best of all others, and how often:"
    best = Counter(row["best other"] for row in counted)
    yield table(("contender", "shapes"), [[name, count] for name, count in best.most_common()])


def headline(of: str, counted: Sequence[Row]) -> str:
    """The distribution in one sentence."""
    found = summary([row["ratio"] for row in counted])
    return (
        f"**{of} takes {found.geometric_mean:.3f} times as long as the best of all others** (geometric mean of "
        f"{found.shapes} shapes; median {found.median:.3f}, 99 % up to {found.quantile_99:.3f}, worst "
        f"{found.worst:.3f}; the faster one at {found.won:.0%})."
    )


def _one_graph(of: str, counted: Sequence[Row]) -> Iterator[str]:
    """Decodes, beside the contenders alone that an engine can capture once."""
    ratios = []
    for row in counted:
        others = [us for name, us in row["us"].items() if name != of and not name.endswith(OF_ONE_BATCH)]
        if row["kind"] == "decode" and others:
            ratios.append(row["us"][of] / min(others))
    if ratios:
        found, above = summary(ratios), sum(ratio > LIMIT for ratio in ratios)
        yield (
            f"Graphs of {of}'s decodes serve all lengths, and those of some contenders only the ones that they were "
            f"captured with ({', '.join(OF_ONE_BATCH)}). Beside the others alone it takes {found.geometric_mean:.3f} "
            f"times as long at {found.shapes} shapes of decodes (99 % up to {found.quantile_99:.3f}, worst "
            f"{found.worst:.3f}; {above} above {LIMIT})."
        )


def by_family(name: str, groups: Mapping[Any, Sequence[Row]]) -> str:
    """A line a group."""
    lines = [[str(group), *_rounded(summary([row["ratio"] for row in rows]))] for group, rows in groups.items()]
    return table([name, *TITLES], lines)


def _rounded(values: Sequence[float]) -> list[Any]:
    return [value if isinstance(value, int) else f"{value:.3f}" for value in values]


def _reads(of: str, rows: Sequence[Row]) -> Iterator[str]:
    reading = [row for row in rows if row.get("of read")]
    shares = [row["of read"] for row in reading]
    if shares:
        worst = quantile(shares, 0.01)
        mean = geometric_mean(shares)
        yield (
            f"Of the bytes a second that a kernel reaches which only reads the keys and values, {of} reaches "
            f"{mean:.3f} (geometric mean of {len(shares)} shapes with decodes alone), and {worst:.3f} or more at 99 %."
        )
        groups = grouped(reading, lambda row: _Bucket(row["requests"]))
        yield table(("requests", "shapes", "of read", "least"), [
            [name, len(each), *(f"{f([row['of read'] for row in each]):.3f}" for f in (geometric_mean, min))]
            for name, each in groups.items()
        ])  # fmt: skip


def _auto(rows: Sequence[Row]) -> Iterator[str]:
    known = [row for row in rows if row.get("AUTO vs best of ours")]
    ratios = [row["AUTO vs best of ours"] for row in known]
    if not known:
        return
    within = sum(ratio <= AUTO_LIMIT for ratio in ratios) / len(ratios)
    yield (
        f"What AUTO takes is within {AUTO_LIMIT} of the best backend of ours at {within:.0%} of {len(ratios)} "
        f"shapes (99 % up to {quantile(ratios, 0.99):.3f}, worst {max(ratios):.3f}). What it takes, and that beside "
        "the best of ours:"
    )
    groups = grouped(known, lambda row: row["AUTO"])
    yield table(("AUTO", *TITLES), [
        [name, *_rounded(summary([row["AUTO vs best of ours"] for row in each]))] for name, each in groups.items()
    ])  # fmt: skip
    others = [row["AUTO vs others"] for row in known if counts(row) and row["AUTO vs others"]]
    if others:
        found = summary(others)
        yield (
            f"AUTO's choice takes {found.geometric_mean:.3f} times as long as the best of other libraries' (geometric "
            f"mean of {found.shapes} shapes; 99 % up to {found.quantile_99:.3f}, worst {found.worst:.3f})."
        )


def _missing(of: str, rows: Sequence[Row]) -> Iterator[str]:
    """What no ratio is of, lest it be forgotten."""
    missing = [row for row in rows if of not in row["us"]]
    if missing:
        yield f"{of} has no time at {len(missing)} shapes:"
        yield table(("id", "shape", "cache", "page", "why"), [
            [row["id"], row["shape"], row["dtype"], row["page"],
             next((line for line in row["dropped"] if line.startswith((of, "all"))), "")] for row in missing
        ])  # fmt: skip


def _above(of: str, rows: Sequence[Row]) -> Iterator[str]:
    above = sorted((row for row in rows if row["ratio"] > LIMIT), key=lambda row: -row["ratio"])
    if not above:
        yield f"No shape is above {LIMIT}."
        return
    surely = sum(row["low"] > LIMIT for row in above)
    yield f"Above {LIMIT}: {len(above)} shapes; {surely} with all of their interval."
    titles = ["id", "kind", "shape", "cache", "page", "ratio", "from", "to"]
    titles += [f"{of} us", "best other", "others", "read us"]
    yield table(titles, [
        [row["id"], row["kind"], row["shape"], row["dtype"], row["page"], *(f"{row[name]:.3f}" for name in
         ("ratio", "low", "high")), row["us"][of], f"{row['best other']} {figure(row['us'][row['best other']])}",
         row["others"], row["read us"]] for row in above
    ])  # fmt: skip


def _dropped(rows: Sequence[Row]) -> Iterator[str]:
    found = Counter(_why(line) for row in rows for line in row["dropped"])
    if found:
        yield "Who dropped out, and how often:"
        yield table(("contender", "why", "shapes"), [[*why, count] for why, count in found.most_common()])


def _why(line: str) -> tuple[str, str]:
    """A contender, and the kind of its error: sizes are left out, so that what differs by them alone is one."""
    name, _, why = line.partition(": ")
    if why.startswith("MissingJITCacheError"):
        return name, "its module is not ready, and nothing was to be compiled"
    return name, re.sub(r"\b\d[\d.,]*\b", "N", why)[:MOST_WHY]

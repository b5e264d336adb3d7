"""Two files of random shapes' results side by side: what a change of the code does to the time of the backend that both
are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.attention.random_report import FAMILIES, by_family
from benchmarks.attention.random_statistics import Row, grouped
from benchmarks.docs.tables import table
from benchmarks.lib.harness import write

MOST_SHAPES = 12  # that are named at either end
_WHERE = ("date", "cpu", "cores", "torch_threads", "gpu", "python", "versions")  # it was measured, and with what


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The report, in Markdown.

    Raises:
        ValueError: they are of two backends or GPUs, or have no shape in common.
    """
    for name in ("of", "gpu"):
        if before[name] != after[name]:
            raise ValueError(f"results of {name} {before[name]!r} and {after[name]!r} have nothing to compare")
    rows = list(_rows(before, after))
    if not rows:
        raise ValueError(f"no shape is in both files with a time of {before['of']}: draw both from the same seed")
    parts = [f"Ratios are {before['of']}'s time of the second file over that of the first, at {len(rows)} shapes."]
    parts += [by_family(name, grouped(rows, key)) for name, key in {"": lambda row: "all", **FAMILIES}.items()]
    ordered = sorted(rows, key=lambda row: row["ratio"])
    ends = ordered if len(ordered) <= 2 * MOST_SHAPES else ordered[:MOST_SHAPES] + ordered[-MOST_SHAPES:]
    lines = [[row["id"], f"{row['ratio']:.3f}", row["before"], row["after"], row["read us"], row["dtype"], row["page"],
              row["shape"]] for row in ends]  # fmt: skip
    parts.append(table(("id", "ratio", "before us", "after us", "read us", "cache", "page", "shape"), lines))
    return "\n\n".join(parts) + "\n"


def write_compared(before: Mapping[str, Any], after: Mapping[str, Any], path: Path) -> None:
    """Write both times of each shape, where and with what they were measured, and none of the rest."""
    rows = [{"id": row["id"], "shape": row["shape"], "dtype": row["dtype"], "page": row["page"],
             "before us": row["before"], "after us": row["after"], "ratio": round(row["ratio"], 4)}
            for row in _rows(before, after)]  # fmt: skip
    measured_on = {name: after[name] for name in _WHERE}
    write(path.stem, f"{after['of']}'s time before a change and after it", rows, (), path.parent, **measured_on)


def _rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Row]:
    """Those of the second file that the first has too, with the ratio of both times in the place of their own."""
    of = before["of"]
    first = {row["id"]: row["us"].get(of) for row in before["rows"]}
    for row in after["rows"]:
        was, now = first.get(row["id"]), row["us"].get(of)
        if was and now:
            yield {"read us": None, **row, "ratio": now / was, "before": was, "after": now}

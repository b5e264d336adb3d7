"""Markdown tables of results: rows as they were written, or one row a shape and one column a contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Pivot(NamedTuple):
    """How a file's rows become one line a shape.

    Attributes:
        value: the column that is shown.
        columns: a column's title by the contender that stands in it. Of several contenders the first that ran counts.
        index: the column that names a shape.
        contender: the column that names a contender.
        bare: shows the fastest contender that is no backend of ours, with its name.
        read: the column of a kernel that only reads the keys and values.
    """

    value: str
    columns: Mapping[str, str]
    index: str = "shape"
    contender: str = "contender"
    bare: bool = True
    read: str | None = None


def figure(value: Any) -> str:
    """A value in three digits, as tables show it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value == 0:
            return "0"
        digits = f"{value:.3g}"
        return f"{float(digits):,.0f}" if "e+" in digits or abs(value) >= 100 else digits
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with text to the left and numbers to the right."""
    numeric = [any(isinstance(row[i], int | float) for row in rows) for i in range(len(titles))]
    lines = [titles, ["---:" if right else "---" for right in numeric]]
    lines += [[figure(value).replace("|", "\\|") for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Rows as they are, all columns that hold a value somewhere or the given ones."""
    names = [*dict.fromkeys(name for row in rows for name in row)] if columns is None else list(columns)
    shown = [name for name in names if any(_fits(row.get(name)) for row in rows)]
    return table(shown, [[row.get(name) for name in shown] for row in rows])


def _fits(value: Any) -> bool:
    return value is not None and value != [] and not isinstance(value, dict)


def shapes(rows: Sequence[Row], pivot: Pivot) -> dict[str, list[Row]]:
    """The rows of each shape, in the file's order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[pivot.index], []).append(row)
    return found


def is_bare(name: str) -> bool:
    """Whether a contender is another library's kernel: our backends have names in upper case."""
    return not name.partition(":")[0].partition(",")[0].replace("_", "").isupper() or name.startswith("FA")


def times(group: Sequence[Row], pivot: Pivot) -> dict[str, float]:
    """One shape's values by title."""
    values = {row[pivot.contender]: row[pivot.value] for row in group if row[pivot.value] is not None}
    found: dict[str, float] = {}
    for name, title in pivot.columns.items():
        if name in values:
            found.setdefault(title, values[name])
    return found


def shown(rows: Sequence[Row], pivot: Pivot) -> list[str]:
    """The titles that have a value at some shape, in the pivot's order."""
    found = {title for group in shapes(rows, pivot).values() for title in times(group, pivot)}
    return [title for title in dict.fromkeys(pivot.columns.values()) if title in found]


def fastest_bare(group: Sequence[Row], pivot: Pivot) -> tuple[float, str] | None:
    """The least value of another library's kernel, and its name."""
    bare = [(row[pivot.value], row[pivot.contender]) for row in group if is_bare(row[pivot.contender])]
    return min((each for each in bare if each[0] is not None), default=None)


def pivoted(rows: Sequence[Row], pivot: Pivot) -> str:
    """One line a shape."""
    titles = shown(rows, pivot)
    lines: list[list[Any]] = []
    for shape, group in shapes(rows, pivot).items():
        known = times(group, pivot)
        line: list[Any] = [shape, *(known.get(title) for title in titles)]
        best = fastest_bare(group, pivot)
        if pivot.bare:
            line.append(None if best is None else f"{figure(best[0])} ({best[1]})")
        if pivot.read:
            line.append(group[0].get(pivot.read))
        lines.append(line)
    more = ["fastest bare kernel"] * pivot.bare + ["reading alone"] * bool(pivot.read)
    return table([pivot.index, *titles, *more], lines)

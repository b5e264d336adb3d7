"""Charts of random shapes' results: how many ratios lie below a value, by kind, and each ratio by the bytes it moves.

python -m benchmarks attention random_plot benchmarks/results/random.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention.random_statistics import LIMIT, Row, counts, grouped
from benchmarks.docs.charts import saved

KINDS = {"decode": "#c1272d", "verify": "#0072b2", "chunks": "#009e73", "prompts": "#e69f00", "mixed": "#cc79a7",
         "windows": "#56b4e9"}  # fmt: skip
TICKS = (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8, 11, 16, 22, 32)


def counted(result: Mapping[str, Any]) -> list[Row]:
    """Rows of the headline; all with a ratio where it has none."""
    rows = [row for row in result["rows"] if row.get("ratio") is not None]
    return [row for row in rows if counts(row)] or rows


def distribution(axis: Any, rows: Sequence[Row]) -> None:
    """The share of shapes up to each ratio, a line a kind and one for all."""
    kinds = grouped(rows, lambda row: row["kind"])
    for kind, of_kind in {**kinds, "all": rows}.items():
        values = sorted(row["ratio"] for row in of_kind)
        shares = [(i + 1) / len(values) for i in range(len(values))]
        style = {"color": "#222222", "linewidth": 2.2} if kind == "all" else {"color": KINDS[kind], "linewidth": 1.1}
        axis.step(values, shares, where="post", label=f"{kind} ({len(values)})", **style)
    axis.axhline(0.99, color="#bbbbbb", linewidth=0.8, zorder=0)
    axis.set_ylabel("share of shapes")
    axis.set_ylim(0, 1.01)
    _ratios(axis, axis.xaxis, rows)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def by_bytes(axis: Any, rows: Sequence[Row]) -> None:
    """A dot a shape, with its interval."""
    for kind, of_kind in grouped(rows, lambda row: row["kind"]).items():
        moved, ratios = [row["bytes"] / 1e6 for row in of_kind], [row["ratio"] for row in of_kind]
        axis.vlines(moved, [row["low"] for row in of_kind], [row["high"] for row in of_kind], color=KINDS[kind],
                    linewidth=0.6, alpha=0.5)  # fmt: skip
        axis.scatter(moved, ratios, s=10, color=KINDS[kind], label=kind, alpha=0.8, linewidths=0)
    axis.set_xscale("log")
    axis.set_xlabel("MB read and written a call")
    _ratios(axis, axis.yaxis, rows)


def _ratios(axis: Any, along: Any, rows: Sequence[Row]) -> None:
    """An axis of ratios, with lines at 1 and at the limit."""
    is_x = along is axis.xaxis
    (axis.set_xscale if is_x else axis.set_yscale)("log")
    values = [row["ratio"] for row in rows]
    low, high = 0.95 * min(*values, 1), 1.05 * max(*values, LIMIT)
    (axis.set_xlim if is_x else axis.set_ylim)(low, high)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    along.set_ticks(ticks, [f"{tick:g}×" for tick in ticks])
    along.set_ticks([], minor=True)
    along.set_label_text("time over that of the best of all others")
    for at, dash in ((1, "-"), (LIMIT, "--")):
        (axis.axvline if is_x else axis.axhline)(at, color="#888888", linewidth=0.8, linestyle=dash, zorder=0)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Both charts side by side, in the form that the path's end says."""
    rows = counted(result)
    with saved(path, 2, 4.2) as axes:
        distribution(axes[0], rows)
        by_bytes(axes[1], rows)
        where = f"{result['gpu'] or result['cpu']}, {result['date']}"
        warning = "; shapes for tuning" if result["purpose"] == "tuning" else ""
        axes[0].figure.suptitle(f"{result['of']} at {len(rows)} random shapes; {where}{warning}", x=0.01, ha="left",
                                fontsize=10, fontweight="bold")  # fmt: skip


def draw_files(source: Path) -> list[Path]:
    """The PNG and the SVG beside a file of results."""
    result, paths = json.loads(source.read_text()), [source.with_suffix(end) for end in (".png", ".svg")]
    for path in paths:
        draw(result, path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a JSON file that random_shapes.py wrote")
    print(f"written to {', '.join(map(str, draw_files(parser.parse_args().results)))}")

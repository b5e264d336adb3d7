"""Draws the results of attention.py by shape and contender: decode as a share of copy bandwidth, prefill in TFLOP/s,
and batches of both in microseconds.

    python benchmarks/attention_plot.py benchmarks/results/attention_all.json

attention.py draws its own results where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FORMS = {
    "decode": ("of copy", "share of copy bandwidth"),
    "prefill": ("TFLOP/s", "TFLOP/s, causal"),
    "both": ("us", "us (less is better)"),
}
OURS = {"TRITON": "#c1272d", "FLASHINFER": "#0072b2", "FLASH_ATTN": "#009e73"}


def color(name: str, index: int) -> str | tuple[float, float, float]:
    """Ours in colours of their own, bare kernels in greys."""
    family = name.partition(":")[0].partition(",")[0]
    grey = 0.35 + 0.5 * (index % 6) / 6
    return OURS.get(family, (grey, grey, grey))


def kind_of(shape: str) -> str:
    """Of FORMS, by the name of a shape."""
    return "both" if shape.endswith("decodes and prefill") else "prefill" if shape.endswith("prefill") else "decode"


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Args:
        results: as attention.py writes them.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [(form, [r for r in results["rows"] if kind_of(r["shape"]) == kind]) for kind, form in FORMS.items()]
    kinds = [(form, rows) for form, rows in kinds if rows]
    most = sum(len(rows) for _, rows in kinds)
    figure, axes = pyplot.subplots(len(kinds), 1, figsize=(10, 2 + 0.17 * most), squeeze=False,
                                   height_ratios=[len(rows) for _, rows in kinds])  # fmt: skip
    for (column, label), rows, axis in ((form, rows, axes[i, 0]) for i, (form, rows) in enumerate(kinds)):
        at, labels, ticks = 0.0, [], []
        for shape in dict.fromkeys(row["shape"] for row in rows):
            group = sorted((row for row in rows if row["shape"] == shape), key=lambda row: row["us"])
            for index, row in enumerate(group):
                axis.barh(at, row[column], height=0.85, color=color(row["contender"], index))
                axis.text(row[column], at, f" {row['us']:,.1f} us", va="center", fontsize=6)
                ticks.append(at)
                labels.append(row["contender"])
                at += 1
            axis.text(0, at - len(group) - 0.9, shape, fontsize=7, fontweight="bold", va="bottom")
            at += 1.4
        axis.set_yticks(ticks, labels, fontsize=6)
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.margins(x=0.08, y=0.01)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{results['title']}; {results['gpu'] or results['cpu']}, {results['date']}", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.995))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_file(source: Path) -> Path:
    """The PNG beside a file of results."""
    path = source.with_suffix(".png")
    draw(json.loads(source.read_text()), path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a JSON file that attention.py wrote")
    print(f"written to {draw_file(parser.parse_args().results)}")

"""Draws the results of attention.py by shape and contender: decode as a share of copy bandwidth, prefill in TFLOP/s,
and batches of both in microseconds.

    python -m benchmarks attention attention_plot benchmarks/results/attention_all.json

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
COLUMNS = 3
OURS = {"TRITON": "#c1272d", "FLASHINFER": "#0072b2", "FLASH_ATTN": "#009e73"}


def color(name: str) -> str:
    """Ours in colours of their own, bare kernels in grey."""
    return OURS.get(name.partition(":")[0].partition(",")[0], "#9a9a9a")


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

    by_shape: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        by_shape.setdefault(row["shape"], []).append(row)
    shapes = sorted(by_shape, key=lambda shape: [*FORMS].index(kind_of(shape)))
    highest = dict.fromkeys(FORMS, 0.0)
    for row in results["rows"]:
        kind = kind_of(row["shape"])
        highest[kind] = max(highest[kind], row[FORMS[kind][0]])

    num_lines, most = -(-len(shapes) // COLUMNS), max(map(len, by_shape.values()))
    figure, axes = pyplot.subplots(num_lines, COLUMNS, figsize=(17, 0.6 + num_lines * (0.9 + 0.16 * most)),
                                   squeeze=False, layout="constrained")  # fmt: skip
    for axis, shape in zip(axes.flat, shapes, strict=False):
        kind = kind_of(shape)
        column, label = FORMS[kind]
        group = sorted(by_shape[shape], key=lambda row: row["us"])
        for index, row in enumerate(group):
            axis.barh(index, row[column], height=0.85, color=color(row["contender"]))
            axis.text(row[column], index, f" {row['us']:,.1f} us", va="center", fontsize=6)
        axis.set_title(shape, fontsize=8, fontweight="bold", loc="left")
        axis.set_yticks(range(len(group)), [row["contender"] for row in group], fontsize=6)
        axis.set_ylim(most - 0.5, -0.5)
        axis.set_xlim(0, 1.12 * highest[kind])
        axis.tick_params(axis="x", labelsize=6)
        axis.set_xlabel(label, fontsize=6)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(shapes) :]:
        axis.remove()
    figure.suptitle(f"{results['title']}; {results['gpu'] or results['cpu']}, {results['date']}", fontsize=11)
    figure.savefig(path, dpi=110)
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

"""Measurements as a chart: a line a load, a dot a backend, at its time over the fastest's. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from attn_backends.testing.bench.measure import Measurement

COLORS = ("#c1272d", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#8a8a8a", "#000000")
NEEDS = "a chart needs matplotlib: pip install matplotlib"


def can_draw() -> bool:
    """Whether matplotlib is here."""
    return find_spec("matplotlib") is not None


def draw_times(found: Sequence[Measurement], title: str, folder: Path, stem: str) -> list[Path]:
    """Write the chart as SVG and as PNG, and return where."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [each for each in found if each.us]
    names = sorted({name for each in found for name in each.us})
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure, axis = pyplot.subplots(figsize=(8.2, 1.6 + 0.3 * len(found)), layout="constrained")
        for place, name in enumerate(names):
            dots = [(each.us[name] / min(each.us.values()), line) for line, each in enumerate(found) if name in each.us]
            axis.plot(*zip(*dots, strict=True), "o", label=name, color=COLORS[place % len(COLORS)], alpha=0.85)
        axis.set_yticks(range(len(found)), [f"{each.case}, {each.layer}" for each in found])
        axis.set_ylim(len(found) - 0.4, -0.6)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}×" if value < 3 else "")
        axis.grid(axis="y", color="#e4e4e4")
        axis.set_xlabel("time as a multiple of the fastest's (log scale; left is faster)")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{stem}.{kind}" for kind in ("svg", "png")]
        for path in paths:
            figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)
    return paths

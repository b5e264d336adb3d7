"""Charts of results as SVG, the same bytes for the same results and the same matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.docs.tables import Pivot, Row, fastest_bare, shapes, times

COLORS = {"TRITON": "#c1272d", "FLASHINFER": "#0072b2", "FLASH_ATTN": "#009e73", "FLASHMLA": "#cc79a7",
          "TORCH": "#e69f00", "attn_backends": "#c1272d", "transformers": "#8a8a8a", "vLLM": "#0072b2",
          "StepTable": "#c1272d"}  # fmt: skip
OTHERS = ("#56b4e9", "#d55e00", "#8a8a8a", "#000000")
STYLE = {
    "svg.hashsalt": "attn_backends",
    "svg.fonttype": "none",  # letters stay text: small files that search finds
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
}
WIDTH = 8.2  # inches


def color(title: str, place: int) -> str:
    known = [name for name in COLORS if title.startswith(name)]
    return COLORS[max(known, key=len)] if known else OTHERS[place % len(OTHERS)]


@contextmanager
def chart(path: Path, height: float) -> Iterator[Any]:
    """A figure of one axis, written as SVG in the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
        yield axis
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
        pyplot.close(figure)
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def dots(path: Path, rows: Sequence[Row], pivot: Pivot, title: str) -> None:
    """A line a shape, a dot a contender: its time over that of the fastest bare kernel, or of the fastest at all."""
    by_shape = shapes(rows, pivot)
    titles = [*dict.fromkeys(pivot.columns.values())]
    with chart(path, 1.25 + 0.27 * len(by_shape)) as axis:
        reached = [1.0]
        for line, group in enumerate(by_shape.values()):
            best = fastest_bare(group, pivot) if pivot.bare else None
            known = times(group, pivot)
            base = best[0] if best else min(known.values())
            axis.axhline(line, color="#e4e4e4", linewidth=0.8, zorder=0)
            if pivot.read and group[0].get(pivot.read):
                axis.plot(group[0][pivot.read] / base, line, "|", color="#555555", markersize=11, zorder=2)
                reached.append(group[0][pivot.read] / base)
            for name, value in known.items():
                place = titles.index(name)
                shape = "s" if name.endswith(("FA4", "FlashAttention 4")) else "D" if name.endswith("FA2") else "o"
                axis.plot(value / base, line, shape, color=color(name, place), markersize=6.5, alpha=0.9, zorder=3)
                reached.append(value / base)
        against = "the fastest bare kernel's" if pivot.bare else "the fastest's"
        _ratio_axis(axis, reached)
        axis.axvline(1, color="#000000", linewidth=1, zorder=1)
        axis.set_xlabel(f"time as a multiple of {against} (log scale; left is faster)")
        axis.set_yticks(range(len(by_shape)), list(by_shape))
        axis.set_ylim(len(by_shape) - 0.4, -0.6)
        axis.set_title(title, pad=26)
        _legend(axis, titles, pivot)


def _ratio_axis(axis: Any, reached: Sequence[float]) -> None:
    axis.set_xscale("log")
    steps = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 2, 3, 4, 6, 8, 12, 20, 40, 100]
    low, high = 0.97 * min(reached), 1.05 * max(reached)
    shown = [step for step in steps if low <= step <= high]
    if high / low > 4:
        shown = [step for step in shown if step in (0.5, 0.6, 0.8, 1, 1.2, 1.6, 2, 3, 4, 6, 8, 12, 20, 40, 100)]
    axis.set_xlim(low, high)
    axis.set_xticks(shown, [f"{step:g}×" for step in shown])
    axis.xaxis.set_minor_locator(_no_ticks())


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _legend(axis: Any, titles: Sequence[str], pivot: Pivot) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for place, name in enumerate(titles):
        shape = "s" if name.endswith("FA4") else "D" if name.endswith("FA2") else "o"
        handles.append(Line2D([], [], linestyle="", marker=shape, color=color(name, place), label=name))
    if pivot.read:
        handles.append(Line2D([], [], linestyle="", marker="|", color="#555555", markersize=11, label="reading alone"))
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, borderpad=0,
                handletextpad=0.2, columnspacing=1.2)  # fmt: skip


def bars(
    path: Path, groups: Mapping[str, Mapping[str, float]], title: str, unit: str, log: bool = False, fmt: str = "{:.3g}"
) -> None:
    """Groups of horizontal bars, each with its value.

    Args:
        groups: by a group's name the values of its bars, by theirs.
    """
    names = [*dict.fromkeys(name for group in groups.values() for name in group)]
    with chart(path, 1.1 + sum(0.2 * len(group) + 0.16 for group in groups.values())) as axis:
        at, ticks = 0.0, []
        for group in groups.values():
            first = at
            for name, value in group.items():
                axis.barh(at, value, height=0.86, color=color(name, names.index(name)), alpha=_alpha(name))
                axis.text(value, at, f" {fmt.format(value)}", va="center", fontsize=7.5)
                at += 1
            ticks.append((first + at - 1) / 2)
            at += 0.8
        axis.set_yticks(ticks, list(groups))
        axis.set_ylim(at - 1.1, -0.8)
        if log:
            axis.set_xscale("log")
        else:
            axis.set_xlim(0, 1.1 * max(value for group in groups.values() for value in group.values()))
        axis.set_xlabel(unit)
        axis.set_title(title, pad=26)
        _bar_legend(axis, names)


def _alpha(name: str) -> float:
    return 0.55 if name.endswith(("compiled", "eager", "numpy")) else 1.0


def _bar_legend(axis: Any, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color(name, i), alpha=_alpha(name), label=name) for i, name in enumerate(names)]
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, borderpad=0,
                columnspacing=1.2)  # fmt: skip


Draw = Callable[[Path], None]

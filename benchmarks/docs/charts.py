"""Charts of results as SVG, the same bytes for the same results and the same matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.docs.tables import Pivot, Row, fastest_bare, shapes, shown, times

COLORS = {"TRITON": "#c1272d", "FLASHINFER": "#0072b2", "FLASH_ATTN": "#009e73", "FLASHMLA": "#cc79a7",
          "TORCH": "#e69f00", "attn_backends": "#c1272d", "transformers": "#8a8a8a", "vLLM": "#0072b2",
          "StepTable": "#c1272d"}  # fmt: skip
OTHERS = ("#56b4e9", "#d55e00", "#8a8a8a", "#000000")
STYLE = {
    "svg.fonttype": "none",  # letters stay text: small files that search finds
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
WIDTH = 8.2  # inches
_HASH = re.compile(r"\b(?<=[\"#])[A-Za-z][0-9a-f]{10}\b")  # where a name is given, or is referred to
FAR = 2.0  # times the fastest bare kernel


def color(title: str, place: int) -> str:
    known = [name for name in COLORS if title.startswith(name)]
    return COLORS[max(known, key=len)] if known else OTHERS[place % len(OTHERS)]


@contextmanager
def chart(path: Path, height: float) -> Iterator[Any]:
    """A figure of one axis, written as SVG in the end."""
    with saved(path, 1, height) as (axis,):
        yield axis


@contextmanager
def saved(path: Path, columns: int, height: float) -> Iterator[Any]:
    """A figure of some axes side by side, written in the end as SVG, or in another form that the path's end says."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    is_svg = path.suffix == ".svg"
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, columns, figsize=(WIDTH, height), layout="constrained", squeeze=False)
        yield tuple(axes[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None} if is_svg else None
        figure.savefig(path, metadata=metadata, facecolor="white", dpi=130)
        pyplot.close(figure)
    if is_svg:
        lines = _numbered(path.read_text()).splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def _numbered(svg: str) -> str:
    """Hashes that name shapes and clips as numbers, in their order: they are of floats to the last bit, which not all
    CPUs round alike.

    >>> _numbered('<path id="m0123456789"/><use href="#m0123456789" clip-path="url(#pabcdef0123)"/>')
    '<path id="m1"/><use href="#m1" clip-path="url(#p2)"/>'
    """
    names: dict[str, str] = {}
    return re.sub(_HASH, lambda found: names.setdefault(found[0], f"{found[0][0]}{len(names) + 1}"), svg)


def dots(path: Path, rows: Sequence[Row], pivot: Pivot, title: str) -> None:
    """A line a shape, a dot a contender: its time over that of the fastest bare kernel, or of the fastest at all.

    What lies beyond `FAR` is named at the right edge.
    """
    by_shape = shapes(rows, pivot)
    titles = shown(rows, pivot)
    with chart(path, 1.3 + 0.27 * len(by_shape)) as axis:
        reached = [1.0]
        for line, group in enumerate(by_shape.values()):
            known, base = times(group, pivot), _base(group, pivot)
            axis.axhline(line, color="#e4e4e4", linewidth=0.8, zorder=0)
            reading = group[0].get(pivot.read) if pivot.read else None
            if reading:
                axis.plot(reading / base, line, "|", color="#555555", markersize=11, zorder=2)
                reached.append(reading / base)
            far = [f"{name.rpartition(', ')[2]} {value / base:.2g}×" for name, value in known.items()
                   if value / base > FAR]  # fmt: skip
            axis.text(1.01, line, ", ".join(far), transform=axis.get_yaxis_transform(), va="center", fontsize=7.5)
            for name, value in known.items():
                if value / base <= FAR:
                    dot = _dot(name, titles)
                    axis.plot(value / base, line, linestyle="", markersize=6.5, alpha=0.9, zorder=3, **dot)
                    reached.append(value / base)
        _ratio_axis(axis, reached)
        axis.axvline(1, color="#000000", linewidth=1, zorder=1)
        against = "the fastest bare kernel's" if pivot.bare else "the fastest's"
        axis.set_xlabel(f"time as a multiple of {against} (log scale; left is faster)")
        axis.set_yticks(range(len(by_shape)), list(by_shape))
        axis.set_ylim(len(by_shape) - 0.4, -0.6)
        axis.figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        _legend(axis, titles, pivot)


def _base(group: Sequence[Row], pivot: Pivot) -> float:
    best = fastest_bare(group, pivot) if pivot.bare else None
    return best[0] if best else min(times(group, pivot).values())


def _dot(name: str, titles: Sequence[str]) -> dict[str, str]:
    """A contender's colour and form."""
    marker = "s" if name.endswith("FA4") else "D" if name.endswith("FA2") else "o"
    return {"marker": marker, "color": color(name, titles.index(name))}


def _ratio_axis(axis: Any, reached: Sequence[float]) -> None:
    axis.set_xscale("log")
    low, high = 0.97 * min(reached), 1.04 * max(reached)
    steps = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2]
    ticks = [step for step in steps if low <= step <= high]
    axis.set_xlim(low, high)
    axis.set_xticks(ticks, [f"{step:g}×" for step in ticks])
    axis.xaxis.set_minor_locator(_no_ticks())


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _legend(axis: Any, titles: Sequence[str], pivot: Pivot) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="", label=name, **_dot(name, titles)) for name in titles]
    if pivot.read:
        handles.append(Line2D([], [], linestyle="", marker="|", color="#555555", markersize=11, label="reading alone"))
    _below(axis, handles, 6)


def _below(axis: Any, handles: Sequence[Any], columns: int) -> None:
    """A legend under the chart."""
    axis.figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, borderpad=0.2,
                       handletextpad=0.3, columnspacing=1.2, fontsize=8)  # fmt: skip


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
        axis.set_yticks(ticks, [re.sub(r"\b1 requests$", "1 request", name) for name in groups])
        axis.set_ylim(at - 1.1, -0.8)
        if log:
            axis.set_xscale("log")
        else:
            axis.set_xlim(0, 1.1 * max(value for group in groups.values() for value in group.values()))
        axis.set_xlabel(unit)
        axis.figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        _bar_legend(axis, names)


def _alpha(name: str) -> float:
    return 0.55 if name.endswith(("eager", "numpy")) else 1.0


def _bar_legend(axis: Any, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    _below(axis, [Patch(color=color(name, i), alpha=_alpha(name), label=name) for i, name in enumerate(names)], 5)

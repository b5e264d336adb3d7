"""The pages over random shapes, each made of one file of results; without the file it says how to make it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.attention.random_plot import draw
from benchmarks.attention.random_report import report_of

# By the name of the file, the page and the chart; the first is of all kinds of batches, with the newest kernels.
TITLES = {
    "random_h200_newest": "Shapes that nobody chose, H200",
    "random_h100_newest": "Shapes that nobody chose, H100, before prefill had tiles of half the size",
}
NEWEST = next(iter(TITLES))
TOPICS = "the distribution of TRITON's time over that of the best of all others, at shapes drawn at random"
ABOUT = (
    "Heads are those of published models and of their slices over several GPUs. Requests, lengths, kinds of batches, "
    "dtypes and pages are drawn, with the weights that stand in `benchmarks/attention/shape_draws.py`; a seed and a "
    "number name a shape. Each contender is first compared with float64. Seeds to tune by and seeds to judge by are "
    "apart. An interval holds the median of a shape's rounds at 95 %."
)
NOTES = Path(__file__).parent / "notes"  # what a reader has to know beside the figures
MAKE = (
    "No result is committed yet. These commands make one on a GPU:\n\n"
    "```\npython -m benchmarks attention random_shapes --seed 1000 --count 300 --rounds 30 "
    "--json benchmarks/results/random_h200_newest.json\npython -m benchmarks docs measured\n```"
)


def found(results: Path, name: str) -> dict[str, Any] | None:
    """The file's content, if there is one."""
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def text(results: Path, name: str) -> Iterator[str]:
    """A page's parts."""
    result = found(results, name)
    yield f"# {TITLES[name]}"
    yield ABOUT
    if result is None:
        yield MAKE
        return
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    file = f"[{name}.json](../../benchmarks/results/{name}.json)"
    yield f"{result['gpu'] or result['cpu']}, {result['date']}; {versions}; {file}."
    yield f"![Share of shapes up to each ratio, and each ratio by bytes](charts/{name}.svg)"
    yield (NOTES / f"{name}.md").read_text().strip()
    yield report_of(result).strip()


def charts(results: Path, folder: Path) -> Iterator[Path]:
    """Write the charts of what has a result."""
    for name in TITLES:
        result = found(results, name)
        if result is not None:
            path = folder / f"{name}.svg"
            draw(result, path)
            yield path

"""The page over random shapes, made of one file of results; without the file it says how to make it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.attention.random_plot import draw
from benchmarks.attention.random_report import report_of

NAME = "random"  # of the file, the page and the chart
TITLE = "Shapes that nobody chose"
TOPICS = "the distribution of TRITON's time over that of the best of all others, at shapes drawn at random"
ABOUT = (
    "Heads are those of published models and of their slices over several GPUs. Requests, lengths, kinds of batches, "
    "dtypes and pages are drawn, with the weights that stand in `benchmarks/attention/shape_draws.py`; a seed and a "
    "number name a shape. Each contender is first compared with float64. Seeds to tune by and seeds to judge by are "
    "apart. An interval holds the median of a shape's rounds at 95 %."
)
NOTE = Path(__file__).parent / "notes" / f"{NAME}.md"  # what a reader has to know beside the figures
MAKE = (
    "No result is committed yet. These commands make one on a GPU:\n\n"
    "```\npython -m benchmarks attention random_shapes --seed 1000 --count 300 --rounds 30 "
    "--json benchmarks/results/random.json\npython -m benchmarks docs measured\n```"
)


def found(results: Path) -> dict[str, Any] | None:
    """The file's content, if there is one."""
    path = results / f"{NAME}.json"
    return json.loads(path.read_text()) if path.exists() else None


def text(results: Path) -> Iterator[str]:
    """The page's parts."""
    result = found(results)
    yield f"# {TITLE}"
    yield ABOUT
    if result is None:
        yield MAKE
        return
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    file = f"[{NAME}.json](../../benchmarks/results/{NAME}.json)"
    yield f"{result['gpu'] or result['cpu']}, {result['date']}; {versions}; {file}."
    yield f"![Share of shapes up to each ratio, and each ratio by bytes](charts/{NAME}.svg)"
    yield NOTE.read_text().strip()
    yield report_of(result).strip()


def charts(results: Path, folder: Path) -> Iterator[Path]:
    """Write the chart, if there is a result."""
    result = found(results)
    if result is not None:
        path = folder / f"{NAME}.svg"
        draw(result, path)
        yield path

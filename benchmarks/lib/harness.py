"""What the benchmarks share: timing, the machine's description, and results as a table and a JSON file."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parents[1] / "results"
_FILE_COLUMNS = 400


def median_ms(run: Callable[[], object], repeats: int = 15, warmup: int = 3) -> float:
    """Median wall time of one call, in milliseconds."""
    for _ in range(warmup):
        run()
    return statistics.median(_timed_ms(run) for _ in range(repeats))


def alternate_ms(runs: dict[str, Callable[[], object]], repeats: int = 15, warmup: int = 3) -> dict[str, float]:
    """Median times of several contenders, taken in turns so that a slow minute of the machine hits all of them."""
    for run in runs.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(_timed_ms(run))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _timed_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


def machine(packages: tuple[str, ...]) -> dict[str, Any]:
    """What the numbers were measured on, and with which versions of these packages."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def write(
    name: str,
    title: str,
    rows: list[dict[str, Any]],
    packages: tuple[str, ...],
    folder: Path | None = None,
    **more: Any,
) -> Path:
    """Write rows and what else there is to `<name>.json` beside the command and the machine; long runs do so as they
    go. `folder` is `results` where none is given."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    script = Path(sys.argv[0])
    command = shlex.join(["python", "-m", "benchmarks", script.parent.name, script.stem, *sys.argv[1:]])
    made = {"benchmark": name, "title": title, "command": command, **machine(packages), "rows": rows, **more}
    path.write_text(json.dumps(made, indent=1) + "\n")
    return path


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """A table of the rows. Where it is too wide numbers go on in the next line; in a file it is as wide as it is."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS).print(table)


def report(
    name: str, title: str, rows: list[dict[str, Any]], packages: tuple[str, ...] = ("torch", "numpy", "transformers")
) -> Path:
    """Print the rows as a table and write them to `results/<name>.json` beside the machine's description."""
    print_table(title, rows)
    path = write(name, title, rows, packages)
    Console().print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path

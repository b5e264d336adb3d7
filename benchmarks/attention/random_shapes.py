"""Attention at shapes drawn at random, by our backends and by the bare kernels, each checked and timed in turns.

    python -m benchmarks attention random_shapes --seed S --count N [--kinds decode …] [--backend TRITON FLASHINFER …]
        [--rounds 30] [--minutes M] [--json FILE] [--compile]
    python -m benchmarks attention random_shapes --merge A.json B.json … --json FILE

The report is of the first backend: its time over that of the best of all others, which are our other backends and the
libraries' kernels by hand. Seeds for tuning and for judging are ranges of their own (see shape_draws.py). A file that
is there is continued: shapes that it has are skipped. Shapes are begun in their order, so that a run that ends early
has chosen none. Several processes make them ready, and compile for them; one of them at a time measures, while the
others stand still. A library's kernel that would have to be compiled by nvcc drops out, unless `--compile` is given.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attn_backends.backends.flash_attn.state import PROVIDERS
from benchmarks.attention.random_measure import prepare, timed, without_times
from benchmarks.attention.random_plot import draw_files
from benchmarks.attention.random_report import report_of
from benchmarks.attention.random_results import Results, merged
from benchmarks.attention.random_runs import add_contest_options, add_options, check_seed
from benchmarks.attention.shape_draws import BOUNDS, KINDS, drawn
from benchmarks.lib.gpu_harness import clean_up
from benchmarks.lib.harness import RESULTS
from benchmarks.lib.processes import Failed, Work, measured

USUAL = ("TRITON", "FLASH_ATTN", "FLASHINFER")


def backends_of(names: Sequence[str]) -> list[str]:
    """With all providers of FLASH_ATTN that are installed in its place."""
    here = [f"FLASH_ATTN:{provider.name}" for provider in PROVIDERS if provider.missing() is None]
    given = [name.partition(":") for name in names]
    spelt = [backend + colon + provider.lower() for backend, colon, provider in given]
    return [each for name in spelt for each in (here or [name] if name == "FLASH_ATTN" else [name])]


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, count=300, rounds=7)
    add_contest_options(parser)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--backend", nargs="+", type=str.upper, default=list(USUAL), help="the report is of the first")
    parser.add_argument("--compile", action="store_true", help="let libraries compile by nvcc what is not ready")
    parser.add_argument("--merge", nargs="+", type=Path, help="files to make one of; nothing is measured")
    arguments = parser.parse_args(given)
    if not arguments.merge:
        check_seed(parser, arguments.seed)
    elif not arguments.json:
        parser.error("--merge needs a file to write to: --json FILE")
    return arguments


def finish(path: Path) -> None:
    """Draw, and print the report."""
    result = json.loads(path.read_text())
    print(report_of(result))
    if any(row.get("ratio") for row in result["rows"]):
        print("drawn to " + ", ".join(drawn_to.name for drawn_to in draw_files(path)) + " beside it")


def progress(number: int, total: int, row: dict[str, Any]) -> str:
    ratio = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}] of {row['best other']}" if row["ratio"] else "-"
    dropped = ", ".join(line.partition(": ")[0] for line in row["dropped"])
    return (
        f"{number}/{total} {row['id']} {row['kind']} {row['dtype']} page {row['page']}: {row['shape']}: {ratio}, "
        f"{row['others']} others, {row['made s']:.1f} + {row['timed s']:.1f} s; "
        f"dropped: {dropped or 'none'}"
    )


def run(arguments: argparse.Namespace) -> Path:
    """Measure what is not in the file yet, as long as there is time. Returns the file."""
    names, device = backends_of(arguments.backend), arguments.device
    path = arguments.json or RESULTS / f"random_{arguments.seed}.json"
    results = Results(path, arguments.seed, names[0], device, arguments.again)
    shapes = list(drawn(arguments.seed, arguments.count, arguments.kinds, BOUNDS[device]))
    making = partial(prepare, names, arguments.bare, device)
    work = Work(making, partial(timed, names, arguments.rounds), partial(clean_up, device))
    waiting = [each for each in shapes if each.id not in results.rows]
    for each, found in measured(waiting, work, arguments.processes, device, arguments.minutes):
        row = without_times(each, found.why) if isinstance(found, Failed) else found
        results.add(row)
        print(progress(len(results.rows), len(shapes), row), flush=True)
    if left := len(shapes) - len(results.rows):
        print(f"out of time: {left} shapes are left; the same command goes on with them")
    return results.write()


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    if arguments.merge:
        parts = [json.loads(path.read_text()) for path in arguments.merge]
        try:
            arguments.json.write_text(json.dumps(merged(parts), indent=1) + "\n")
        except ValueError as error:
            raise SystemExit(str(error)) from error
        finish(arguments.json)
        return
    if not arguments.compile:
        os.environ["FLASHINFER_DISABLE_JIT"] = "1"  # FlashInfer then raises where a module is not ready
    finish(run(arguments))


if __name__ == "__main__":
    main()

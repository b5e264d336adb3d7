"""Attention at shapes drawn at random, by our backends and by the bare kernels, each checked and timed in turns.

    python -m benchmarks attention random_shapes --seed S --count N [--kinds decode …] [--backend TRITON FLASHINFER …]
        [--rounds 30] [--minutes M] [--json FILE] [--compile]
    python -m benchmarks attention random_shapes --ids 372/46 373/51 … --json FILE
    python -m benchmarks attention random_shapes --merge A.json B.json … --json FILE
    python -m benchmarks attention random_shapes --compare BEFORE.json AFTER.json [--json FILE]

The report is of the first backend: its time over that of the best of all others, which are our other backends and the
libraries' kernels by hand. Seeds for tuning and for judging are ranges of their own (see shape_draws.py). A file that
is there is continued: shapes that it has are skipped. Shapes are begun in their order, so that a run that ends early
has chosen none. Several processes make them ready, and compile for them; one of them at a time measures, while the
others stand still. To see what a change does, the shapes are measured with `--backend TRITON --no-bare`, once by
`PYTHONPATH=../before:. python -P -m benchmarks …` with the code before, and both files compared. A library's kernel
that would have to be compiled by nvcc drops out, unless `--compile` is given.
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
from benchmarks.attention.random_compare import compared, write_compared
from benchmarks.attention.random_measure import prepare, timed, without_times
from benchmarks.attention.random_plot import draw_files
from benchmarks.attention.random_report import report_of
from benchmarks.attention.random_results import Results, merged
from benchmarks.attention.random_runs import add_contest_options, add_options, check_seed
from benchmarks.attention.shape_draws import BOUNDS, KINDS, draw, drawn, purpose
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
    parser.add_argument("--ids", nargs="+", type=shape_of, metavar="SEED/NUMBER", help="these shapes, of any seeds")
    parser.add_argument("--merge", nargs="+", type=existing, help="files to make one of; nothing is measured")
    parser.add_argument("--compare", nargs=2, type=existing, metavar=("BEFORE", "AFTER"),
                        help="two files; nothing is measured")  # fmt: skip
    arguments = parser.parse_args(given)
    if arguments.compare:
        return arguments
    if arguments.ids:
        check_ids(parser, arguments)
    elif not arguments.merge:
        check_seed(parser, arguments.seed)
    elif not arguments.json:
        parser.error("--merge needs a file to write to: --json FILE")
    return arguments


def existing(words: str) -> Path:
    """A file of results."""
    if not (path := Path(words)).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {words}")
    return path


def shape_of(words: str) -> tuple[int, int]:
    """A shape's seed and number.

    >>> shape_of("372/46")
    (372, 46)
    """
    seed, slash, number = words.partition("/")
    if not (slash and seed.isdecimal() and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{words!r} is no shape: give its seed and number, as 372/46")
    return int(seed), int(number)


def check_ids(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with an error where shapes have no file to go to, or seeds of two purposes or of none."""
    if not arguments.json:
        parser.error("--ids needs a file to write to: --json FILE")
    for seed, _ in arguments.ids:
        check_seed(parser, seed)
    if len({purpose(seed) for seed, _ in arguments.ids}) > 1:
        parser.error("some of these shapes are to tune by and others to judge by: measure them apart")


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
    if arguments.ids:
        seeds = sorted({seed for seed, _ in arguments.ids})
        shapes = [draw(*each, BOUNDS[device]) for each in dict.fromkeys(arguments.ids)]
    else:
        seeds = [arguments.seed]
        shapes = list(drawn(arguments.seed, arguments.count, arguments.kinds, BOUNDS[device]))
    results = Results(path, seeds, names[0], device, arguments.again)
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
    if arguments.compare:
        before, after = (json.loads(path.read_text()) for path in arguments.compare)
        try:
            print(compared(before, after))
        except ValueError as error:
            raise SystemExit(str(error)) from error
        if arguments.json:
            write_compared(before, after, arguments.json)
        return
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

"""Attention at shapes drawn at random, by our backends and by the bare kernels, each checked and timed in turns.

    python -m benchmarks attention random_shapes --seed S --count N [--kinds decode …] [--backend TRITON FLASHINFER …]
        [--rounds 30] [--minutes M] [--json FILE] [--compile]
    python -m benchmarks attention random_shapes --merge A.json B.json … --json FILE

The report is of the first backend: its time over that of the best of all others, which are our other backends and the
libraries' kernels by hand. Seeds for tuning and for judging are ranges of their own (see shape_draws.py). A file that
is there is continued: shapes that it has are skipped. Shapes are measured in their order, so that a run that ends early
has chosen none. Kernels in Triton are compiled first, by several processes at once; a library's kernel that would have
to be compiled by nvcc drops out, unless `--compile` is given.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attn_backends import select_backend
from attn_backends.backends.flash_attn.state import PROVIDERS
from attn_backends.registry.measured import Load
from benchmarks.attention import random_ahead
from benchmarks.attention.attention import all_made, select_provider
from benchmarks.attention.contest import CACHE_DTYPES, READ, Made, checked
from benchmarks.attention.paged_problem import Contender, Problem
from benchmarks.attention.plain_read import make_read
from benchmarks.attention.random_plot import draw_files
from benchmarks.attention.random_report import report_of
from benchmarks.attention.random_results import Results, merged
from benchmarks.attention.random_statistics import interval, library, paired
from benchmarks.attention.sampled_problem import Pool, sampled_problem
from benchmarks.attention.shape_draws import KINDS, ON_CPU, ON_GPU, READS, Drawn, drawn, purpose
from benchmarks.lib.gpu_harness import free_memory, reason, rounds_us
from benchmarks.lib.harness import RESULTS

USUAL = ("TRITON", "FLASH_ATTN", "FLASHINFER")
TURN_US = 2_500  # of a contender in a round
FULL = 0.6  # of the GPU's memory, above which what was freed goes back to it


def describe(each: Drawn) -> dict[str, Any]:
    """What a row says of its shape."""
    shape, dtype = each.shape, CACHE_DTYPES[each.dtype]
    wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
    return {
        "id": each.id, "seed": each.seed, "index": each.index, "kind": each.kind, "shape": shape.name,
        "source": each.source, "dtype": each.dtype, "page": each.page_size, "heads": list(shape.heads),
        "requests": len(shape.seq_lens), "keys": sum(shape.seq_lens), "longest": max(shape.seq_lens),
        "new tokens": sum(shape.query_lens), "lengths": each.lengths,
        "bytes": shape.num_bytes(wide, dtype), "flops": shape.flops,
    }  # fmt: skip


def without_times(each: Drawn, why: str) -> dict[str, Any]:
    """The row of a shape that nothing could be measured at."""
    figures = {"us": {}, "ratio": None, "others": 0, "dropped": [f"all: {why}"]}
    return describe(each) | figures | {"rounds": 0, "made s": 0.0, "timed s": 0.0}


def backends_of(names: Sequence[str]) -> list[str]:
    """With all providers of FLASH_ATTN that are installed in its place."""
    here = [f"FLASH_ATTN:{provider.name}" for provider in PROVIDERS if provider.missing() is None]
    given = [name.partition(":") for name in names]
    spelt = [backend + colon + provider.lower() for backend, colon, provider in given]
    return [each for name in spelt for each in (here or [name] if name == "FLASH_ATTN" else [name])]


def auto_choice(problem: Problem) -> str:
    """The contender that AUTO would take for this shape's layer and load."""
    lens = problem.shape.seq_lens
    load = Load(len(lens), round(sum(lens) / len(lens)))
    name = select_backend("AUTO", [problem.spec], problem.cache, problem.device, load).name
    return f"{name}:{select_provider(problem)}" if name == "FLASH_ATTN" else name


def is_ours(contender: str, names: Sequence[str]) -> bool:
    return contender.partition(",")[0] in names


@torch.inference_mode()
def measure(each: Drawn, pool: Pool, names: Sequence[str], rounds: int, bare: bool = True) -> dict[str, Any]:
    """One shape's row."""
    started = time.perf_counter()
    problem = sampled_problem(each.shape, CACHE_DTYPES[each.dtype], each.page_size, pool, each.id)
    made, dropped = all_made(problem, names, {}, bare, plain=True)
    errors, wrong = checked(made)
    ready = time.perf_counter()
    right: Made = {name: made[name] for name in errors}
    if right and each.kind in READS:
        right[READ] = Contender(problem, make_read(problem), [], None)
    replays = {name: contender.replay for name, contender in right.items()}
    taken = rounds_us(replays, rounds, pool.device, {}, TURN_US) if replays else {}
    times = {name: [right[name].us(us) for us in each_round] for name, each_round in taken.items()}
    prefix = f"{each.shape.name}: "
    return describe(each) | figures(times, names, problem) | {
        "error": max(errors.values(), default=None),
        "dropped": [line.removeprefix(prefix) for line in dropped + wrong],
        "rounds": rounds,
        "made s": round(ready - started, 3),
        "timed s": round(time.perf_counter() - ready, 3),
    }  # fmt: skip


def figures(times: dict[str, list[float]], names: Sequence[str], problem: Problem) -> dict[str, Any]:
    """Medians, and what they come to against one another."""
    times = dict(times)
    read_us = statistics.median(times.pop(READ)) if READ in times else None
    us = {name: statistics.median(each) for name, each in times.items()}
    ours = {name: time for name, time in us.items() if is_ours(name, names)}
    found: dict[str, Any] = {"us": {name: round(time, 3) for name, time in us.items()}, "read us": read_us}
    found |= against(times, us, names[0])
    of = us.get(names[0])
    found["of read"] = read_us / of if read_us and of else None
    try:
        chosen = auto_choice(problem)
    except Exception as error:  # no backend serves it, or its library does not load
        return found | {"AUTO": None, "AUTO why": reason(error)}
    as_is = {name: time for name, time in ours.items() if "," not in name}  # from the same pages
    taken = as_is.get(chosen)
    others = [time for name, time in us.items() if library(name) != library(chosen)]
    return found | {
        "AUTO": chosen,
        "AUTO vs best of ours": taken / min(as_is.values()) if taken else None,
        "AUTO vs others": taken / min(others) if taken and others else None,
    }


def against(times: dict[str, list[float]], us: dict[str, float], of: str) -> dict[str, Any]:
    """A backend's time over that of the best of all others, by rounds; and how many libraries the others are of."""
    others = {name: time for name, time in us.items() if name != of}
    found: dict[str, Any] = {"others": len({library(name) for name in others} - {library(of)})}
    if of not in us or not others:
        return found | {"ratio": None}
    best = min(others, key=lambda name: others[name])
    ratios = paired(times[of], times[best])
    low, high = interval(ratios)
    return found | {"best other": best, "ratio": statistics.median(ratios), "low": low, "high": high}


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="0 to 999 to tune by, 1000 to 1999 to judge by")
    parser.add_argument("--count", type=int, default=300, help="of shapes")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--backend", nargs="+", type=str.upper, default=list(USUAL), help="the report is of the first")
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=7, help="30 for what is reported")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no shape is begun")
    parser.add_argument("--compile", action="store_true", help="let libraries compile by nvcc what is not ready")
    parser.add_argument("--ahead", type=int, help="processes that compile Triton's kernels first; 0: none do")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path, help="the file of results")
    parser.add_argument("--again", action="store_true", help="measure anew what the file has")
    parser.add_argument("--merge", nargs="+", type=Path, help="files to make one of; nothing is measured")
    arguments = parser.parse_args(given)
    if arguments.merge:
        if not arguments.json:
            parser.error("--merge needs a file to write to: --json FILE")
    elif arguments.seed is None:
        parser.error("give a --seed")
    else:
        try:
            purpose(arguments.seed)
        except ValueError as error:
            parser.error(str(error))
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


def run(arguments: argparse.Namespace, given: Sequence[str]) -> Path:
    """Measure what is not in the file yet, as long as there is time. Returns the file."""
    started, device = time.monotonic(), torch.device(arguments.device)
    bounds = ON_CPU if device.type == "cpu" else ON_GPU
    names = backends_of(arguments.backend)
    path = arguments.json or RESULTS / f"random_{arguments.seed}.json"
    results = Results(path, arguments.seed, names[0], arguments.device, arguments.again)
    shapes = list(drawn(arguments.seed, arguments.count, arguments.kinds, bounds))
    for each in shapes:
        if results.ended_by(each.id):
            results.add(without_times(each, "the process ended here, twice"))
    waiting = [each for each in shapes if each.id not in results.rows]
    deadline = started + 60 * arguments.minutes
    if waiting and (device.type == "cuda" if arguments.ahead is None else arguments.ahead):
        until = started + 60 * arguments.minutes * random_ahead.SHARE
        random_ahead.compile_all(
            waiting, [name for name in names if name == "TRITON"], arguments.ahead, until, arguments.device
        )
    pool = Pool(2 * bounds.num_bytes, device)
    with _set_aside():
        for number, each in enumerate(waiting, len(shapes) - len(waiting) + 1):
            if time.monotonic() > deadline:
                print(f"out of time: {len(shapes) - number + 1} shapes are left; the same command goes on with them")
                break
            results.begin(each.id)
            try:
                row = measure(each, pool, names, arguments.rounds, arguments.bare)
            except Exception as error:  # no memory, or a kernel that has killed the device's context
                row = without_times(each, reason(error))
            results.add(row)
            print(progress(number, len(shapes), row), flush=True)
            _clean_up(device, given, deadline)
    return results.write()


@contextmanager
def _set_aside() -> Iterator[None]:
    """What is in memory is no garbage: a collection between two shapes looks at theirs alone."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _clean_up(device: torch.device, given: Sequence[str], deadline: float) -> None:
    """Free memory; or begin a new process, if a kernel has killed the device's context, with the shapes behind it."""
    gc.collect()
    if device.type == "cpu":
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:  # torch.AcceleratorError, or a RuntimeError
        print(f"the device's context is dead ({reason(error)}): a new process goes on", flush=True)
        left = max(0.0, deadline - time.monotonic()) / 60
        more = ["--minutes", str(left)] if left < float("inf") else []
        kept = [argument for argument in given if argument != "--again"]
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", "attention", "random_shapes", *kept, *more])
    if torch.cuda.memory_reserved() > FULL * torch.cuda.get_device_properties(device).total_memory:
        free_memory(device)


def main(given: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if given is None else given)
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
    finish(run(arguments, given))


if __name__ == "__main__":
    main()

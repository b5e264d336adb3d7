"""MLA decodes at shapes drawn at random: a backend beside the bare kernels, each checked and timed in turns.

    python -m benchmarks attention mla_random --seed S [--count 100] [--backend TRITON_MLA] [--rounds 9]
        [--minutes M] [--json FILE]

As mla_attention.py, a shape is timed as the attention on latent rows alone (decode) and as a layer (with the products
around it); "ratio" is the backend's time over that of the best bare kernel, by rounds. Seeds for tuning and for judging
are ranges of their own (see shape_draws.py). A file that is there is continued. Shapes are measured in their order, so
that a run that ends early has chosen none. Kernels in Triton are compiled first, by several processes at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention.mla_attention import LAYER, Made, all_made
from benchmarks.attention.mla_draws import BOUNDS, MLADrawn, draw
from benchmarks.attention.mla_problem import make_forms
from benchmarks.attention.random_measure import against
from benchmarks.attention.random_results import Results
from benchmarks.attention.random_statistics import summary
from benchmarks.attention.shape_draws import purpose
from benchmarks.lib.gpu_harness import free_memory, rounds_us
from benchmarks.lib.harness import RESULTS, print_table
from benchmarks.lib.processes import processes_to_compile
from benchmarks.lib.reasons import reason

FORMS = {"decode": "", "layer": LAYER}  # by the ends of contenders' names
TURN_US = 4_000  # of a contender in a round
DTYPE, PAGE_SIZE = torch.bfloat16, 64


def describe(each: MLADrawn) -> dict[str, Any]:
    lens = each.shape.seq_lens
    return {
        "id": each.id, "source": each.source, "heads": each.shape.heads[0], "tokens": each.shape.query_len,
        "requests": len(lens), "keys": sum(lens), "longest": max(lens), "lengths": each.lengths,
    }  # fmt: skip


def made_for(each: MLADrawn, of: str, with_bare: bool, device: torch.device) -> tuple[Made, list[str]]:
    """The contenders that are right, each captured; and who dropped out why."""
    made, dropped = all_made(make_forms(each.shape, DTYPE, PAGE_SIZE, device), [of], {}, with_bare)
    return made, [line.removeprefix(f"{each.shape.name}: ") for line in dropped]


@torch.inference_mode()
def measure(each: MLADrawn, of: str, rounds: int, with_bare: bool, device: torch.device) -> dict[str, Any]:
    """One shape's row."""
    made, dropped = made_for(each, of, with_bare, device)
    replays = {name: contender.replay for name, contender in made.items()}
    taken = rounds_us(replays, rounds, device, {}, TURN_US) if replays else {}
    times = {name: [made[name].us(us) for us in each_round] for name, each_round in taken.items()}
    row = describe(each)
    for form, end in FORMS.items():
        of_form = {name.removesuffix(LAYER): us for name, us in times.items() if name.endswith(LAYER) == bool(end)}
        row |= {f"{form} {column}": value for column, value in against_best(of, of_form).items()}
    return row | {"dropped": dropped}


def against_best(of: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """A backend's time, the best of the others', and the ratio with its interval, by rounds."""
    us = {name: statistics.median(each) for name, each in times.items()}
    found = against(times, us, of)
    del found["others"]  # of how many libraries these are
    return {"us": us.get(of), "best us": us.get(found.get("best other", "")), **found}


def compile_ahead(shapes: Sequence[MLADrawn], of: str, device: str) -> None:
    """Run each kind of shape once with short rows, some in each of several processes."""
    kinds = {}
    for each in shapes:
        shape = replace(each.shape, seq_lens=(each.shape.query_len,) * len(each.shape.seq_lens))
        rows = len(shape.seq_lens).bit_length()
        kinds.setdefault((shape.heads, shape.query_len, rows), replace(each, shape=shape))
    waiting, count = list(kinds.values()), processes_to_compile()
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, [waiting[i::count] for i in range(count)], [of] * count, [device] * count))


@torch.inference_mode()
def _compile(shapes: Sequence[MLADrawn], of: str, device: str) -> None:
    for each in shapes:
        _, dropped = made_for(each, of, False, torch.device(device))
        free_memory(torch.device(device))
        if dropped:
            print(f"not compiled ahead: {each.id}: {dropped[0][:100]}", flush=True)


def report(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the ratios come to, of all shapes and by tokens."""
    found = []
    groups = {"all": rows, "one token": [row for row in rows if row["tokens"] == 1],
              "several tokens": [row for row in rows if row["tokens"] > 1]}  # fmt: skip
    for form in FORMS:
        for name, group in groups.items():
            if ratios := [row[f"{form} ratio"] for row in group if row[f"{form} ratio"] is not None]:
                found.append({"of": form, "which": name, **summary(ratios)._asdict()})
    return found


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="0 to 999 to tune by, 1000 to 1999 to judge by")
    parser.add_argument("--count", type=int, default=100, help="of shapes")
    parser.add_argument("--backend", type=str.upper, default="TRITON_MLA", help="that the report is of")
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no shape is begun")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path, help="the file of results")
    parser.add_argument("--again", action="store_true", help="measure anew what the file has")
    arguments = parser.parse_args(given)
    try:
        purpose(arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    of = arguments.backend
    deadline, device = time.monotonic() + 60 * arguments.minutes, torch.device(arguments.device)
    path = arguments.json or RESULTS / f"mla_random_{arguments.seed}.json"
    title = f"MLA decodes and layers at shapes drawn at random, {of}'s time over that of the best bare kernel"
    results = Results(path, arguments.seed, of, arguments.device, arguments.again, title)
    shapes = [draw(arguments.seed, index, BOUNDS[arguments.device]) for index in range(arguments.count)]
    waiting = [each for each in shapes if each.id not in results.rows]
    if device.type == "cuda" and waiting and (os.cpu_count() or 1) > 2:
        compile_ahead(waiting, of, arguments.device)
    for number, each in enumerate(waiting, len(shapes) - len(waiting) + 1):
        if time.monotonic() > deadline:
            print(f"out of time: {len(shapes) - number + 1} shapes are left; the same command goes on with them")
            break
        try:
            row = measure(each, of, arguments.rounds, arguments.bare, device)
        except Exception as error:  # no memory, or a kernel that has killed the device's context
            row = describe(each) | {f"{form} ratio": None for form in FORMS} | {"dropped": [f"all: {reason(error)}"]}
        results.add(row)
        print(f"{number}/{len(shapes)} {row}", flush=True)
        free_memory(device)
    if rows := report(list(results.rows.values())):
        print_table(title, rows)
    print(f"written to {results.write()}")


if __name__ == "__main__":
    main()

"""MLA decodes at shapes drawn at random: a backend beside the bare kernels, each checked and timed in turns.

    python -m benchmarks attention mla_random --seed S [--count 100] [--backend TRITON_MLA] [--rounds 9]
        [--minutes M] [--json FILE]

As mla_attention.py, a shape is timed as the attention on latent rows alone (decode) and as a layer (with the products
around it); "ratio" is the backend's time over that of the best bare kernel, by rounds. Seeds for tuning and for judging
are ranges of their own (see shape_draws.py). A file that is there is continued. Shapes are begun in their order, so
that a run that ends early has chosen none. Several processes make them ready, and compile for them; one of them at a
time measures, while the others stand still.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.attention.mla_attention import LAYER, Made, all_made
from benchmarks.attention.mla_draws import BOUNDS, MLADrawn, draw
from benchmarks.attention.mla_problem import make_forms
from benchmarks.attention.random_measure import against
from benchmarks.attention.random_results import Results
from benchmarks.attention.random_runs import add_contest_options, add_options, check_seed
from benchmarks.attention.random_statistics import summary
from benchmarks.lib.gpu_harness import clean_up, rounds_us
from benchmarks.lib.harness import RESULTS, print_table
from benchmarks.lib.processes import Failed, Row, Work, measured

FORMS = {"decode": "", "layer": LAYER}  # by the ends of contenders' names
TURN_US = 4_000  # of a contender in a round
DTYPE, PAGE_SIZE = torch.bfloat16, 64


def describe(each: MLADrawn) -> dict[str, Any]:
    lens = each.shape.seq_lens
    return {
        "id": each.id, "source": each.source, "heads": each.shape.heads[0], "tokens": each.shape.query_len,
        "requests": len(lens), "keys": sum(lens), "longest": max(lens), "lengths": each.lengths,
    }  # fmt: skip


class Prepared(NamedTuple):
    each: MLADrawn
    made: Made
    dropped: list[str]


@torch.inference_mode()
def prepare(arguments: argparse.Namespace, each: MLADrawn) -> Prepared:
    """The contenders that are right, each captured; and who dropped out why."""
    forms = make_forms(each.shape, DTYPE, PAGE_SIZE, torch.device(arguments.device))
    made, dropped = all_made(forms, [arguments.backend], {}, arguments.bare)
    return Prepared(each, made, [line.removeprefix(f"{each.shape.name}: ") for line in dropped])


@torch.inference_mode()
def measure(arguments: argparse.Namespace, prepared: Prepared) -> Row:
    each, made, dropped = prepared
    replays = {name: contender.replay for name, contender in made.items()}
    taken = rounds_us(replays, arguments.rounds, torch.device(arguments.device), {}, TURN_US) if replays else {}
    times = {name: [made[name].us(us) for us in each_round] for name, each_round in taken.items()}
    row = describe(each)
    for form, end in FORMS.items():
        of_form = {name.removesuffix(LAYER): us for name, us in times.items() if name.endswith(LAYER) == bool(end)}
        row |= {f"{form} {column}": value for column, value in against_best(arguments.backend, of_form).items()}
    return row | {"dropped": dropped}


def against_best(of: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """A backend's time, the best of the others', and the ratio with its interval, by rounds."""
    us = {name: statistics.median(each) for name, each in times.items()}
    found = against(times, us, of)
    del found["others"]  # of how many libraries these are
    return {"us": us.get(of), "best us": us.get(found.get("best other", "")), **found}


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
    add_options(parser, count=100, rounds=9)
    add_contest_options(parser)
    parser.add_argument("--backend", type=str.upper, default="TRITON_MLA", help="that the report is of")
    arguments = parser.parse_args(given)
    check_seed(parser, arguments.seed)
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    of, device = arguments.backend, arguments.device
    path = arguments.json or RESULTS / f"mla_random_{arguments.seed}.json"
    title = f"MLA decodes and layers at shapes drawn at random, {of}'s time over that of the best bare kernel"
    results = Results(path, [arguments.seed], of, device, arguments.again, title)
    shapes = [draw(arguments.seed, index, BOUNDS[device]) for index in range(arguments.count)]
    waiting = [each for each in shapes if each.id not in results.rows]
    work = Work(partial(prepare, arguments), partial(measure, arguments), partial(clean_up, device))
    for each, found in measured(waiting, work, arguments.processes, device, arguments.minutes):
        if isinstance(found, Failed):
            row = describe(each) | {f"{form} ratio": None for form in FORMS} | {"dropped": [f"all: {found.why}"]}
        else:
            row = found
        results.add(row)
        print(f"{len(results.rows)}/{len(shapes)} {row}", flush=True)
    if rows := report(list(results.rows.values())):
        print_table(title, rows)
    print(f"written to {results.write()}")


if __name__ == "__main__":
    main()

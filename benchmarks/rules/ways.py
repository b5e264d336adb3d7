"""What benchmarks share that set a rule of TRITON's beside the other ways to serve the same batches.

All ways are captured as CUDA graphs over several copies of the cache, checked against float64 and timed in turns (see
attention.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.attention.contest import checked, our_call, parts_of
from benchmarks.attention.paged_problem import Problem, make_contender
from benchmarks.lib.gpu_harness import PACKAGES, free_memory, in_turns_us, installed
from benchmarks.lib.harness import report

PAGE_SIZE = 16


class Timed(NamedTuple):
    metadata: Any  # by the rule
    us: dict[str, float]  # of each way that is right
    error: float | None  # the largest of those
    wrong: list[str]  # what was, with others


@torch.inference_mode()
def time_ways(problem: Problem, rounds: int, ways: Callable[[Any], dict[str, dict[str, Any]]]) -> Timed:
    """`ways`: of the rule's metadata, by name, what differs in each way's."""
    parts, made = parts_of("TRITON", problem, {}), {}
    metadata = parts.builder.build(0, problem.common)
    for name, changes in ways(metadata).items():
        step = parts.state.begin_forward(replace(metadata, **changes))
        made[name] = make_contender(problem, our_call(parts.impl, problem, step), (parts, step))
    errors, wrong = checked(made)
    times = in_turns_us({name: made[name].replay for name in errors}, rounds, problem.device)
    us = {name: made[name].us(replay_us) for name, replay_us in times.items()}
    return Timed(metadata, us, max(errors.values(), default=None), wrong)


def run(
    about: str | None, name: str, title: str, cases: Sequence[tuple[Any, ...]],
    measure: Callable[..., tuple[dict[str, Any], list[str]]],
) -> None:  # fmt: skip
    """The command line: a row of each case. `measure` takes a case and the rounds, and says what was wrong too."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for case in cases:
        row, out = measure(*case, arguments.rounds)
        print(*(f"{column}: {value}" for column, value in row.items()), *out, sep=", ", flush=True)
        rows, wrong = [*rows, row], wrong + out
        free_memory(torch.device("cuda"))
    report(name, f"{title} by TRITON, page {PAGE_SIZE}", rows, installed(*PACKAGES))
    if wrong:
        raise SystemExit("\n".join(wrong))

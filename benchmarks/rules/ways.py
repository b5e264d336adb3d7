"""What benchmarks share that set a rule of TRITON's beside the other ways to serve the same batches.

All ways are captured as CUDA graphs over several copies of the cache, checked against float64 and timed in turns (see
attention.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks.attention.contest import Made, checked, our_call, parts_of
from benchmarks.attention.paged_problem import Problem, make_contender
from benchmarks.lib.gpu_harness import PACKAGES, free_memory, in_turns_us, installed
from benchmarks.lib.harness import report
from benchmarks.lib.processes import processes_to_compile

PAGE_SIZE = 16


class Timed(NamedTuple):
    metadata: Any  # by the rule
    us: dict[str, float]  # of each way that is right
    error: float | None  # the largest of those
    wrong: list[str]  # what was, with others


Ways = Callable[[Any], dict[str, dict[str, Any]]]  # of the rule's metadata, by name, what differs in each way's


@torch.inference_mode()
def made_ways(problem: Problem, ways: Ways) -> tuple[Any, Made]:
    """The rule's metadata, and each way's contender."""
    parts, made = parts_of("TRITON", problem, {}), {}
    metadata = parts.builder.build(0, problem.common)
    for name, changes in ways(metadata).items():
        step = parts.state.begin_forward(replace(metadata, **changes))
        made[name] = make_contender(problem, our_call(parts.impl, problem, step), (parts, step))
    return metadata, made


@torch.inference_mode()
def time_ways(problem: Problem, rounds: int, ways: Ways) -> Timed:
    metadata, made = made_ways(problem, ways)
    errors, wrong = checked(made)
    times = in_turns_us({name: made[name].replay for name in errors}, rounds, problem.device)
    us = {name: made[name].us(replay_us) for name, replay_us in times.items()}
    return Timed(metadata, us, max(errors.values(), default=None), wrong)


def run(
    about: str | None, name: str, title: str, cases: Sequence[tuple[Any, ...]],
    measure: Callable[..., tuple[dict[str, Any], list[str]]], compile_case: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """The command line: a row of each case. `measure` takes a case and the rounds, and says what was wrong too;
    `compile_case` takes a case, and compiles what it needs, in one of several processes before."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    if compile_case is not None:
        with ProcessPoolExecutor(processes_to_compile(), mp_context=get_context("spawn")) as processes:
            for compiled in [processes.submit(compile_case, *case) for case in cases]:
                compiled.result()
    for case in cases:
        row, out = measure(*case, arguments.rounds)
        print(*(f"{column}: {value}" for column, value in row.items()), *out, sep=", ", flush=True)
        rows, wrong = [*rows, row], wrong + out
        free_memory(torch.device("cuda"))
    report(name, f"{title} by TRITON, page {PAGE_SIZE}", rows, installed(*PACKAGES))
    if wrong:
        raise SystemExit("\n".join(wrong))

"""What is measured at a shape that was drawn at random: who is right, how long each takes, and what AUTO takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attn_backends import select_backend
from attn_backends.registry.measured import Load
from benchmarks.attention.attention import all_made, select_provider
from benchmarks.attention.contest import CACHE_DTYPES, READ, Made, checked
from benchmarks.attention.paged_problem import Contender, Problem
from benchmarks.attention.plain_read import make_read
from benchmarks.attention.random_statistics import interval, library, paired
from benchmarks.attention.sampled_problem import problem_of
from benchmarks.attention.shape_draws import READS, Drawn
from benchmarks.lib.gpu_harness import rounds_us
from benchmarks.lib.reasons import reason

TURN_US = 2_500  # of a contender in a round


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


def auto_choice(problem: Problem) -> str:
    """The contender that AUTO would take for this shape's layer and load."""
    lens = problem.shape.seq_lens
    load = Load(len(lens), round(sum(lens) / len(lens)))
    name = select_backend("AUTO", [problem.spec], problem.cache, problem.device, load).name
    return f"{name}:{select_provider(problem)}" if name == "FLASH_ATTN" else name


def is_ours(contender: str, names: Sequence[str]) -> bool:
    return contender.partition(",")[0] in names


class Prepared(NamedTuple):
    """Contenders that are right, captured."""

    each: Drawn
    problem: Problem
    right: Made
    error: float | None  # of the worst
    dropped: list[str]
    seconds: float  # that this took


@torch.inference_mode()
def prepare(names: Sequence[str], bare: bool, device: str, each: Drawn) -> Prepared:
    """Make and check all contenders of a shape."""
    started = time.perf_counter()
    problem = problem_of(each, torch.device(device))
    made, dropped = all_made(problem, names, {}, bare, plain=True)
    errors, wrong = checked(made)
    right: Made = {name: made[name] for name in errors}
    if right and each.kind in READS:
        right[READ] = Contender(problem, make_read(problem), [], None)
    lines = [line.removeprefix(f"{each.shape.name}: ") for line in dropped + wrong]
    return Prepared(each, problem, right, max(errors.values(), default=None), lines, time.perf_counter() - started)


@torch.inference_mode()
def timed(names: Sequence[str], rounds: int, prepared: Prepared) -> dict[str, Any]:
    """The shape's row."""
    started, (each, problem, right, error, dropped, seconds) = time.perf_counter(), prepared
    replays = {name: contender.replay for name, contender in right.items()}
    taken = rounds_us(replays, rounds, problem.device, {}, TURN_US) if replays else {}
    times = {name: [right[name].us(us) for us in each_round] for name, each_round in taken.items()}
    return describe(each) | figures(times, names, problem) | {
        "error": error,
        "dropped": dropped,
        "rounds": rounds,
        "made s": round(seconds, 3),
        "timed s": round(time.perf_counter() - started, 3),
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

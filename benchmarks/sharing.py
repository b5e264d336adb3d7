"""Mixed batches by TRITON on Hopper: decodes and prompts side by side, by several shares of the GPU, or in turn.

    python benchmarks/sharing.py [--rounds 9]

All are captured as CUDA graphs over several copies of the cache, checked against float64 and timed in turns (see
attention.py). "share" is the prompts' part of the multiprocessors by `sharing.prefill_share`, "us" the time with it,
and "lost" what that takes longer than with the best of the shares.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from attention import GQA, SMALL, checked, our_call, parts_of
from gpu_harness import PACKAGES, free_memory, in_turns_us, installed
from harness import report
from paged_problem import Shape, make_contender, make_problem

MIXES = [  # decodes, by their keys, prompts, and heads
    ((4096,) * 64, (2048,), GQA),
    ((4096,) * 16, (8192,), GQA),
    ((4096,) * 64, (512,) * 4, GQA),
    ((1024,) * 255, (512,), GQA),
    ((8192,) * 8, (2048,) * 2, GQA),
    ((2048,) * 128, (4096,), GQA),
    ((512,) * 8, (2048,), GQA),
    ((32768,), (512,), GQA),
    ((2048,) * 128, (2048,), SMALL),
    ((2048,) * 32, (2048,), (32, 32, 128)),
    ((8192,) * 64, (2048,), (64, 8, 128)),
]
IN_TURN = "in turn"
OTHER_SHARES = (0.5, 0.7, 1.4, 2.0)  # times the rule's


@torch.inference_mode()
def measure(
    decodes: Sequence[int], prompts: Sequence[int], heads: tuple[int, int, int], rounds: int
) -> tuple[dict[str, Any], list[str]]:
    """A row of one batch, and what was wrong with it."""
    device = torch.device("cuda")
    shape = Shape((*decodes, *prompts), heads, is_prefill=True, decodes=len(decodes))
    problem = make_problem(shape, torch.bfloat16, 16, device)
    parts, made = parts_of("TRITON", problem, {}), {}
    metadata = parts.builder.build(0, problem.common)
    rule = metadata.prefill_share
    shares = {rule, *(min(1.0, rule * other) for other in OTHER_SHARES)}
    for share in (None, *sorted(shares)):
        step = parts.state.begin_forward(replace(metadata, prefill_share=share))
        made[IN_TURN if share is None else share] = make_contender(
            problem, our_call(parts.impl, problem, step), (parts, step)
        )
    errors, wrong = checked(made)
    times = in_turns_us({label: made[label].replay for label in errors}, rounds, device)
    us = {label: made[label].us(replay_us) for label, replay_us in times.items()}
    in_turn = us.pop(IN_TURN, None)
    best = min(us, key=us.__getitem__, default=None)
    row = {
        "batch": shape.name,
        "share": rule,
        "us": us.get(rule),
        "in turn us": in_turn,
        "best share": best,
        "best us": us.get(best),
        "lost": us[rule] / us[best] - 1 if rule in us else None,
        "error": max(errors.values(), default=None),
    }
    return row, wrong


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(given)
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for mix in MIXES:
        row, out = measure(*mix, arguments.rounds)
        print(*(f"{name}: {value}" for name, value in row.items()), *out, sep=", ", flush=True)
        rows, wrong = [*rows, row], wrong + out
        free_memory(torch.device("cuda"))
    report("sharing", "decodes and prompts in one batch by TRITON, page 16", rows, installed(*PACKAGES))
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()

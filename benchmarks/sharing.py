"""Mixed batches by TRITON on Hopper: decodes and prompts side by side, by several shares of the GPU, or in turn.

    python benchmarks/sharing.py [--rounds 9]

All are captured as CUDA graphs over several copies of the cache, checked against float64 and timed in turns (see
attention.py). "share" is the prompts' part of the multiprocessors by `sharing.prefill_share`, "us" the time with it,
and "best share" the one, of several, that took the shortest.
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

MIXES = [  # decodes, keys of each, prompts, tokens of each, and heads
    (64, 4096, 1, 2048, GQA),
    (16, 4096, 1, 8192, GQA),
    (64, 4096, 4, 512, GQA),
    (255, 1024, 1, 512, GQA),
    (8, 8192, 2, 2048, GQA),
    (128, 2048, 1, 4096, GQA),
    (8, 512, 1, 2048, GQA),
    (1, 32768, 1, 512, GQA),
    (128, 2048, 1, 2048, SMALL),
    (32, 2048, 1, 2048, (32, 32, 128)),
    (64, 8192, 1, 2048, (64, 8, 128)),
]
IN_TURN = "in turn"
SHARES = (0.25, 0.375, 0.5, 0.7, 0.85, 1.0)  # beside the rule's


@torch.inference_mode()
def measure(
    decodes: int, keys: int, prompts: int, tokens: int, heads: tuple[int, int, int], rounds: int
) -> tuple[dict[str, Any], list[str]]:
    """A row of one batch, and what was wrong with it."""
    device = torch.device("cuda")
    lens = (*[keys] * decodes, *[tokens] * prompts)
    problem = make_problem(Shape(lens, heads, is_prefill=True, decodes=decodes), torch.bfloat16, 16, device)
    parts, made = parts_of("TRITON", problem, {}), {}
    metadata = parts.builder.build(0, problem.common)
    rule = metadata.prefill_share
    shares = {IN_TURN: None} | {f"{share:.3g}": share for share in sorted({rule, *SHARES})}
    for name, share in shares.items():
        step = parts.state.begin_forward(replace(metadata, prefill_share=share))
        made[name] = make_contender(problem, our_call(parts.impl, problem, step), (parts, step))
    errors, wrong = checked(made)
    times = in_turns_us({name: made[name].replay for name in errors}, rounds, device)
    us = {name: made[name].us(replay_us) for name, replay_us in times.items()}
    in_turn = us.pop(IN_TURN, None)
    best = min(us, key=us.__getitem__, default=None)
    row = {
        "heads": "/".join(map(str, heads[:2])),
        "dim": heads[2],
        "decodes": decodes,
        "keys of each": keys,
        "prompts": prompts,
        "tokens of each": tokens,
        "share": rule,
        "us": us.get(f"{rule:.3g}"),
        "in turn us": in_turn,
        "best share": None if best is None else shares[best],
        "best us": us.get(best),
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

"""Mixed batches by TRITON on Hopper: decodes and prompts side by side, by several shares of the GPU, or in turn.

    python -m benchmarks rules sharing [--rounds 9]

All are timed as ways.py says. "share" is the prompts' part of the multiprocessors by `sharing.prefill_share`, "us" the
time with it, and "best share" the one, of several, that took the shortest.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.attention.contest import GQA, SMALL
from benchmarks.attention.paged_problem import Shape, make_problem
from benchmarks.rules.ways import PAGE_SIZE, run, time_ways

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


def measure(
    decodes: int, keys: int, prompts: int, tokens: int, heads: tuple[int, int, int], rounds: int
) -> tuple[dict[str, Any], list[str]]:
    """A row of one batch, and what was wrong with it."""
    shape = Shape((*[keys] * decodes, *[tokens] * prompts), heads, is_prefill=True, decodes=decodes)
    problem = make_problem(shape, torch.bfloat16, PAGE_SIZE, torch.device("cuda"))
    timed = time_ways(problem, rounds, shares_beside)
    rule, us = timed.metadata.prefill_share, dict(timed.us)
    in_turn = us.pop(IN_TURN, None)
    best = min(us, key=us.__getitem__, default=None)
    row = {
        "heads": f"{heads[0]}/{heads[1]}",
        "dim": heads[2],
        "decodes": decodes,
        "keys of each": keys,
        "prompts": prompts,
        "tokens of each": tokens,
        "share": rule,
        "us": us.get(str(rule)),
        "in turn us": in_turn,
        "best share": None if best is None else float(best),
        "best us": us.get(best),
        "error": timed.error,
    }
    return row, timed.wrong


def shares_beside(metadata: Any) -> dict[str, dict[str, Any]]:
    if metadata.prefill_share is None:
        raise SystemExit("here decodes do not run beside prefills: that takes a Hopper GPU and Triton 3.6 or 3.7")
    shares = sorted({metadata.prefill_share, *SHARES})
    return {IN_TURN: {"prefill_share": None, "decode_sms": None}} | {
        str(share): {"prefill_share": share} for share in shares
    }


if __name__ == "__main__":
    run(__doc__, "sharing", "decodes and prompts in one batch", MIXES, measure)

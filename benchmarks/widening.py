"""Prefills of chunks over an fp8 cache by TRITON on Hopper: keys made 16 bits first, or read as they are.

    python benchmarks/widening.py [--rounds 9]

Both are captured as CUDA graphs over several copies of the cache, checked against float64 and timed in turns (see
attention.py). "chosen" is what `widening.is_faster_widened` says, and "lost" what it takes longer than the faster one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from attention import checked, our_call, parts_of
from gpu_harness import PACKAGES, free_memory, in_turns_us, installed
from harness import report
from paged_problem import Shape, make_contender, make_problem

CHUNKS = [  # heads, rows, keys of each, and query tokens of each
    ((32, 8), 1, 8192, 32),
    ((32, 8), 1, 8192, 512),
    ((32, 8), 4, 8192, 64),
    ((32, 8), 4, 8192, 128),
    ((32, 8), 4, 8192, 256),
    ((32, 8), 4, 8192, 512),
    ((32, 8), 1, 32768, 512),
    ((32, 8), 64, 2048, 32),
    ((32, 32), 1, 8192, 32),
    ((32, 32), 1, 8192, 512),
    ((32, 32), 4, 8192, 128),
    ((32, 32), 4, 8192, 256),
    ((32, 32), 4, 8192, 512),
    ((32, 32), 1, 32768, 512),
    ((32, 32), 64, 2048, 32),
    ((64, 8), 1, 32768, 512),
]
HEAD_DIM = 128


@torch.inference_mode()
def measure(
    heads: tuple[int, int], num_rows: int, seq_len: int, query_len: int, rounds: int
) -> tuple[dict[str, Any], list[str]]:
    """A row of one shape, and what was wrong with it."""
    device = torch.device("cuda")
    shape = Shape((seq_len,) * num_rows, (*heads, HEAD_DIM), query_len=query_len)
    problem = make_problem(shape, torch.float8_e4m3fn, 16, device)
    parts, made, num_keys = parts_of("TRITON", problem, {}), {}, num_rows * seq_len
    metadata = parts.builder.build(0, problem.common)
    for label, count in (("16 bits", num_keys), ("8 bits", 0)):
        step = parts.state.begin_forward(replace(metadata, num_widened_keys=count))
        made[label] = make_contender(problem, our_call(parts.impl, problem, step), (parts, step))
    errors, wrong = checked(made)
    times = in_turns_us({label: made[label].replay for label in errors}, rounds, device)
    us = {label: made[label].us(replay_us) for label, replay_us in times.items()}
    chosen = "16 bits" if metadata.num_widened_keys else "8 bits"
    row = {
        "heads": f"{heads[0]}/{heads[1]}",
        "rows": num_rows,
        "keys of each": seq_len,
        "tokens of each": query_len,
        **{f"{label} us": us.get(label) for label in made},
        "chosen": chosen,
        "lost": us[chosen] / min(us.values()) - 1 if chosen in us else None,
        "error": max(errors.values(), default=None),
    }
    return row, wrong


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(given)
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for chunk in CHUNKS:
        row, out = measure(*chunk, arguments.rounds)
        print(*(f"{name}: {value}" for name, value in row.items()), *out, sep=", ", flush=True)
        rows, wrong = [*rows, row], wrong + out
        free_memory(torch.device("cuda"))
    report("widening", "prefills of chunks over an fp8 cache by TRITON, page 16", rows, installed(*PACKAGES))
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()

"""Prefills of chunks over an fp8 cache by TRITON on Hopper: keys made 16 bits first, or read as they are.

    python -m benchmarks rules widening [--rounds 9]

Both are timed as ways.py says. "chosen" is what `widening.is_faster_upcast` says, and "lost" what it takes longer than
the faster one.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.attention.paged_problem import Shape
from benchmarks.rules.ways import run, time_ways

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


def measure(
    heads: tuple[int, int], num_rows: int, seq_len: int, query_len: int, rounds: int
) -> tuple[dict[str, Any], list[str]]:
    """A row of one shape, and what was wrong with it."""
    shape = Shape((seq_len,) * num_rows, (*heads, HEAD_DIM), query_len=query_len)
    ways = {"16 bits": {"num_upcast_keys": num_rows * seq_len}, "8 bits": {"num_upcast_keys": 0}}
    timed = time_ways(shape, torch.float8_e4m3fn, rounds, lambda metadata: ways)
    us, chosen = timed.us, "16 bits" if timed.metadata.num_upcast_keys else "8 bits"
    row = {
        "heads": f"{heads[0]}/{heads[1]}",
        "rows": num_rows,
        "keys of each": seq_len,
        "tokens of each": query_len,
        **{f"{name} us": us.get(name) for name in ways},
        "chosen": chosen,
        "lost": us[chosen] / min(us.values()) - 1 if chosen in us else None,
        "error": timed.error,
    }
    return row, timed.wrong


if __name__ == "__main__":
    run(__doc__, "widening", "prefills of chunks over an fp8 cache", CHUNKS, measure)

"""Prefills of chunks over an fp8 cache by TRITON on Hopper: keys made 16 bits first, or read as they are.

    python -m benchmarks rules widening [--rounds 9]

Both are timed as ways.py says, each with its own splits: shapes that were chosen, and others that shape_draws.py draws.
"chosen" is what `upcasting.is_faster_upcast` says, and "lost" what it takes longer than the faster one.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import islice
from typing import Any

import torch

from attn_backends.backends.triton.plans import TilePlan, prefill_plan
from attn_backends.backends.triton.rules import can_upcast, split_tile
from attn_backends.backends.triton.tuning import TritonOptions
from attn_backends.backends.triton.upcasting import rows_in_turn, upcast_sections, upcast_splits
from attn_backends.spec import KVCacheSpec
from benchmarks.attention.paged_problem import Problem, Shape, spec_of
from benchmarks.attention.sampled_problem import Pool, sampled_problem
from benchmarks.attention.shape_draws import drawn
from benchmarks.lib.gpu_harness import free_memory
from benchmarks.rules.ways import PAGE_SIZE, made_ways, run, time_ways

CHOSEN = [  # heads, rows, keys of each, and query tokens of each
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
SEED, NUM_DRAWN = 41, 40
MOST_BYTES = 1 << 30  # of a drawn shape's keys and values
POOL_BYTES = 4 << 30
CACHE_DTYPE = torch.float8_e4m3fn


def shapes() -> list[Shape]:
    chosen = [
        Shape((seq_len,) * count, (*heads, 128), True, chunk_lens=(tokens,) * count)
        for heads, count, seq_len, tokens in CHOSEN
    ]
    fitting = (each.shape for each in drawn(SEED, 100 * NUM_DRAWN, ("chunks",)) if _suits(each.shape))
    return [*chosen, *islice(fitting, NUM_DRAWN)]


def _suits(shape: Shape) -> bool:
    spec = spec_of(shape, CACHE_DTYPE)
    size = 2 * sum(shape.seq_lens) * spec.num_kv_heads * spec.head_dim
    return size <= MOST_BYTES and can_upcast(spec, TritonOptions(), torch.device("cuda"))


@cache
def pool() -> Pool:
    return Pool(POOL_BYTES, torch.device("cuda"))


def ways_of(problem: Problem, _metadata: Any) -> dict[str, dict[str, Any]]:
    num_keys = {"16 bits": sum(problem.shape.seq_lens), "8 bits": 0}
    lens = (problem.common.query_lens_cpu.numpy(), problem.common.seq_lens_cpu.numpy())
    return {name: way(problem.spec, problem.cache, lens, keys) for name, keys in num_keys.items()}


def compile_case(shape: Shape) -> None:
    of_one = Pool(MOST_BYTES + POOL_BYTES // 4, torch.device("cuda"), fill=False)
    problem = sampled_problem(shape, CACHE_DTYPE, PAGE_SIZE, of_one, shape.name, num_copies=1)
    made_ways(problem, partial(ways_of, problem))
    free_memory(torch.device("cuda"))


def measure(shape: Shape, rounds: int) -> tuple[dict[str, Any], list[str]]:
    """A row of one shape, and what was wrong with it."""
    problem = sampled_problem(shape, CACHE_DTYPE, PAGE_SIZE, pool(), shape.name)
    timed = time_ways(problem, rounds, partial(ways_of, problem))
    us, chosen = timed.us, "16 bits" if timed.metadata.num_upcast_keys else "8 bits"
    row = {
        "shape": shape.name,
        "heads": list(shape.heads),
        "seq_lens": list(shape.seq_lens),
        "query_lens": list(shape.query_lens),
        **{f"{name} us": us.get(name) for name in ("16 bits", "8 bits")},
        "chosen": chosen,
        "lost": us[chosen] / min(us.values()) - 1 if chosen in us else None,
        "error": timed.error,
    }
    return row, timed.wrong


def way(spec: Any, cached: KVCacheSpec, lens: tuple[Any, Any], num_keys: int) -> dict[str, Any]:
    """What differs in the metadata."""
    device = torch.device("cuda")
    tile = split_tile(spec, cached, None, device, is_paged=True, is_upcast=num_keys > 0)
    room = TritonOptions().upcast_bytes
    sections = upcast_sections(spec, lens[1], room) if num_keys else []
    in_turn = rows_in_turn(spec, tile, *lens, sections, 0, room, device)
    plan = TilePlan(None, None)
    if not num_keys:
        plan = prefill_plan(spec, tile, None, *lens, 0, device)
    elif not in_turn:
        plan = TilePlan(None, upcast_splits(spec, tile, *lens, 0, room, device))
    return {"num_upcast_keys": num_keys, "upcast_rows": in_turn, "prefill_splits": plan.splits,
            "hopper_tile": plan.tile, "short_tile": None, "num_decode_rows": 0, "num_decode_row_tokens": 0,
            "max_decode_len": 0}  # fmt: skip


if __name__ == "__main__":
    run(__doc__, "widening", "prefills of chunks over an fp8 cache", [(shape,) for shape in shapes()], measure,
        compile_case)  # fmt: skip

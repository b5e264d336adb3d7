"""Times of TRITON's decode by many tiles, at shapes drawn at random: what the rule in `triton/tuning.py` is made from.

    python -m benchmarks tune decode_trials --seed S --count N [--minutes M] [--most-mb 400] [--most-pairs N]
        [--json FILE]
    python -m benchmarks tune decode_trials --judge FILE …

Shapes are decodes and verifications whose queries a tile of 16 holds, of seeds to tune by. The file is written as it
goes. `--judge` prints, without a GPU, how far the rule as it stands is behind the fastest tile of each shape, whole and
by how many pairs of a row and a KV head there are: geometric mean, and worst.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from attn_backends import AttentionSpec, KVCacheSpec
from attn_backends.backends.triton.schedule import SplitPlan
from attn_backends.backends.triton.tuning import DecodeTile, decode_tile, goes_by_rule
from benchmarks.attention.attention import ours
from benchmarks.attention.contest import CACHE_DTYPES
from benchmarks.attention.plain_read import make_read
from benchmarks.attention.sampled_problem import Pool, problem_of, sampled_problem
from benchmarks.attention.shape_draws import ON_GPU, TUNING, Drawn, drawn
from benchmarks.lib.gpu_harness import free_memory, in_turns_us
from benchmarks.lib.harness import RESULTS, write
from benchmarks.lib.reasons import reason

# keys, warps, stages, programs, min_keys, joined
TRIED = (
    (16, 1, 6, 4, 64, 8), (16, 1, 6, 4, 128, 4), (16, 1, 6, 4, 128, 8), (16, 1, 6, 8, 64, 8), (16, 1, 6, 8, 128, 8),
    (16, 2, 6, 4, 128, 8), (32, 1, 6, 4, 64, 8), (32, 1, 6, 4, 128, 8), (32, 2, 6, 2, 64, 8), (32, 2, 6, 2, 128, 8),
    (32, 2, 6, 4, 64, 8), (32, 4, 6, 1, 128, 8), (32, 4, 6, 2, 64, 8), (32, 4, 6, 2, 128, 8), (32, 4, 6, 2, 256, 4),
    (64, 2, 6, 2, 64, 16), (64, 2, 6, 2, 128, 8), (64, 4, 6, 2, 64, 8), (64, 4, 6, 1, 128, 8),
)  # fmt: skip
SMEM_BYTES = 232_448 - 1024  # of a program on an H200


def wanted(given: argparse.Namespace) -> Iterator[Drawn]:
    """The shapes, as many as there are to be."""
    left = given.count
    for each in drawn(given.seed, 100 * given.count, ("decode", "verify")):
        spec = spec_of(each.shape.heads, each.dtype)
        plan = SplitPlan.of(spec, each.shape.query_len)
        read = sum(each.shape.seq_lens) * 2 * each.shape.heads[1] * each.shape.heads[2] * spec.cache_dtype.itemsize
        pairs = len(each.shape.seq_lens) * each.shape.heads[1]
        if goes_by_rule(spec, plan.block_m) and read <= given.most_mb << 20 and pairs <= given.most_pairs:
            yield each
            left -= 1
        if not left:
            return


def spec_of(heads: Sequence[int], dtype: str) -> AttentionSpec:
    cached = CACHE_DTYPES[dtype]
    return AttentionSpec(
        heads[0], heads[1], heads[2], dtype=torch.bfloat16 if cached.itemsize == 1 else cached, cache_dtype=cached
    )


def compile_part(shapes: Sequence[Drawn], until: float) -> None:
    """Fill Triton's cache on the disk."""
    device = torch.device("cuda")
    for each in shapes:
        if time.time() > until:
            return
        problem = problem_of(each, device, is_cold=False)
        seen: set[tuple[int, ...]] = set()
        for tile in TRIED:
            if (compiled := (*tile[:4], tile[5])) not in seen:
                seen.add(compiled)
                attempt(problem, tile)
        del problem
        free_memory(device)


def attempt(problem: Any, tile: Sequence[int]) -> Any:
    """The contender with a tile; None if the tile does not fit."""
    try:
        return ours("TRITON", problem, {"decode_tile": vars(DecodeTile(*tile))}, plain=True)["TRITON"]
    except Exception as error:  # out of shared memory or registers
        print(f"{problem.shape.name}: {tile}: {reason(error)[:90]}", flush=True)
        return None


@torch.inference_mode()
def measure(each: Drawn, pool: Pool) -> dict[str, Any]:
    """One shape's times by tile."""
    problem = sampled_problem(each.shape, CACHE_DTYPES[each.dtype], each.page_size, pool, each.id)
    made = {str(tile): contender for tile in TRIED if (contender := attempt(problem, tile)) is not None}
    made |= ours("TRITON", problem, {}, plain=True)
    replays = {name: contender.replay for name, contender in made.items()} | {"read": make_read(problem)}
    copies = len(problem.caches)
    taken = in_turns_us({name: replay for name, replay in replays.items() if name != "read"}, 5, pool.device)
    us = {name: made[name].us(replay_us) for name, replay_us in taken.items()}
    rule = us.pop("TRITON")
    return {
        "id": each.id, "shape": each.shape.name, "heads": list(each.shape.heads), "dtype": each.dtype,
        "page": each.page_size, "rows": len(each.shape.seq_lens), "query_len": each.shape.query_len,
        "keys": sum(each.shape.seq_lens), "longest": max(each.shape.seq_lens), "copies": copies, "rule us": rule,
        "us": us,
    }  # fmt: skip


def judge(rows: Sequence[dict[str, Any]]) -> None:
    """Print how far the rule is behind the fastest tile that was tried."""
    groups: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        spec, cache = spec_of(row["heads"], row["dtype"]), KVCacheSpec(1, row["page"])
        plan = SplitPlan.of(spec, row["query_len"])
        tile = decode_tile(spec, cache, row["rows"], plan.block_m, None, SMEM_BYTES)
        times, key = row["us"], str(tuple(vars(tile).values()))
        if key not in times:
            print(f"{row['shape']}: the rule's tile {key} was not tried")
            continue
        pairs = row["rows"] * row["heads"][1]
        for name in ("all", f"{1 << pairs.bit_length() - 1}+ pairs"):
            groups.setdefault(name, []).append((times[key] / min(times.values()), row["shape"]))
    for name, found in sorted(groups.items(), key=lambda item: (item[0] != "all", len(item[0]), item[0])):
        mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
        print(f"{name}: {len(found)} shapes, {mean:.3f}, worst {max(found)[0]:.3f} ({max(found)[1]})")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, choices=TUNING, metavar="0 to 999", default=7)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--most-mb", type=int, default=400, help="of keys and values: longer reads say little of tiles")
    parser.add_argument("--most-pairs", type=int, default=1 << 30, help="of a row and a KV head")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--json", type=Path, help="the file of results")
    parser.add_argument("--judge", nargs="+", type=Path, help="files to hold the rule to; nothing is measured")
    given = parser.parse_args(words)
    if given.judge:
        judge([row for path in given.judge for row in json.loads(path.read_text())["rows"]])
        return
    ends, shapes = time.time() + 60 * given.minutes, list(wanted(given))
    half = time.time() + 30 * given.minutes
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as processes:
        parts = [processes.submit(compile_part, shapes[i :: given.workers], half) for i in range(given.workers)]
        for part in parts:
            part.result()
    print(f"compiled; {ends - time.time():.0f} s are left", flush=True)
    path = given.json or RESULTS / f"decode_trials_{given.seed}.json"
    pool, rows = Pool(2 * ON_GPU.num_bytes, torch.device("cuda")), []
    for each in shapes:
        if time.time() > ends:
            break
        rows.append(measure(each, pool))
        best = min(rows[-1]["us"], key=rows[-1]["us"].get)
        print(f"{rows[-1]['shape']}: rule {rows[-1]['rule us']:.1f} us, {best} "
              f"{rows[-1]['us'][best]:.1f} us", flush=True)  # fmt: skip
        write(path.stem, "TRITON's decode by tiles, at random shapes", rows, ("torch", "triton"), path.parent)
    judge(rows)


if __name__ == "__main__":
    main()

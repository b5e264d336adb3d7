"""Times of TRITON's decode by many tiles, at shapes drawn at random: what the rule in `triton/tuning.py` is made from.

    python -m benchmarks tune decode_trials --seed S --count N [--dtypes bf16 fp16 fp8] [--tiles 16,1,6,4,128,8 …]
        [--minutes M] [--most-mb 400] [--most-pairs N] [--json FILE]
    python -m benchmarks tune decode_trials --judge FILE …

Shapes are decodes and verifications whose queries a tile of 16 holds, of seeds to tune by. Several processes make them
ready, and compile for them; one of them at a time measures, while the others stand still. The file is written as it
goes. `--judge` prints, without a GPU, how far the rule as it stands is behind the fastest tile of each shape, whole and
by how many pairs of a row and a KV head there are: geometric mean, and worst.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_backends import AttentionSpec, KVCacheSpec
from attn_backends.backends.triton.schedule import SplitPlan
from attn_backends.backends.triton.tuning import DecodeTile, decode_tile, goes_by_rule
from benchmarks.attention.attention import ours
from benchmarks.attention.contest import CACHE_DTYPES, READ, Made, checked
from benchmarks.attention.paged_problem import Contender, Problem
from benchmarks.attention.plain_read import make_read
from benchmarks.attention.random_measure import TURN_US
from benchmarks.attention.sampled_problem import problem_of
from benchmarks.attention.shape_draws import DTYPES, TUNING, Drawn, drawn
from benchmarks.lib.gpu_harness import clean_up, rounds_us
from benchmarks.lib.harness import RESULTS, write
from benchmarks.lib.processes import Failed, Row, Work, measured
from benchmarks.lib.reasons import reason

Tile = tuple[int, ...]  # keys, warps, stages, programs, min_keys, joined
TRIED: tuple[Tile, ...] = (
    (16, 1, 6, 4, 64, 8), (16, 1, 6, 4, 128, 4), (16, 1, 6, 4, 128, 8), (16, 1, 6, 6, 128, 8), (16, 1, 6, 8, 64, 8),
    (16, 1, 6, 8, 128, 8), (16, 2, 6, 4, 128, 8), (32, 1, 6, 4, 64, 8), (32, 1, 6, 4, 128, 8), (32, 1, 4, 8, 128, 8),
    (32, 2, 6, 2, 64, 8), (32, 2, 6, 2, 128, 8), (32, 2, 6, 4, 64, 8), (32, 4, 6, 1, 128, 8), (32, 4, 6, 2, 64, 8),
    (32, 4, 6, 2, 128, 8), (32, 4, 6, 2, 256, 4), (64, 1, 4, 6, 128, 8), (64, 2, 6, 2, 64, 16), (64, 2, 6, 2, 128, 8),
    (64, 4, 6, 2, 64, 8), (64, 4, 6, 1, 128, 8),
)  # fmt: skip
SMEM_BYTES = 232_448 - 1024  # of a program on an H200
ROUNDS = 5
TILE = "16,1,6,4,128,8"  # as an option is spelt
RULE = "TRITON"  # the contender with the rule's tile


def wanted(given: argparse.Namespace) -> Iterator[Drawn]:
    """The shapes, as many as there are to be."""
    left = given.count
    for each in drawn(given.seed, 100 * given.count, ("decode", "verify")):
        spec = spec_of(each.shape.heads, each.dtype)
        plan = SplitPlan.of(spec, each.shape.query_len)
        read = sum(each.shape.seq_lens) * 2 * each.shape.heads[1] * each.shape.heads[2] * spec.cache_dtype.itemsize
        pairs = len(each.shape.seq_lens) * each.shape.heads[1]
        is_small = read <= given.most_mb << 20 and pairs <= given.most_pairs
        if is_small and each.dtype in given.dtypes and goes_by_rule(spec, plan.block_m):
            yield each
            left -= 1
        if not left:
            return


def spec_of(heads: Sequence[int], dtype: str) -> AttentionSpec:
    cached = CACHE_DTYPES[dtype]
    return AttentionSpec(
        heads[0], heads[1], heads[2], dtype=torch.bfloat16 if cached.itemsize == 1 else cached, cache_dtype=cached
    )


def tile_of(words: str) -> Tile:
    """
    >>> tile_of("16,1,6,4,128,8")
    (16, 1, 6, 4, 128, 8)
    """
    try:
        tile = tuple(map(int, words.split(",")))
        DecodeTile(*tile)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{words!r} is no tile ({error}): give six numbers, as {TILE}") from error
    return tile


class Prepared(NamedTuple):
    """Contenders that are right, by tile, captured."""

    each: Drawn
    problem: Problem
    right: Made
    dropped: list[str]


@torch.inference_mode()
def prepare(tiles: Sequence[Tile], each: Drawn) -> Prepared:
    """Make and check a shape's contenders; those whose tile lacks shared memory or registers drop out."""
    problem, made, dropped = problem_of(each, torch.device("cuda")), {}, []
    for name, options in [(RULE, {}), *((str(tile), {"decode_tile": vars(DecodeTile(*tile))}) for tile in tiles)]:
        try:
            made[name] = ours("TRITON", problem, options, plain=True)["TRITON"]
        except Exception as error:
            dropped.append(f"{name}: {reason(error)}")
    errors, wrong = checked(made)
    right = {name: made[name] for name in errors} | {READ: Contender(problem, make_read(problem), [], None)}
    return Prepared(each, problem, right, dropped + wrong)


@torch.inference_mode()
def measure(prepared: Prepared) -> Row:
    """The shape's times by tile."""
    (each, problem, right, dropped), shape = prepared, prepared.each.shape
    replays = {name: contender.replay for name, contender in right.items()}
    taken = rounds_us(replays, ROUNDS, problem.device, {}, TURN_US)
    us = {name: round(statistics.median(map(right[name].us, times)), 3) for name, times in taken.items()}
    return {
        "id": each.id, "shape": shape.name, "heads": list(shape.heads), "dtype": each.dtype, "page": each.page_size,
        "rows": len(shape.seq_lens), "query_len": shape.query_len, "keys": sum(shape.seq_lens),
        "longest": max(shape.seq_lens), "read us": us.pop(READ), "rule us": us.pop(RULE, None), "us": us,
        "dropped": dropped,
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


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, choices=TUNING, metavar="0 to 999", default=7)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES], default=[*DTYPES], help="of the cache")
    parser.add_argument("--tiles", nargs="+", type=tile_of, default=TRIED, metavar="TILE",
                        help=f"keys, warps, stages, programs, min_keys and joined of each, as {TILE}")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=3.0, help="after which no shape is begun")
    parser.add_argument("--most-mb", type=int, default=400, help="of keys and values: longer reads say little of tiles")
    parser.add_argument("--most-pairs", type=int, default=1 << 30, help="of a row and a KV head")
    parser.add_argument("--processes", type=int, help="that make shapes ready; 0: this one does")
    parser.add_argument("--json", type=Path, help="the file of results")
    parser.add_argument("--judge", nargs="+", type=Path, help="files to hold the rule to; nothing is measured")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    given = parse(words)
    if given.judge:
        judge([row for path in given.judge for row in json.loads(path.read_text())["rows"]])
        return
    path, rows = given.json or RESULTS / f"decode_trials_{given.seed}.json", []
    work = Work(partial(prepare, given.tiles), measure, partial(clean_up, "cuda"))
    for each, found in measured(list(wanted(given)), work, given.processes, "cuda", given.minutes):
        row = {"rule us": None, "us": {}, "dropped": [found.why]} if isinstance(found, Failed) else found
        if row["rule us"] is None or not row["us"]:
            print(f"{each.shape.name}: {', '.join(row['dropped'])}", flush=True)
            continue
        rows.append(row)
        best = min(row["us"], key=row["us"].get)
        print(f"{each.shape.name}: rule {row['rule us']:.1f} us, {best} {row['us'][best]:.1f} us", flush=True)
        write(path.stem, "TRITON's decode by tiles, at random shapes", rows, ("torch", "triton"), path.parent)
    judge(rows)


if __name__ == "__main__":
    main()

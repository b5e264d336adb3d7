"""Tile sizes of TRITON by brute force, for the shapes of attention.py: writes attn_backends/backends/triton/tuned.json.

Decode of few queries in 16 bits or 8 goes by a rule, and is left out.

    python -m benchmarks tune tune_triton [--shapes decode verify prefill] [--match TEXT] [--dtype fp32] [--workers N]

Kernels are compiled first, on all cores, for a small batch of the same layers. Then every tile is timed as one CUDA
graph over several copies of the cache, and the fastest is checked against float64. Tiles of decode that compile to the
same code are timed with one number of programs first, and of the fastest with the others too.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from attn_backends import AttentionSpec
from attn_backends.backends.triton.schedule import SplitPlan
from attn_backends.backends.triton.tuning import DecodeTile, goes_by_rule, in_registers
from benchmarks.attention.attention import SHAPES, ours
from benchmarks.attention.contest import CACHE_DTYPES, WITH_WRITE
from benchmarks.attention.paged_problem import Shape, make_problem
from benchmarks.lib.gpu_harness import free_memory, in_turns_us, installed
from benchmarks.lib.harness import report
from benchmarks.lib.reasons import reason

TABLE = Path(__file__).parents[2] / "attn_backends" / "backends" / "triton" / "tuned.json"
SETS = ("decode", "verify", "dims", "prefill", "prompt")  # of SHAPES; the last are those of prefill
LEADING = 8  # tiles of code of their own, which are timed with other numbers of programs too
Tile = dict[str, int]


def tiles(shape: Shape) -> Iterator[Tile]:
    """Every tile worth a try; those that take more shared memory than there is drop out by themselves."""
    if shape.is_prefill:
        for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4, 5)):
            if rows * keys >= 64 * 64 and not (rows == 64 and warps == 8):
                yield {"rows": rows, "keys": keys, "warps": warps, "stages": stages}
        return
    few, query_rows, width = len(shape.seq_lens) * shape.heads[1] < 512, tile_rows(shape), 2 * shape.heads[2]
    for keys, warps, stages in product((16, 32, 64, 128), (1, 2, 4, 8), (3, 4, 5, 6)):
        for programs in (1, 2, 4, 6) if few else (2, 3, 4) if query_rows > 16 else (4, 6, 8):
            tile = DecodeTile(keys, warps, stages, programs, min_keys=128)
            is_even = keys // warps <= 64 and 16 * warps <= max(keys, query_rows)
            if is_even and in_registers(tile, query_rows, width) == tile:
                yield vars(tile)


def kind_of(name: str, shape: Shape) -> str:
    """Of the table, for a shape of a set."""
    return "prompt" if name == "prompt" else "prefill" if shape.is_prefill else "decode"


def tile_rows(shape: Shape) -> int:
    """Of a tile of a decode's queries."""
    return SplitPlan.of(AttentionSpec(*shape.heads), shape.query_len).block_m


def compiled(tile: Tile) -> tuple[object, ...]:
    """What of a tile the compiler sees."""
    return tuple(value for name, value in tile.items() if name not in ("programs", "min_keys"))


def option(kind: str, tile: Tile) -> dict[str, Tile]:
    return {f"{kind}_tile": tile}


def compile_some(kind: str, shape: Shape, some: Sequence[Tile], dtype: torch.dtype, page_size: int) -> None:
    """Fills Triton's cache on disk: the same layer with few keys."""
    small = replace(shape, seq_lens=(256,))
    problem = make_problem(small, dtype, page_size, torch.device("cuda"))
    problem = replace(problem, caches=problem.caches[:1], queries=problem.queries[:1], outputs=problem.outputs[:1])
    for tile in some:
        try:
            ours("TRITON", problem, option(kind, tile))
        except Exception as error:  # out of shared memory: the timing run says so again
            print(f"{tile}: {reason(error)[:120]}", flush=True)


def compile_all(kind: str, shapes: Sequence[Shape], workers: int, dtype: torch.dtype, page_size: int) -> None:
    layers = {(shape.heads, shape.is_prefill, shape.query_len): shape for shape in shapes}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = []
        for shape in layers.values():
            wanted = list({compiled(tile): tile for tile in tiles(shape)}.values())
            parts = max(1, workers // len(layers))
            jobs += [pool.submit(compile_some, kind, shape, wanted[i::parts], dtype, page_size) for i in range(parts)]
        for job in jobs:
            job.result()


@torch.inference_mode()
def fastest(kind: str, shape: Shape, dtype: torch.dtype, page_size: int, rounds: int) -> list[dict[str, Any]]:
    """The tiles of one shape, the fastest first, with their times."""
    device = torch.device("cuda")
    problem = make_problem(shape, dtype, page_size, device)
    label = "TRITON" + WITH_WRITE * (kind == "prompt")  # only then are there keys as they came
    found: list[dict[str, Any]] = []

    def time_all(some: Iterable[Tile]) -> None:
        for tile in some:
            try:
                made = ours("TRITON", problem, option(kind, tile))[label]
                (replay_us,) = in_turns_us({"it": made.replay}, rounds, device).values()
            except Exception as error:  # out of shared memory or registers
                print(f"{shape.name}: {tile}: {reason(error)[:100]}", flush=True)
                continue
            found.append({"shape": shape.name, **tile, "us": made.us(replay_us)})
            del made
        found.sort(key=lambda row: row["us"])

    of_code: dict[tuple[object, ...], list[Tile]] = {}
    for tile in tiles(shape):
        of_code.setdefault(compiled(tile), []).append(tile)
    first = [same.pop((len(same) - 1) // 2) for same in of_code.values()]
    time_all(first)
    leading = [of_code[compiled(tile_of(row))] for row in found[:LEADING]]
    time_all(tile for others in leading for tile in others)
    best = ours("TRITON", problem, option(kind, tile_of(found[0])))
    best[label].check()
    free_memory(device)
    return found


def tile_of(row: dict[str, Any]) -> Tile:
    """Of what was found."""
    return {name: value for name, value in row.items() if name not in ("shape", "us")}


def entry(shape: Shape, best: dict[str, Any], dtype: torch.dtype, page_size: int) -> dict[str, Any]:
    queries = {} if shape.is_prefill else {"queries": tile_rows(shape)}
    layer = {"bits": dtype.itemsize * 8, "head_dim": shape.heads[2], "group": shape.heads[0] // shape.heads[1],
             "page_size": page_size, **queries, "rows": 1 if shape.is_prefill else len(shape.seq_lens)}  # fmt: skip
    return layer | {"tile": tile_of(best)}


def write(kind: str, entries: Sequence[dict[str, Any]]) -> None:
    """Replace the table's rows of these layers; the others stay. Of shapes with equal layers the first counts."""
    table = json.loads(TABLE.read_text())
    rows = {layer_of(row): row for row in [*table[kind], *reversed(entries)]}
    table[kind] = [rows[layer] for layer in sorted(rows)]
    parts = (
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in of) + "\n ]" for name, of in table.items()
    )
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def layer_of(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row.get(name, 0) for name in ("bits", "head_dim", "group", "page_size", "queries", "rows"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--match", default="", help="only shapes whose name has this in it")
    parser.add_argument("--dtype", choices=CACHE_DTYPES, default="bf16", help="fp8: of the cache alone")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args()
    dtype, page_size = CACHE_DTYPES[arguments.dtype], arguments.page_size
    all_rows: list[dict[str, Any]] = []
    shapes: dict[str, list[Shape]] = {}  # of each kind of the table
    for name in arguments.shapes:
        for shape in SHAPES["prefill" if name == "prompt" else name]:
            spec = AttentionSpec(*shape.heads, dtype=torch.float32 if dtype is torch.float32 else torch.bfloat16)
            by_rule = not shape.is_prefill and goes_by_rule(spec, tile_rows(shape))
            if arguments.match in shape.name and not by_rule:
                shapes.setdefault(kind_of(name, shape), []).append(shape)
    for kind, of_kind in shapes.items():
        compile_all(kind, of_kind, arguments.workers, dtype, page_size)
        print(f"{kind}: compiled", flush=True)
        entries = []
        for shape in of_kind:
            found = fastest(kind, shape, dtype, page_size, arguments.rounds)
            print("\n".join(map(str, found[:4])), flush=True)
            entries.append(entry(shape, found[0], dtype, page_size))
            all_rows += found
            write(kind, entries)
    report("tune_triton", "tiles of TRITON", all_rows, installed("torch", "triton"))


if __name__ == "__main__":
    main()

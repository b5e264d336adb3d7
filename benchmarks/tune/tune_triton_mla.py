"""Tiles of TRITON_MLA by brute force, for the shapes of mla_attention.py: writes backends/mla/triton_mla/tuned.json.

    python -m benchmarks tune tune_triton_mla [--shapes decode verify] [--match TEXT] [--dtype fp8] [--workers N]

Kernels are compiled first, on all cores, for a small batch of the same layers. Then every tile's decode is timed as one
CUDA graph over several copies of the cache, and the fastest is checked against float64.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from attn_backends.backends.mla.triton_mla.tuning import HOPPER_TILE
from benchmarks.attention.contest import CACHE_DTYPES
from benchmarks.attention.mla_attention import SHAPES, ours
from benchmarks.attention.mla_problem import Forms, MLAShape, make_forms
from benchmarks.lib.gpu_harness import free_memory, in_turns_us, installed
from benchmarks.lib.harness import report
from benchmarks.lib.reasons import reason

TABLE = Path(__file__).parents[2] / "attn_backends" / "backends" / "mla" / "triton_mla" / "tuned.json"
LAYER = ("bits", "cache_bits", "queries", "page_size", "rows")
Tile = dict[str, int | bool]


def num_queries(shape: MLAShape) -> int:
    return shape.heads[0] * shape.query_len


def tiles(shape: MLAShape, dtype: torch.dtype) -> Iterator[Tile]:
    """Every tile worth a try; those that take more shared memory than there is drop out by themselves."""
    queries = num_queries(shape)
    if dtype.itemsize == 1:
        some = [size for size in product((16, 32, 64), (64,), (4, 8), (2, 3))
                if size[0] <= min(max(16, queries), 8 * size[2])]  # fmt: skip
    elif queries >= 64:
        some = [(64, 64, 8, 2), *((64, 32, 8, stages) for stages in (3, 5, 6, 7))]
    else:
        some = [(max(16, queries), keys, warps, stages)
                for keys, warps, stages in product((32, 64, 128), (4, 8), (2, 3, 4, 5, 6))
                if stages * keys <= 256 and keys * queries // warps >= 64]  # fmt: skip
    least = (128, 256, 512) if len(shape.seq_lens) == 1 else (128,)
    for (size, hopper), programs, min_keys in product(
        [(HOPPER_TILE, True), *((size, False) for size in some)],
        (1, 2) if queries >= 32 else (1, 2, 4),
        least,
    ):
        names = ("rows", "keys", "warps", "stages", "programs", "min_keys")
        tile = dict(zip(names, (*size, programs, min_keys), strict=True))
        yield tile | {"hopper": True} if hopper else tile


def compile_some(shape: MLAShape, some: Sequence[Tile], dtype: torch.dtype, page_size: int) -> None:
    """Fills Triton's cache on disk: the same layer with few keys, in one copy."""
    forms = make_forms(replace(shape, seq_lens=(256,)), dtype, page_size, torch.device("cuda"))
    first = {name: slice(1) for name in ("caches", "queries", "outputs")}
    forms = Forms(*(replace(form, **{name: getattr(form, name)[part] for name, part in first.items()})
                    for form in forms))  # fmt: skip
    for tile in some:
        try:
            ours("TRITON_MLA", forms, {"decode_tile": tile})
        except Exception as error:  # out of shared memory: the timing run says so again
            print(f"{tile}: {reason(error)[:120]}", flush=True)


def compile_all(shapes: Sequence[MLAShape], workers: int, dtype: torch.dtype, page_size: int) -> None:
    layers = {(shape.heads, shape.query_len): shape for shape in shapes}
    parts = max(1, workers // len(layers))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = []
        for shape in layers.values():
            wanted = [tile for tile in tiles(shape, dtype) if tile["programs"] == 1]  # which the compiler does not see
            jobs += [pool.submit(compile_some, shape, wanted[i::parts], dtype, page_size) for i in range(parts)]
        for job in jobs:
            job.result()


@torch.inference_mode()
def fastest(shape: MLAShape, dtype: torch.dtype, page_size: int, rounds: int) -> list[dict[str, Any]]:
    """The tiles of one shape, the fastest first, with their times."""
    device = torch.device("cuda")
    forms = make_forms(shape, dtype, page_size, device)
    found: list[tuple[float, Tile]] = []
    for tile in tiles(shape, dtype):
        try:
            made = ours("TRITON_MLA", forms, {"decode_tile": tile})["TRITON_MLA"]
            (replay_us,) = in_turns_us({"it": made.replay}, rounds, device).values()
        except Exception as error:  # out of shared memory or registers
            print(f"{shape.name}: {tile}: {reason(error)[:100]}", flush=True)
            continue
        found.append((made.us(replay_us), tile))
        del made
    found.sort(key=lambda pair: pair[0])
    # Of the tiles as fast as the fastest, those of the fewest programs come first: a longer row would pay for more.
    equal = [pair for pair in found if pair[0] < 1.01 * found[0][0]]
    found = sorted(equal, key=lambda pair: pair[1]["programs"]) + found[len(equal) :]
    ours("TRITON_MLA", forms, {"decode_tile": found[0][1]})["TRITON_MLA"].check()
    free_memory(device)
    return [{"shape": shape.name, "us": us, **tile} for us, tile in found]


def entries_of(
    shape: MLAShape, found: Sequence[dict[str, Any]], dtype: torch.dtype, page_size: int
) -> list[dict[str, Any]]:
    """The fastest tile; where it is of the kernel for Hopper, the fastest of the others behind it."""
    cached = dtype.itemsize * 8
    asked = (max(16, cached), cached, num_queries(shape), page_size, len(shape.seq_lens))
    layer = dict(zip(LAYER, asked, strict=True))
    tried = [{name: value for name, value in row.items() if name not in ("shape", "us")} for row in found]
    fastest_portable = next(tile for tile in tried if "hopper" not in tile)
    kept = [fastest_portable] if fastest_portable is tried[0] else [tried[0], fastest_portable]
    return [{**layer, "tile": tile} for tile in kept]


def write(entries: Sequence[list[dict[str, Any]]]) -> None:
    """Replace the table's rows of these layers; the others stay. Of shapes with equal layers the first counts."""
    layers: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for row in json.loads(TABLE.read_text())["decode"]:
        layers.setdefault(layer_of(row), []).append(row)
    layers |= {layer_of(rows[0]): rows for rows in reversed(entries)}
    lines = ",\n".join(f"  {json.dumps(row)}" for layer in sorted(layers) for row in layers[layer])
    TABLE.write_text(f'{{\n "decode": [\n{lines}\n ]\n}}\n')


def layer_of(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[name] for name in LAYER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=["decode", "verify"], default=["decode", "verify"])
    parser.add_argument("--match", default="", help="only shapes whose name has this in it")
    parser.add_argument("--dtype", choices=CACHE_DTYPES, default="bf16", help="fp8: of the cache alone")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args()
    dtype, page_size = CACHE_DTYPES[arguments.dtype], arguments.page_size
    shapes = [shape for kind in arguments.shapes for shape in SHAPES[kind] if arguments.match in shape.name]
    compile_all(shapes, arguments.workers, dtype, page_size)
    print("compiled", flush=True)
    all_rows: list[dict[str, Any]] = []
    entries: list[list[dict[str, Any]]] = []
    for shape in shapes:
        found = fastest(shape, dtype, page_size, arguments.rounds)
        print("\n".join(map(str, found[:5])), flush=True)
        entries.append(entries_of(shape, found, dtype, page_size))
        all_rows += found
        write(entries)
    report("tune_triton_mla", "tiles of TRITON_MLA", all_rows, installed("torch", "triton"))


if __name__ == "__main__":
    main()

"""Chunks behind prefixes by TRITON, with whole tiles and with split keys, beside the best of other libraries' kernels.

    python -m benchmarks rules splits --seed S --count N [--kinds chunks mixed …] [--rounds 5] [--minutes M]
    python -m benchmarks rules splits --ids S/N …

Shapes are drawn as those of `attention random_shapes` are: seeds below 1000 are to tune by. "whole" is the time with no
key split, "in order" the same with the longest rows first, "G x N" whole ones by a tile of the kernel for Hopper of so
many groups of warps and keys of a block, and of half the size in order and split too, "portable R x N" by the portable
kernel's tiles for few keys, "split N" that with N splits at most, "decoded" by the decode kernel where rows have few
tokens, and "rule" the one that TRITON takes; "ratio" is the rule's time over the whole one's, and "vs other" over that
of the best other kernel. Every way is checked against float64. Several processes make shapes ready, and one at a time
measures. `--ids 291/48 …` names shapes in place of drawing the first ones of a seed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from attn_backends.backends.triton.rules import prefill_share, split_tile
from attn_backends.backends.triton.short_tiles import short_tiles
from attn_backends.backends.triton.workspace import DECODE_TOKENS
from attn_backends.batch.views import without_new_keys
from attn_backends.kernels.launch import num_multiprocessors
from attn_backends.kernels.prefill.launch import suits_hopper_kernel
from attn_backends.kernels.prefill.split_tiles import SplitTile, hopper_tile
from attn_backends.kernels.prefill.splits import PrefillSplits, tried_targets
from attn_backends.kernels.prefill.tiles import half_tile, tiles_of
from benchmarks.attention.attention import all_made
from benchmarks.attention.contest import Made, checked, our_call, parts_of
from benchmarks.attention.paged_problem import Problem, make_contender
from benchmarks.attention.random_runs import add_options, check_seed
from benchmarks.attention.sampled_problem import problem_of
from benchmarks.attention.shape_draws import BOUNDS, KINDS, Drawn, draw, drawn
from benchmarks.lib.gpu_harness import PACKAGES, clean_up, installed, rounds_us
from benchmarks.lib.harness import write
from benchmarks.lib.processes import Failed, Row, Work, measured

TITLE = "prefills of random shapes by TRITON, with whole tiles and with keys split, in us"
TURN_US = 2_500  # of a contender in a round
OURS = WHOLE, IN_ORDER, DECODED, RULE = "whole", "in order", "decoded", "rule"
TRIED = ("split ", "portable ", "1 x ", "2 x ", "3 x ")


def ways_of(problem: Problem, parts: Any) -> dict[str, Any]:
    """Metadata by the name of each way to serve the batch; the rule's last."""
    built = parts.builder.build(0, without_new_keys(problem.common))
    rule, is_decoded = built, 0 < built.num_rows <= built.num_decode_rows
    if is_decoded and problem.common.max_query_len > 1:  # that prefill's kernels can serve too
        built = replace(built, num_decode_rows=0, num_decode_row_tokens=0, max_decode_len=0)
    spec, first = problem.spec, built.num_decode_rows
    lens = [getattr(problem.common, f"{name}_lens_cpu").numpy()[: built.num_rows] for name in ("query", "seq")]
    share = (
        prefill_share(spec, *lens, first)
        if built.prefill_share is not None or (built.prefill_splits and first)
        else None
    )
    whole = replace(built, prefill_splits=None, prefill_share=share, decode_sms=None, short_tile=None, hopper_tile=None)
    ways = {WHOLE: whole} | _by_other_tiles(problem, whole)
    is_paged = built.page_table is not None and not built.prefills_are_prompts
    tile = split_tile(spec, problem.cache, None, problem.device, is_paged=is_paged, is_upcast=built.num_upcast_keys > 0)
    programs = tile.num_programs(num_multiprocessors(problem.device))
    if first < built.num_rows and not built.upcast_rows:
        ways[IN_ORDER] = replace(whole, prefill_splits=PrefillSplits(0, tile))
        ways |= _splits(whole, tile, programs, "split")
        if (half := half_tile(spec)) and tile.beside and not built.num_upcast_keys:
            listed, name = hopper_tile(spec, half), f"{half.groups} x {half.keys}"
            by_half = replace(whole, hopper_tile=half)
            ways[f"{name} {IN_ORDER}"] = replace(by_half, prefill_splits=PrefillSplits(0, listed))
            num_programs = listed.num_programs(num_multiprocessors(problem.device))
            ways |= _splits(by_half, listed, num_programs, f"{name} split")
    if first == 0 and problem.common.max_query_len <= DECODE_TOKENS:
        of_decode = {"num_decode_rows": built.num_rows, "num_decode_row_tokens": built.num_row_tokens}
        of_decode["max_decode_len"] = problem.common.max_query_len
        ways[DECODED] = replace(whole, prefill_share=None, **of_decode)
    return ways | {RULE: rule}


def _splits(whole: Any, tile: SplitTile, num_programs: int, name: str) -> dict[str, Any]:
    return {
        f"{name} {target}": replace(whole, prefill_splits=PrefillSplits(target, tile), prefill_share=None)
        for target in tried_targets(num_programs)
    }


def _by_other_tiles(problem: Problem, whole: Any) -> dict[str, Any]:
    """The other ways to serve rows whose keys are not split; the portable kernel's, where no rows are decoded."""
    spec = problem.spec
    if whole.num_upcast_keys or not suits_hopper_kernel(spec, problem.device):
        return {}
    ways = {f"{tile.groups} x {tile.keys}": replace(whole, hopper_tile=tile) for tile in tiles_of(spec)[1:]}
    tiles = () if whole.num_decode_rows else short_tiles(spec, problem.cache, None, problem.device)
    return ways | {f"portable {tile.rows} x {tile.keys}": replace(whole, short_tile=tile) for tile in tiles}


def made_of(problem: Problem) -> tuple[Made, Any]:
    """TRITON's contenders, and the rule's metadata."""
    parts, made = parts_of("TRITON", problem, {}), {}
    ways = ways_of(problem, parts)
    for name, metadata in ways.items():
        step = parts.state.begin_forward(metadata)
        made[name] = make_contender(problem, our_call(parts.impl, problem, step), (parts, step))
    return made, ways[RULE]


class Prepared(NamedTuple):
    each: Drawn
    ours: Made
    others: Made
    metadata: Any  # the rule's
    dropped: list[str]


@torch.inference_mode()
def prepare(device: str, each: Drawn) -> Prepared:
    problem = problem_of(each, torch.device(device))
    ours, metadata = made_of(problem)
    others, dropped = all_made(problem, (), {}, bare=True)
    return Prepared(each, ours, others, metadata, dropped)


@torch.inference_mode()
def measure(arguments: argparse.Namespace, prepared: Prepared) -> Row:
    """One shape's row."""
    each, ours, others, metadata, dropped = prepared
    errors, wrong = checked(ours | others)
    replays = {name: contender.replay for name, contender in (ours | others).items() if name in errors}
    taken = rounds_us(replays, arguments.rounds, torch.device(arguments.device), {}, TURN_US) if replays else {}
    us = {name: (ours | others)[name].us(statistics.median(times)) for name, times in taken.items()}
    best = min((name for name in us if name in others), key=us.__getitem__, default=None)
    splits = metadata.prefill_splits
    row = {"id": each.id, "kind": each.kind, "shape": each.shape.name, "dtype": each.dtype, "page": each.page_size}
    row |= {"target": splits.target if splits else 0, "num_whole": splits.num_whole if splits else 0}
    row |= {"us": {name: round(time, 2) for name, time in us.items()}}
    ruled, whole = us.get(RULE), us.get(WHOLE)
    return row | {
        "ratio": ruled / whole if ruled and whole else None,
        "best other": best,
        "vs other": ruled / us[best] if ruled and best else None,
        "wrong": wrong,
        "dropped": dropped,
    }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    us, target = row["us"], row["target"]
    ours = ", ".join(f"{name} {time:.1f}" for name, time in us.items() if name in OURS or name.startswith(TRIED))
    ratio = f"{row['ratio']:.3f}" if row["ratio"] else "-"
    other = f"{row['vs other']:.3f} of {row['best other']} {us[row['best other']]:.1f}" if row["vs other"] else "-"
    wrong = f" WRONG: {'; '.join(row['wrong'])}" if row["wrong"] else ""
    what = f"{row['id']} {row['dtype']} page {row['page']}: {row['shape']}"
    return f"{what}: {ours} (takes {target}) | {ratio} | {other}{wrong}"


def geometric(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    ratios = [row[name] for row in rows if row[name]]
    return statistics.geometric_mean(ratios) if ratios else None


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, count=16, rounds=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["chunks"])
    parser.add_argument("--ids", nargs="+", type=numbers_of, default=[], help="of shapes, SEED/NUMBER")
    arguments = parser.parse_args(given)
    for seed in {seed for seed, _ in arguments.ids} or {arguments.seed}:
        check_seed(parser, seed)
    return arguments


def numbers_of(shape_id: str) -> tuple[int, int]:
    """A seed, and a shape's number.

    Raises:
        ArgumentTypeError: it is no such pair.
    """
    seed, _, number = shape_id.partition("/")
    if not (seed.isdecimal() and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{shape_id!r} is no shape's id: give SEED/NUMBER, 291/48 say")
    return int(seed), int(number)


def shapes_of(arguments: argparse.Namespace) -> list[Drawn]:
    bounds = BOUNDS[arguments.device]
    if arguments.ids:
        shapes = [draw(*numbers, bounds) for numbers in arguments.ids]
    else:
        shapes = list(drawn(arguments.seed, arguments.count, arguments.kinds, bounds))
    # A CPU's interpreter multiplies no bfloat16.
    return [replace(each, dtype="fp16") for each in shapes] if arguments.device == "cpu" else shapes


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as results have it: times in columns."""
    us, best = row["us"], row["best other"]
    split = min((time for name, time in us.items() if name.startswith("split ")), default=None)
    ways = {"whole us": us.get(WHOLE), "split us": split, "rule us": us.get(RULE), "splits of the rule": row["target"],
            "behind whole tiles": row["num_whole"]}  # fmt: skip
    return {
        "id": row["id"], "shape": row["shape"], "cache": row["dtype"], "page": row["page"], **ways,
        "rule/whole": row["ratio"], "best other": best, "other us": us.get(best), "rule/other": row["vs other"],
    }  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"  # FlashInfer then raises where a module is not ready
    device, shapes, rows = arguments.device, shapes_of(arguments), []
    work = Work(partial(prepare, device), partial(measure, arguments), partial(clean_up, device))
    for each, found in measured(shapes, work, arguments.processes, device, arguments.minutes):
        if isinstance(found, Failed):
            print(f"{each.id}: {each.shape.name}: {found.why}", flush=True)
        else:
            rows.append(found)
            print(line_of(found), flush=True)
    if left := len(shapes) - len(rows):
        print(f"{left} shapes were not measured")
    for name in ("ratio", "vs other"):
        print(f"{name}: geometric mean {geometric(rows, name)}")
    if arguments.json:
        write(arguments.json.stem, TITLE, [shown(row) for row in rows], installed(*PACKAGES), arguments.json.parent)
    if any(row["wrong"] for row in rows):
        sys.exit("a way is wrong")


if __name__ == "__main__":
    main()

"""How prefills are split: the rule over random rows, published heads and GPUs."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as some

from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits
from tests.helpers.tile_lists import draw, rest_of

splits = pytest.importorskip("attn_backends.kernels.prefill.splits", reason="needs triton")
split_tiles = pytest.importorskip("attn_backends.kernels.prefill.split_tiles")
waves = pytest.importorskip("attn_backends.kernels.prefill.waves")
split_launch = pytest.importorskip("attn_backends.kernels.prefill.split_launch")
launch = pytest.importorskip("attn_backends.kernels.prefill.launch")
workspace = pytest.importorskip("attn_backends.backends.triton.workspace")
rules = pytest.importorskip("attn_backends.backends.triton.rules")
tiles = pytest.importorskip("attn_backends.kernels.tiles")
prefill_tiles = pytest.importorskip("attn_backends.kernels.prefill.tiles")

MULTIPROCESSORS = (1, 2, 16, 46, 78, 108, 114, 132, 142, 148, 160, 192)
HEADS = (1, 2, 3, 5, 8, 32, 71)
BF16 = torch.bfloat16
TILE, WIDE = (split_tiles.SplitTile(4, 128, keys) for keys in (32, 128))  # four blocks of a split at least, and one
HALF = split_tiles.hopper_tile(AttentionSpec(8, 2, 128, dtype=BF16), prefill_tiles.HopperTile(1, 64, 2, beside=2))
TILES = TILE, split_tiles.hopper_tile(AttentionSpec(8, 2, 256, dtype=BF16)), HALF


@some.composite
def loads(draw: Any) -> Any:
    """Rows of tiles and blocks: a few of any size, then small ones."""
    count, most_tiles = draw(some.integers(1, 40)), draw(some.sampled_from((1, 9, 300)))
    most_blocks = draw(some.sampled_from((2, 30, 2000, 9000)))
    tile_counts, blocks = np.ones(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    for row in range(min(count, 4)):
        tile_counts[row], blocks[row] = draw(some.integers(0, most_tiles)), draw(some.integers(1, most_blocks))
    return splits.TileLoad(tile_counts, blocks)


@settings(max_examples=400, deadline=None)
@given(loads(), some.sampled_from(HEADS), some.integers(1, 400), some.sampled_from((1, 4, 8)))
def test_no_more_splits_than_the_target(load: Any, heads: int, target: int, min_blocks: int) -> None:
    """Over all rows, tiles and heads, whatever the lengths are; and none below the least, but of whole rows."""
    counts = splits.num_splits(load, heads, target, min_blocks)
    assert (counts >= 1).all()
    several = counts > 1
    assert int((load.tiles * counts)[several].sum()) * heads <= target
    assert (load.blocks[several] // counts[several] >= min_blocks).all()


@settings(max_examples=400, deadline=None)
@given(
    loads(),
    some.sampled_from(HEADS),
    some.sampled_from(MULTIPROCESSORS),
    some.floats(0, 1000),
    some.sampled_from(TILES),
)
def test_the_rule_takes_what_is_faster(load: Any, heads: int, num_sms: int, decodes: float, tile: Any) -> None:
    """By its own reckoning, of all targets that are tried; and its target has room in a workspace."""
    target, taken = splits.split_target(load, heads, num_sms, tile, decodes)
    assert 0 <= target <= splits.most_tile_splits(num_sms)
    times = {each: splits.time_of(load, heads, num_sms, each, tile) for each in (0, *splits.tried_targets(num_sms))}
    if target:
        assert (splits.num_splits(load, heads, target, tile.min_blocks) > 1).any()
        assert times[target] < times[0] or times[target] < decodes
        assert taken == times[target] + splits.serial_time(decodes)
        assert times[target] == min(time for each, time in times.items() if each)


def load_of(tile_counts: list[int], blocks: list[int]) -> Any:
    return splits.TileLoad(np.array(tile_counts), np.array(blocks))


def test_what_is_split() -> None:
    """Few tiles with many keys, for as many as there are multiprocessors; one long row among others; and what is not:
    tiles that fill the GPU, few keys, and a short prefill beside long decodes."""
    sms = 132
    for tile_count, heads, least in ((1, 1, 90), (1, 4, 30), (2, 8, 8)):
        load = load_of([tile_count], [400])
        counts = splits.num_splits(load, heads, splits.split_target(load, heads, sms, TILE)[0], 4)
        assert counts[0] >= least
    skewed = load_of([9] * 22, [362, *[9] * 21])
    counts = splits.num_splits(skewed, 3, splits.split_target(skewed, 3, sms, TILE)[0], 4)
    assert counts[0] >= 3
    assert (counts[1:] == 1).all()
    for load, heads in ((load_of([64], [400]), 32), (load_of([33], [30]), 4), (load_of([1], [5]), 1)):
        assert splits.split_target(load, heads, sms, TILE)[0] == 0
    chunk = load_of([1], [40])
    assert splits.split_target(chunk, 8, sms, TILE)[0] > 0
    assert splits.split_target(chunk, 8, sms, TILE, decodes=400.0)[0] == 0


@pytest.mark.parametrize("num_sms", MULTIPROCESSORS)
def test_a_list_fits_into_the_workspace(num_sms: int) -> None:
    """Of every number of heads and tokens a tile, with the most splits that a rule can ask for."""
    for heads, group, dims in product((1, 2, 3, 8, 71), (1, 5, 8, 16), ((64, 64), (80, 80), (192, 128), (256, 256))):
        spec = AttentionSpec(heads * group, heads, dims[0], head_dim_vo=dims[1], dtype=BF16)
        need = workspace.largest_need([spec], KVCacheSpec(64, 16), Limits(4, 64, 4096), None, num_sms, 227 << 10)
        where = (
            torch.empty(need.partial_acc, device="meta"),
            torch.empty(need.partial_ml, device="meta"),
            torch.empty(2, dtype=torch.int32, device="meta"),
        )
        tile, dim = split_tiles.SplitTile(group, 128, 128), tiles.block_dims(spec)[1]
        of_most = splits.PrefillSplits(splits.most_tile_splits(num_sms), tile)
        made = split_launch.TileList(of_most, heads, launch.visible_range(spec), 0, 4, 9, dim, where)
        assert made.max_split_items * heads * 128 * dim <= need.partial_acc
        beyond = need.partial_ml // (2 * 128) + 1
        with pytest.raises(ValueError, match=r"needs .* floats of the workspace, .* make the state with Limits"):
            split_launch.TileList(
                of_most._replace(target=beyond), heads, launch.visible_range(spec), 0, 4, 9, dim, where
            )


def test_blocks_of_a_load_are_no_fewer_than_a_tile_has() -> None:
    """By the spans of all tiles, of random layers; and few more."""
    for seed in range(300):
        spec, tile, query_lens, seq_lens, *_ = draw(seed)
        load = splits.TileLoad.of(spec, tile, np.array(query_lens), np.array(seq_lens))
        for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            widest = max(
                (span_of(spec, tile, first, query_len, seq_len) for first in range(0, query_len, tile.tokens)),
                default=0,
            )
            assert widest <= load.blocks[row] + 1  # a window may begin within a block
            assert load.blocks[row] <= widest + 2 + tile.tokens // tile.keys or spec.chunk_size or not query_len


def span_of(spec: AttentionSpec, tile: Any, first: int, query_len: int, seq_len: int) -> int:
    """Blocks of a tile, as kernels have them."""
    oldest = seq_len - query_len + first
    left = 0 if spec.window_left < 0 else max(0, oldest - spec.window_left)
    if spec.chunk_size is not None:
        left = max(left, oldest // spec.chunk_size * spec.chunk_size)
    stop = min(seq_len, oldest + tile.tokens) if spec.causal else seq_len
    return -(-(stop - left // tile.keys * tile.keys) // tile.keys)


def taken(items: list[float], num_programs: int) -> float:
    """What programs take that work through a list, each the next one as soon as it is done."""
    programs = [0.0] * num_programs
    for each in items:
        heapq.heapreplace(programs, programs[0] + each)
    return max(programs)


def work_of(load: Any, heads: int, num_programs: int, step: float, num_whole: int, target: int) -> float:
    """What a list takes, whose tiles have `step` blocks less each than the next one of their row."""
    order, rest = np.argsort(-load.blocks, kind="stable"), rest_of(load, num_whole)
    counts = splits.num_splits(splits.TileLoad(rest, load.blocks), heads, max(1, target), 1)
    whole, split = [], []
    for row in order:
        for nth in reversed(range(load.tiles[row])):
            blocks = max(load.blocks[row] - step * (load.tiles[row] - 1 - nth), 1)
            several = counts[row] if nth < rest[row] else 1
            (whole if several == 1 else split).extend([blocks / several + 1.0] * (several * heads))
    return taken(whole[: num_whole * heads] + split + whole[num_whole * heads :], num_programs) + 3.0 * bool(split)


def test_a_last_wave_is_split_where_that_is_faster() -> None:
    """Over random loads, by working through the list: none takes much longer, and most less time."""
    ratios = []
    for seed in range(400):
        dice = Random(f"waves {seed}")
        heads, num_rows, step = dice.choice((1, 2, 4, 8)), dice.choice((1, 1, 2, 5, 20)), dice.choice((0.0, 0.1, 0.5))
        longest = dice.choice((40, 200, 600))
        tile_counts = [dice.randint(1, dice.choice((4, 40, 150))) for _ in range(num_rows)]
        load = load_of(tile_counts, [dice.randint(longest // 2, longest) for _ in tile_counts])
        if not (num_whole_and_target := waves.last_wave(load, heads, 132, WIDE, step))[1]:
            continue
        num_tiles = int(load.tiles.sum())
        whole = work_of(load, heads, 132, step, num_tiles, 0)
        ratios.append(work_of(load, heads, 132, step, *num_whole_and_target) / whole)
    assert len(ratios) > 40
    assert max(ratios) < 1.05
    assert np.exp(np.log(ratios).mean()) < 0.93


def test_whole_tiles_wait_for_the_splits_in_front_of_them() -> None:
    """Over random loads of long rows and short ones: what splits take is known, and the best target or one nearly as
    good is taken."""
    known, picked = [], []
    for seed in range(400):
        dice = Random(f"behind {seed}")
        heads, num_rows = dice.choice((1, 2, 4, 8)), dice.choice((2, 5, 20, 60))
        load = load_of([dice.randint(1, 3) for _ in range(num_rows)],
                       [int(4 * 2 ** dice.uniform(0, 7)) for _ in range(num_rows)])  # fmt: skip
        expected, found = {}, {}
        for target in splits.tried_targets(132):
            counts = splits.num_splits(load, heads, target, WIDE.min_blocks)
            if (counts > 1).any():
                expected[target] = splits.split_time(load, heads, 132, counts, WIDE)
                found[target] = work_of(load, heads, 132, 0.0, 0, target)
        known += [expected[target] / found[target] for target in found]
        if found:
            picked.append(found[min(expected, key=expected.__getitem__)] / min(found.values()))
    assert np.quantile(known, 0.05) > 0.88
    assert max(known) < 1.25
    assert np.exp(np.log(picked).mean()) < 1.008


def random_tiles(seed: int) -> tuple[Any, int, float]:
    """A causal load, KV heads, and blocks that a row's tile has less than the next one's."""
    dice = Random(f"by length {seed}")
    heads, num_rows, step = (
        dice.choice((1, 2, 4, 8)),
        dice.choice((1, 2, 5, 20, 64)),
        dice.choice((0.25, 0.5, 1.0, 2.0)),
    )
    counts = [dice.randint(1, dice.choice((4, 40, 150))) for _ in range(num_rows)]
    longest = dice.choice((1, 20, 400))  # blocks in front of the first query
    return load_of(counts, [math.ceil(count * step) + dice.randrange(longest) for count in counts]), heads, step


def test_what_whole_tiles_take_in_waves() -> None:
    """Over random loads of fewer tiles than a GPU works on at a time, and of more, by working through the list, the
    longest first."""
    known = []
    for seed in range(800):
        load, heads, step = random_tiles(seed)
        found = taken(sorted(np.repeat(waves.tile_times(load, step, WIDE), heads).tolist(), reverse=True), 132)
        known.append(waves.in_waves_time(load, heads, 132, WIDE, step) / found)
    assert 0.97 < np.quantile(known, 0.05) < np.quantile(known, 0.95) < 1.02
    assert min(known) > 0.87
    assert max(known) < 1.22
    assert waves.in_waves_time(load_of([0, 0], [4, 9]), 8, 132, WIDE, 1.0) == 0.0


@pytest.mark.parametrize(("blocks", "saved", "is_split"), [
    (60, 0.07, False), (60, 0.12, True), (150, 0.07, True), (150, 0.06, False), (300, 0.06, True), (300, 0.04, False),
])  # fmt: skip
def test_less_of_a_long_time_is_worth_a_split(blocks: int, saved: float, is_split: bool) -> None:
    """A tenth of up to 100 blocks, and a twentieth of 200 and more. 88 tiles are 264 splits: two rounds of a third."""
    load, tile = load_of([88], [blocks]), split_tiles.SplitTile(4, 128, 128, of_the_join=0.0)
    whole, split = (splits.time_of(load, 1, 132, target, tile) for target in (0, 264))
    tile = tile._replace(of_the_join=(1 - saved) * whole - split)
    assert splits.split_target(load, 1, 132, tile)[0] == (264 if is_split else 0)


def test_keys_come_from_memory_once_a_row_and_from_the_l2_for_its_other_tiles() -> None:
    tile = split_tiles.SplitTile(4, 128, 128, of_a_read=1.25, of_another=0.5)
    load = load_of([3, 0, 1], [20, 100, 8])  # a row without queries is not read
    assert splits.reading_time(load, 4, 16, tile) == (1.25 * (20 + 8) + 0.5 * 2 * 20) * 4 / 16
    assert splits.busy_time(load, 4, 16, tile._replace(of_a_block=0.5)) == splits.reading_time(load, 4, 16, tile)
    assert splits.busy_time(load, 4, 16, tile._replace(of_a_block=2.0)) == 2.0 * 68 * 4 / 16
    for target in (0, 264):
        timed = load_of([132], [100]), 1, 132, target
        assert splits.time_of(*timed, tile._replace(of_another=3.0)) > 3 * 99 > 2 * splits.time_of(*timed, tile)


def test_reading_counts_over_16_bits_alone() -> None:
    """As measured there: of 8 bits half as much is read, and more is done to it."""
    spec = AttentionSpec(8, 2, 128, dtype=torch.bfloat16)
    usual, half = split_tiles.hopper_tile(spec), split_tiles.hopper_tile(spec, prefill_tiles.half_tile(spec))
    assert usual.of_a_read == half.of_a_read > usual.of_a_block > usual.of_another > 0
    over_8_bits = split_tiles.hopper_tile(replace(spec, cache_dtype=torch.float8_e4m3fn))
    assert over_8_bits.of_a_read == over_8_bits.of_another == 0.0


def test_a_long_row_that_is_some_waves_and_a_little_more_takes_another() -> None:
    """However short the rows are that fill it."""
    known = []
    for seed in range(300):
        dice = Random(f"a round more {seed}")
        heads, rounds, step = dice.choice((1, 2, 4, 8)), dice.randint(1, 4), dice.choice((0.0, 0.25, 1.0))
        count = rounds * 132 // heads + dice.randint(1, 3)
        rest = dice.randint(1, 132 // heads)
        load = load_of([rest, count], [dice.randint(1, 20), math.ceil(count * step) + dice.randint(40, 400)])
        found = taken(sorted(np.repeat(waves.tile_times(load, step, WIDE), heads).tolist(), reverse=True), 132)
        known.append(waves.in_waves_time(load, heads, 132, WIDE, step) / found)
    assert min(known) > 0.85
    assert max(known) < 1.1


def test_tiles_by_their_own_lengths_where_that_is_faster() -> None:
    """Over random loads, by working through the lists: what it takes is known roughly, it is never chosen where it
    takes longer than rows as they come, and where it takes much less it is, but for short tiles."""
    known, chosen, left = [], [], []
    for seed in range(400):
        load, heads, step = random_tiles(seed)
        times = np.repeat(waves.tile_times(load, step, WIDE), heads).tolist()
        backwards = splits.TileLoad(load.tiles[::-1], load.blocks[::-1])
        as_they_come = taken(np.repeat(waves.tile_times(backwards, step, WIDE), heads).tolist(), 132)
        by_length = taken(sorted(times, reverse=True), 132)
        known.append(waves.by_length_time(waves.tile_times(load, step, WIDE), heads, 132) / by_length)
        gain = by_length / as_they_come
        if waves.faster_by_length(load, heads, 132, WIDE, step) is not None:
            chosen.append(gain)
        elif 132 <= len(times) < 32 * 132 and np.mean(times) > 9:
            left.append(gain)
    assert min(known) > 0.87
    assert max(known) < 1.13
    assert len(chosen) > 100
    assert max(chosen) < 1.03
    assert np.exp(np.log(chosen).mean()) < 0.96
    assert min(left) > 0.95
    unequal = [*range(9, 51), *range(9, 31)]
    assert waves.faster_by_length(load_of([4] * 64, unequal), 1, 132, WIDE, 1.0) is not None
    assert waves.faster_by_length(load_of([4] * 64, unequal), 1, 132, WIDE, 0.0) is None
    assert waves.faster_by_length(load_of([4] * 65, [*unequal, 9]), 1, 132, WIDE, 1.0) is None
    assert waves.faster_by_length(load_of([0, 190], [9, 250]), 1, 132, WIDE, 1.0) is None


def test_rows_are_in_order_where_the_last_programs_would_have_long_tiles() -> None:
    """Long rows in front of short ones, of which many waves are to come; not where they are alike or at the end, where
    there are few tiles, or where rows have none."""
    long_first = load_of([40, *[4] * 60], [300, *[20] * 60])
    assert waves.is_faster_in_order(long_first, 2, 132, 0.0)
    long_last = load_of([*[4] * 60, 40], [*[20] * 60, 300])
    assert not waves.is_faster_in_order(long_last, 2, 132, 0.0)
    assert not waves.is_faster_in_order(load_of([20] * 30, [50] * 30), 2, 132, 0.0)
    assert not waves.is_faster_in_order(load_of([2, 4], [300, 20]), 2, 132, 0.0)
    without = load_of([0, *[20] * 30], [9000, *[50] * 30])
    assert not waves.is_faster_in_order(without, 2, 132, 0.0)
    assert not waves.is_faster_in_order(load_of([300] * 8, [301] * 8), 1, 132, 1.0)


def test_programs_that_sections_of_heads_leave_idle() -> None:
    """Over random loads, by working through the lists: in the order of their lengths tiles take less time than one
    section behind the other where that is said to leave programs idle, and nearly as much where it is not."""
    chosen, left = [], []
    for seed in range(400):
        load, _, step = random_tiles(seed)
        dice = Random(f"sections {seed}")
        heads, section = dice.choice(((14, 1), (16, 4), (20, 5), (32, 8), (36, 1), (40, 20), (45, 7)))
        backwards = splits.TileLoad(load.tiles[::-1], load.blocks[::-1])
        times = waves.tile_times(backwards, step, WIDE)
        sections = [min(section, heads - first) for first in range(0, heads, section)]
        in_sections = taken([each for some in sections for each in np.repeat(times, some).tolist()], 132)
        gain = taken(sorted(np.repeat(times, heads).tolist(), reverse=True), 132) / in_sections
        leaves_idle = waves.leaves_idle_in_sections(load, heads, 132, section, WIDE, step)
        (chosen if leaves_idle else left).append(gain)
    assert len(chosen) > 20
    assert max(chosen) < 1.03
    assert np.exp(np.log(chosen).mean()) < 0.94
    assert min(left) > 0.92


def test_sections_of_heads_leave_none_idle() -> None:
    """Of rows alike, of the longest at the end, which comes first, of fewer tiles than programs, or of none; many tiles
    are not asked for."""
    long, short = [8, *[8] * 59], [538, *[9] * 59]
    assert waves.leaves_idle_in_sections(load_of(long, short), 14, 132, 14, WIDE, 1.0)
    assert not waves.leaves_idle_in_sections(load_of(long, short[::-1]), 14, 132, 14, WIDE, 1.0)
    few = load_of([1, 1], [30, 600])
    assert not any(waves.leaves_idle_in_sections(few, heads, 132, 1, WIDE, 0.0) for heads in (16, 65))
    for count, is_asked in ((2048, True), (2049, False)):
        many = load_of([4, *[1] * (count - 4)], [6000, *[9] * (count - 4)])
        assert waves.leaves_idle_in_sections(many, 14, 132, 1, WIDE, 1.0) == is_asked
    assert not waves.leaves_idle_in_sections(load_of([20] * 30, [50] * 30), 14, 132, 1, WIDE, 0.0)
    assert not waves.leaves_idle_in_sections(load_of([0], [0]), 14, 132, 1, WIDE, 0.0)

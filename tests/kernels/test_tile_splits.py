"""Splits of tiles by their own lengths, beside what all sizes of a split would give."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from attn_backends import AttentionSpec

tile_splits = pytest.importorskip("attn_backends.kernels.prefill.tile_splits", reason="needs triton")
split_tiles = pytest.importorskip("attn_backends.kernels.prefill.split_tiles")
splits = pytest.importorskip("attn_backends.kernels.prefill.splits")
rules = pytest.importorskip("attn_backends.backends.triton.rules")
tiles = pytest.importorskip("attn_backends.kernels.prefill.tiles")

SMS = 132


class Case(NamedTuple):
    tile: Any
    query_lens: list[int]
    seq_lens: list[int]
    num_kv_heads: int

    @property
    def num_programs(self) -> int:
        return int(self.tile.num_programs(SMS))

    def found(self, least: float = float("inf")) -> Any:
        lens = np.array(self.query_lens, np.int32), np.array(self.seq_lens, np.int32)
        spec = AttentionSpec(self.tile.group_size * self.num_kv_heads, self.num_kv_heads, 64)
        load, keys = splits.TileLoad.of(spec, self.tile, *lens), tile_splits.tile_keys(self.tile, *lens)
        return tile_splits.split_by_tile(load, keys, self.num_kv_heads, self.num_programs, self.tile, least)

    def rows(self) -> list[list[float]]:
        """Keys that each row's tiles see."""
        tile, rows = self.tile, []
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            of_row = range(0, query_len * tile.group_size, tile.rows)
            ends = [(seq_len - query_len) * tile.group_size + first + tile.rows for first in of_row]
            rows.append([min(end, seq_len * tile.group_size) / tile.group_size for end in ends])
        return rows


def draw(seed: int) -> Case:
    dice = Random(f"tile splits {seed}")
    heads, group, dim = dice.choice((1, 2, 3, 8)), dice.choice((1, 3, 4, 8)), dice.choice((64, 96, 128, 192, 256))
    cached = dice.choice((torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn))
    spec = AttentionSpec(heads * group, heads, dim, dtype=torch.bfloat16, cache_dtype=cached)
    tile = split_tiles.hopper_tile(spec, dice.choice(tiles.tiles_of(spec)))
    query_lens = [int(2 ** dice.uniform(0, 13)) // group + 1 for _ in range(dice.choice((1, 1, 2, 5, 20)))]
    seq_lens = [length + dice.choice((0, 0, int(2 ** dice.uniform(4, 15)))) for length in query_lens]
    return Case(tile, query_lens, seq_lens, heads)


def of_size(case: Case, size: int) -> tuple[int, int, float]:
    """Work items and splits of a KV head, and what they take, of splits of so many blocks."""
    tile, num_items, num_splits, longest, used = case.tile, 0, 0, 0, 0.0
    first = all_read = 0
    for query_len, keys in zip(case.query_lens, case.rows(), strict=True):
        blocks = [-int(-each // tile.keys) for each in keys]
        counts = [-int(-each // (size * tile.keys)) for each in keys]
        part = query_len * tile.group_size / (len(keys) * tile.rows)
        num_items += sum(counts)
        num_splits += sum(count for count in counts if count > 1)
        used += part * sum(count for count in counts if count > 1)
        longest = max(longest, *(-(-each // count) for each, count in zip(blocks, counts, strict=True)))
        first, all_read = first + max(blocks), all_read + sum(blocks)
    of_heads = case.num_kv_heads / case.num_programs
    taken = tile.block_time(num_items * case.num_kv_heads, case.num_programs) * longest + tile.of_a_tile
    taken = max(taken, (tile.of_a_read * first + tile.of_another * (all_read - first)) * of_heads)
    return num_items, num_splits, taken + tile.of_the_join + tile.of_all_splits * used * of_heads


@pytest.mark.parametrize("part", range(4))
def test_the_shortest_splits_that_have_a_program_each(part: int) -> None:
    """By all sizes of a split; none where they would take longer than is asked for, where tiles fill the GPU, and where
    a tile would have more than 32."""
    num_found = 0
    for seed in range(150 * part, 150 * part + 150):
        case = draw(seed)
        most = case.num_programs // case.num_kv_heads
        keys = [each for row in case.rows() for each in row]
        longest = -int(-max(keys) // case.tile.keys)
        sizes = [size for size in range(2 * case.tile.min_blocks, longest) if of_size(case, size)[0] <= most]
        found = case.found()
        assert (found is not None) == (len(sizes) > 0 and max(keys) <= 32 * sizes[0] * case.tile.keys)
        if found:
            _, num_splits, taken = of_size(case, sizes[0])
            assert found == (sizes[0], num_splits, pytest.approx(taken))
            assert case.found(taken * 0.999) is None
            assert case.found(taken * 1.001) == found
            assert found.num_splits * case.num_kv_heads <= splits.most_tile_splits(SMS) * 128 // case.tile.rows
            num_found += 1
    assert num_found > 40


@pytest.mark.parametrize(
    ("changes", "is_split"),
    [({}, True), ({"causal": False}, False), ({"window_left": 3000}, False), ({"window_left": 9000}, True),
     ({"chunk_size": 4096}, False), ({"num_kv_heads": 32}, False)],
    ids=str,
)  # fmt: skip
def test_a_prompt_of_few_heads_is_split_by_its_tiles(
    changes: dict[str, Any], is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose last tiles take as long as all in turn would with a program each; no window or chunk hides a tile's first
    keys, or all see as many."""
    monkeypatch.setattr(rules, "num_multiprocessors", lambda _device: SMS)
    heads = {"num_kv_heads": 2} | changes
    spec = AttentionSpec(heads["num_kv_heads"], head_dim=64, dtype=torch.bfloat16, **heads)
    tile, lens, device = split_tiles.hopper_tile(spec), np.array([4933], np.int32), torch.device("cpu")
    found, taken = rules.timed_splits(spec, tile, lens, lens, 0, device)
    assert (found is not None and found.split_blocks > 0) == is_split
    if is_split:
        assert (found.by_length, found.num_whole, found.is_of_all) == (True, 0, True)
        assert 0 < found.target <= SMS
        assert taken < 0.7 * (-(-4933 // tile.keys) + tile.of_a_tile)
        behind, _ = rules.timed_splits(spec, tile, lens, lens, 0, device, for_graph=True)
        assert behind is None, "a graph serves other lengths too"


@pytest.mark.parametrize(("num_rows", "is_split"), [(64, True), (65, False)])
def test_more_rows_than_are_listed_by_the_lengths_of_tiles(
    num_rows: int, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "num_multiprocessors", lambda _device: SMS)
    spec = AttentionSpec(1, 1, 64, dtype=torch.bfloat16)
    query_lens = np.array([3000, *[1] * (num_rows - 1)], np.int32)
    found, _ = rules.timed_splits(spec, split_tiles.hopper_tile(spec), query_lens, query_lens, 0, torch.device("cpu"))
    assert (found is not None and found.split_blocks > 0) == is_split


def test_decodes_run_behind_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are counted so: with more of them nothing is split."""
    monkeypatch.setattr(rules, "num_multiprocessors", lambda _device: SMS)
    spec, device = AttentionSpec(2, 2, 64, dtype=torch.bfloat16), torch.device("cpu")
    tile, taken = split_tiles.hopper_tile(spec), []
    for keys in (100, 10_000, 1_000_000):
        lens = np.array([1, 4933], np.int32), np.array([keys, 4933], np.int32)
        found, time = rules.timed_splits(spec, tile, *lens, 1, device)
        taken.append(time if found else None)
    assert taken[0] == pytest.approx(taken[1])
    assert taken[2] is None


@pytest.mark.parametrize(
    ("query_len", "seq_len", "is_split"), [(4933, 4933, False), (4933, 40_000, True), (300, 40_000, True)]
)
def test_splits_by_tile_are_to_save_a_part_of_the_time(
    query_len: int, seq_len: int, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what as many splits of each tile take, or of what whole tiles do; decodes come on top."""
    asked: list[float] = []
    monkeypatch.setattr(rules, "num_multiprocessors", lambda _device: SMS)
    monkeypatch.setattr(rules, "split_by_tile", lambda *given: asked.append(given[-1]))
    spec, device = AttentionSpec(2, 2, 64, dtype=torch.bfloat16), torch.device("cpu")
    tile = split_tiles.hopper_tile(spec)
    lens = np.array([1, query_len], np.int32), np.array([10_000, seq_len], np.int32)
    found, taken = rules.timed_splits(spec, tile, *lens, 1, device)
    assert (found is not None) == is_split
    load = splits.TileLoad.of(spec, tile, lens[0][1:], lens[1][1:])
    decodes = rules.decode_time(spec, tile, lens[1][:1], device)
    least = (
        0.95 * taken
        if is_split
        else splits.least_time(load, 2, SMS, tile, splits.busy_time(load, 2, SMS, tile) + decodes)
    )
    assert asked == [pytest.approx(least - splits.serial_time(decodes))]

"""What prefills are reckoned to take, by which their tiles are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attn_backends import AttentionSpec

plans = pytest.importorskip("attn_backends.backends.triton.plans", reason="needs triton")
faster_tile = pytest.importorskip("attn_backends.kernels.prefill.faster_tile")
rules = pytest.importorskip("attn_backends.backends.triton.rules")
splits = pytest.importorskip("attn_backends.kernels.prefill.splits")
split_tiles = pytest.importorskip("attn_backends.kernels.prefill.split_tiles")
waves = pytest.importorskip("attn_backends.kernels.prefill.waves")
DEVICE = torch.device("cpu")
WHOLE = plans.TilePlan(None, None)


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plans, rules):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)


def layer(**changes: Any) -> AttentionSpec:
    return AttentionSpec(**{"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, **changes})


def taken(spec: AttentionSpec, query_lens: list[int], seq_lens: list[int], num_decodes: int = 0) -> float:
    lens = np.array(query_lens, np.int32), np.array(seq_lens, np.int32)
    return float(plans._taken(spec, WHOLE, *lens, num_decodes, DEVICE))


def in_waves(spec: AttentionSpec, query_len: int, seq_len: int, step: float) -> float:
    tile = split_tiles.hopper_tile(spec)
    load = splits.TileLoad.of(spec, tile, np.array([query_len]), np.array([seq_len]))
    return float(waves.in_waves_time(load, spec.num_kv_heads, 132, tile, step))


def test_a_prompts_tiles_see_fewer_keys_the_nearer_to_its_begin_they_are() -> None:
    """32 tokens of a tile are a quarter of a block of 128 keys."""
    spec = layer()
    assert waves.blocks_between(spec, split_tiles.hopper_tile(spec)) == 32 / 128
    assert taken(spec, [8000], [8000]) == pytest.approx(in_waves(spec, 8000, 8000, 0.25))
    assert taken(spec, [8000], [8000]) < 0.6 * in_waves(spec, 8000, 8000, 0.0)


@pytest.mark.parametrize("changes", [{"window_left": 1023}, {"causal": False}], ids=str)
def test_tiles_that_see_as_many_keys(changes: dict[str, Any]) -> None:
    spec = layer(**changes)
    assert taken(spec, [8000], [8000]) == pytest.approx(in_waves(spec, 8000, 8000, 0.0))


def test_a_tile_alone_on_a_multiprocessor_takes_less() -> None:
    spec = layer(num_qo_heads=4, num_kv_heads=1, head_dim=64)
    half = plans.half_tile(spec)
    tile = split_tiles.hopper_tile(spec, half)
    of_one, of_many = (
        float(plans._taken(spec, plans.TilePlan(half, None), *[np.full(count, 16 * 64, np.int32)] * 2, 0, DEVICE))
        for count in (1, 4)
    )
    blocks = 16 * 64 / tile.keys
    assert of_one == pytest.approx(tile.alone * tile.of_a_block * blocks + tile.of_a_tile)
    assert of_many == pytest.approx(tile.of_a_block * blocks + tile.of_a_tile)
    # Where all are busy, beside decodes, none is alone.
    lens = np.array([1, 16 * 64], np.int32), np.array([500_000, 16 * 64], np.int32)
    decodes = rules.decode_time(spec, tile, lens[1][:1], DEVICE)
    load = faster_tile.mean_load(spec, half, lens[0][1:], lens[1][1:])
    of_all = plans._taken(spec, plans.TilePlan(half, None), *lens, 1, DEVICE)
    assert of_all == pytest.approx(decodes + splits.busy_time(load, 1, 264, tile), rel=1e-9)


def test_decodes_beside_whole_tiles_count_where_these_leave_no_time() -> None:
    spec = layer()
    alone = taken(spec, [8000], [8000])
    tile, lens = split_tiles.hopper_tile(spec), np.full(64, 30_000, np.int32)
    decodes = rules.decode_time(spec, tile, lens, DEVICE)
    many = taken(spec, [1] * 64 + [8000], [30_000] * 64 + [8000], 64)
    assert max(alone, decodes) < many < alone + 1.02 * decodes
    few = taken(spec, [1, 8000], [16, 8000], 1)
    assert few == pytest.approx(alone, rel=1e-3)
    beside = rules.decode_time(spec, tile, np.full(1, 30_000, np.int32), DEVICE)
    long = taken(spec, [1, 33], [30_000, 9000], 1)  # one tile is longer than all that is busy
    assert long == pytest.approx(taken(spec, [33], [9000]))
    assert long > 5 * beside > 10


def test_decodes_take_as_long_as_their_keys_have_bytes() -> None:
    """Those that a window leaves, of all KV heads."""
    tile, lens = split_tiles.SplitTile(4, 128, 128), np.array([9000, 1000], np.int32)

    def decodes(**changes: Any) -> float:
        return float(rules.decode_time(layer(**changes), tile, lens, DEVICE))

    assert decodes(cache_dtype=torch.float8_e4m3fn) == decodes() / 2
    assert decodes(num_kv_heads=4) == decodes() / 2
    assert decodes(window_left=999) == pytest.approx(decodes() / 5)
    assert rules.decode_time(layer(), tile, lens[:0], DEVICE) == 0.0


def test_tiles_of_half_the_size_are_in_order_too() -> None:
    """A long chunk in front of a few tokens, whose last tiles are the longest: by their own lengths they take a fifth
    less time."""
    spec = layer(num_qo_heads=8)
    tile, half = split_tiles.hopper_tile(spec), plans.half_tile(spec)
    given = np.array([3000, 16], np.int32), np.array([3500, 2016], np.int32), 0, DEVICE
    found = plans.prefill_plan(spec, tile, None, *given)
    assert found.tile == half
    assert found.splits == splits.PrefillSplits(0, split_tiles.hopper_tile(spec, half), by_length=True)


def test_long_rows_of_many_heads_come_first_where_sections_would_end_with_them() -> None:
    """One of 60 rows sees 68,000 keys: of the last of 14 heads its tiles would begin when all else has ended. As they
    come with decodes, which are busy then, and with more heads than 44, of which fewer than three tiles at a time read
    the same keys."""
    tokens = np.full(60, 1000, np.int32)
    keys = np.full(60, 1100, np.int32)
    keys[7] = 68_000
    for heads, num_decodes, is_listed in ((14, 0, True), (14, 1, False), (44, 0, True), (45, 0, False)):
        spec = layer(num_qo_heads=heads, num_kv_heads=heads)
        found = rules.splits_of_a_wave(spec, split_tiles.hopper_tile(spec), tokens, keys, num_decodes, DEVICE)
        assert (found is not None) == is_listed
    spec = layer(num_qo_heads=14, num_kv_heads=14)
    for alike in (2200, 12_000):  # of all heads, or of some, in the L2
        keys = np.full(60, alike, np.int32)
        assert rules.splits_of_a_wave(spec, split_tiles.hopper_tile(spec), tokens, keys, 0, DEVICE) is None


def test_rows_of_sections_that_leave_none_idle_for_long_come_as_they_are() -> None:
    """Though in the order of their lengths they would be sooner done, but for reading keys more often."""
    tokens, keys = np.full(7, 800, np.int32), np.array([5000, 5000, 5000, 2500, 2500, 2500, 2500], np.int32)
    for heads, is_listed in ((16, True), (20, False)):
        spec = layer(num_qo_heads=heads, num_kv_heads=heads)
        found = rules.splits_of_a_wave(spec, split_tiles.hopper_tile(spec), tokens, keys, 0, DEVICE)
        assert (found is not None) == is_listed


@pytest.mark.parametrize(
    ("heads", "window_left", "decoded", "target"),
    [(28, -1, 0, 132), (28, -1, 100, 132), (28, -1, 12_000, 0), (28, 8000, 0, 0), (45, -1, 0, 0)],
    ids=str,
)
def test_a_last_wave_of_many_heads_is_split(heads: int, window_left: int, decoded: int, target: int) -> None:
    """Though fewer tiles read the same keys at a time then; not beside decodes of many keys, nor of too many heads or
    of windows."""
    spec = layer(num_qo_heads=heads, num_kv_heads=heads, window_left=window_left)
    tokens, keys = np.array([1, 1248], np.int32), np.array([decoded, 14_593], np.int32)
    lens = (tokens, keys) if decoded else (tokens[1:], keys[1:])
    found = rules.splits_of_a_wave(spec, split_tiles.hopper_tile(spec), *lens, int(decoded > 0), DEVICE)
    assert (found.target if found else 0) == target


def test_a_last_wave_of_few_heads_is_split_beside_decodes() -> None:
    """Of any keys: as many tiles read the same ones at a time as without."""
    spec, lens = layer(num_qo_heads=11, num_kv_heads=11), ([1, 1664], [12_000, 14_593])
    found = rules.splits_of_a_wave(spec, split_tiles.hopper_tile(spec), *map(np.array, lens), 1, DEVICE)
    assert (found.target, found.num_whole) == (132, 12)


def test_short_tiles_of_all_heads_at_once_come_as_they_are() -> None:
    """With the long row first, which is last then: of heads in sections they would not."""
    tokens, keys = np.full(400, 200, np.int32), np.full(400, 300, np.int32)
    tokens[0], keys[0] = 500, 12_000
    for heads, is_listed in ((2, False), (14, True)):
        spec = layer(num_qo_heads=heads, num_kv_heads=heads)
        found = rules.splits_of_a_wave(spec, split_tiles.hopper_tile(spec), tokens, keys, 0, DEVICE)
        assert (found is not None) == is_listed


def test_many_rows_come_with_the_longest_first_where_it_is_the_first_else_last() -> None:
    """More than are ordered by the lengths of their tiles."""
    spec = layer(num_qo_heads=2, num_kv_heads=2)
    tokens, keys = np.full(101, 500, np.int32), np.full(101, 3000, np.int32)
    tokens[0], keys[0] = 5000, 20_000
    given = split_tiles.hopper_tile(spec), tokens, keys, 0, DEVICE
    found = rules.splits_of_a_wave(spec, *given)
    assert (found.target, found.by_length) == (0, False)
    assert rules.splits_of_a_wave(spec, given[0], tokens[::-1], keys[::-1], 0, DEVICE) is None

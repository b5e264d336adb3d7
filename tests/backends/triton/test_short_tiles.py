"""Which prefills the portable kernel serves on Hopper: those whose tiles see few keys."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec
from attn_backends.kernels.prefill.tiles import HopperTile, ShortTile

rules = pytest.importorskip("attn_backends.backends.triton.rules", reason="needs triton")
short_tiles = pytest.importorskip("attn_backends.backends.triton.short_tiles")
faster_tile = pytest.importorskip("attn_backends.kernels.prefill.faster_tile")
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "suits_hopper_kernel", lambda spec, device: spec.logits_soft_cap is None)
    for module in (rules, faster_tile, short_tiles):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)


def tile(
    spec: AttentionSpec, query_lens: list[int], seq_lens: list[int], page_size: int = 16, options: Any = None
) -> object:
    tiles = short_tiles.short_tiles(spec, KVCacheSpec(8, page_size), options, DEVICE)
    return short_tiles.short_tile(spec, tiles, np.array(query_lens, np.int32), np.array(seq_lens, np.int32), DEVICE)


def layer(head_dim: int, **changes: object) -> AttentionSpec:
    return AttentionSpec(8, 4, head_dim, dtype=torch.bfloat16, **changes)


@pytest.mark.parametrize("seed", range(200))
def test_fewer_keys_are_as_short(seed: int) -> None:
    """Random rows: none is too long for the tile that the same tokens behind longer contexts have; and rows that see
    more than any tile may are the other kernel's, unless a window hides what is more."""
    numbers = Random(seed)
    spec = layer(numbers.choice([64, 80, 96, 128, 192, 256]))
    count = numbers.choice([1, 3, 40, 200])
    query_lens = [int(2 ** numbers.uniform(0, 10)) for _ in range(count)]
    seq_lens = [query_len + int(2 ** numbers.uniform(0, 9)) for query_len in query_lens]
    fewer = [numbers.randint(new, total) for new, total in zip(query_lens, seq_lens, strict=True)]
    assert tile(spec, query_lens, seq_lens) is None or tile(spec, query_lens, fewer) is not None
    more = [total + 4096 for total in seq_lens]
    assert tile(spec, query_lens, more) is None
    window = layer(spec.head_dim, window_left=31)
    begin_at_once = sum(-(-query_len // 64) for query_len in query_lens) * spec.num_kv_heads <= 132
    assert (tile(window, query_lens, more) is not None) is begin_at_once
    assert tile(layer(spec.head_dim, window_left=31, causal=False), query_lens, more) is None


def test_the_longest_counts_of_few_rows_and_the_mean_of_many() -> None:
    """Of many with heads that the kernel for Hopper has no tiles of half the size for."""
    spec, wide = layer(128), layer(256)
    assert tile(spec, [60] * 10, [60] * 9 + [70]) is None
    assert tile(spec, [60] * 100, [60] * 100) is None
    assert tile(layer(64), [80] * 100, [80] * 100) is None
    assert tile(wide, [33] * 100, [33] * 10 + [31] * 90) is None
    graph = np.full(30, 60, np.int32), np.full(30, 130, np.int32)
    tiles = short_tiles.SHORT_TILES
    assert short_tiles.short_tile(spec, tiles, *graph, DEVICE, for_graph=True) == tiles[0]
    wide_group = AttentionSpec(71, 1, 64, dtype=torch.bfloat16)
    assert tile(wide_group, [1] * 200, [100] * 200) == short_tiles.SHORT_TILES[0]
    assert tile(AttentionSpec(60, 1, 64, dtype=torch.bfloat16), [1] * 400, [100] * 400) is None


def block(rows: int, keys: int, warps: int = 4) -> object:
    return ShortTile(rows, keys, warps, 1, is_one_block=True)


def test_one_block_holds_all_keys() -> None:
    """Of 32, 64 or 128, by fewer queries where programs are few, of which longer blocks and wider heads want fewer."""
    for dim, count, keys, wanted in (
        (64, 4, 32, block(16, 32)), (64, 10, 32, block(64, 32)),
        (128, 10, 32, block(16, 32)), (128, 20, 32, block(64, 32)), (256, 2000, 32, block(64, 32)),
        (128, 6, 64, block(16, 64)), (128, 12, 33, block(64, 64)), (64, 100, 64, block(64, 64)), (64, 200, 64, None),
        (128, 50, 64, None), (192, 30, 64, block(64, 64)), (256, 10, 64, block(64, 64)), (256, 20, 64, None),
        (64, 2, 65, block(16, 128)), (128, 2, 128, block(16, 128)), (128, 3, 128, None),
        (256, 1, 128, block(16, 128, 8)), (256, 2, 128, None), (64, 20, 128, block(64, 128)), (64, 30, 128, None),
    ):  # fmt: skip
        assert tile(layer(dim), [keys] * count, [keys] * count) == wanted, (dim, count, keys)


def test_one_block_over_8_bits_serves_more_rows() -> None:
    """As the kernel for Hopper makes 16 bits of those first."""
    for dim, count, keys, wanted in (
        (128, 10, 32, block(16, 32)), (256, 2000, 32, block(64, 32)), (256, 8, 64, block(16, 64)),
        (128, 100, 64, block(64, 64)), (128, 4, 128, block(16, 128)), (128, 10, 128, block(64, 128)),
        (64, 30, 128, block(64, 128)), (256, 4, 128, block(16, 128)),
    ):  # fmt: skip
        of_8_bits = layer(dim, cache_dtype=torch.float8_e4m3fn)
        assert tile(of_8_bits, [keys] * count, [keys] * count) == wanted, (dim, count, keys)


def test_tiles_that_would_be_nearly_empty_are_of_few_queries() -> None:
    """Up to 64 keys and heads of 128: rows of one token, or of a tile of 16 queries each."""
    assert tile(layer(128), [8] * 500, [64] * 500) == block(16, 64)
    assert tile(layer(128), [17] * 500, [64] * 500) is None
    assert tile(layer(256), [8] * 500, [64] * 500) is None
    assert tile(layer(128), [8] * 500, [65] * 500) is None


def test_a_token_of_more_queries_than_a_tile_has() -> None:
    for heads in (16, 17, 71):
        assert tile(AttentionSpec(heads, 1, 96, dtype=torch.bfloat16), [1], [31]) == block(16, 32)


def test_triton_compiles_powers_of_two() -> None:
    for each in (*short_tiles.SHORT_TILES, *(one.tile for one in short_tiles._ONE_BLOCK)):
        assert all(size & (size - 1) == 0 for size in (each.rows, each.keys, each.warps)), each


def test_a_windows_keys_are_no_block_of_a_tile() -> None:
    """It is the whole row's that count, though a window hides most of them."""
    assert tile(layer(128, window_left=24), [8], [4000]) == short_tiles.SHORT_TILES[1]
    assert tile(layer(128, window_left=24), [8], [32]) == block(16, 32)


def test_decodes_go_along_where_all_begin_at_once() -> None:
    spec, tiles = layer(128), short_tiles.SHORT_TILES
    for count, wanted in ((30, tiles[0]), (40, None)):
        lens = np.array([1] * count + [100], np.int32)
        assert short_tiles.short_tile(spec, tiles, lens, lens + 100, DEVICE, has_decodes=True) == wanted
        assert short_tiles.short_tile(spec, tiles, lens, lens + 100, DEVICE) is None
    for count, wanted in ((60, block(16, 32)), (130, block(16, 32)), (132, None)):
        lens = np.array([1] * count + [9], np.int32)
        assert short_tiles.short_tile(spec, tiles, lens, lens + 20, DEVICE, has_decodes=True) == wanted
        assert short_tiles.short_tile(spec, tiles, lens, lens + 20, DEVICE) is not None


def test_rows_that_half_fill_a_tile_for_hopper_may_see_twice_as_many_keys() -> None:
    spec = layer(256, cache_dtype=torch.float8_e4m3fn)
    assert tile(spec, [32] * 100, [200] * 100) == short_tiles.SHORT_TILES[1]
    assert tile(spec, [33] * 100, [200] * 100) is None


def test_a_token_may_have_more_queries_than_a_tile() -> None:
    for heads, head_dim in ((71, 256), (71, 128), (64, 256)):
        assert tile(AttentionSpec(heads, 1, head_dim, dtype=torch.bfloat16), [2], [40]) is not None


def test_no_tile_takes_much_longer_than_all_together() -> None:
    """A long row among many short ones is split, or decoded, by other kernels."""
    for head_dim, long in ((64, 100_000), (128, 100_000), (128, 3000)):
        assert tile(layer(head_dim), [100] * 400 + [5], [100] * 400 + [long]) is None
    assert tile(layer(256), [30] * 400 + [5], [30] * 400 + [3000]) is None


def test_only_where_the_kernel_for_hopper_would_serve() -> None:
    assert tile(layer(128, logits_soft_cap=30.0), [10], [10]) is None
    assert tile(layer(128), [10], [10], page_size=24) is None
    for kind in ("prefill_tile", "prompt_tile"):
        given = rules.TritonOptions(**{kind: short_tiles.SHORT_TILES[0]})
        assert tile(layer(128), [10], [10], options=given) is None


def test_a_graph_splits_a_long_row_among_short_ones() -> None:
    """As many rows of the longest length as there are would fill the GPU by themselves."""
    spec, query_lens, longest = layer(128), np.full(40, 40, np.int32), np.full(40, 4096, np.int32)
    given = spec, rules.hopper_tile(spec), query_lens, longest, 0, DEVICE
    assert not rules.prefill_splits(*given).is_of_all
    assert rules.splits_of_all(*given, for_graph=True) == rules.PrefillSplits(132, given[1])
    many = AttentionSpec(67, 67, 128, dtype=torch.bfloat16)  # heads, of which not each can have two splits
    assert rules.splits_of_all(many, *given[1:], for_graph=True) is None
    one = query_lens[:1], np.full(1, 300, np.int32)
    assert rules.splits_of_all(*given[:2], *one, 0, DEVICE, for_graph=True) is None


def other(spec: AttentionSpec, query_lens: list[int], seq_lens: list[int]) -> Any:
    lens = np.array(query_lens, np.int32), np.array(seq_lens, np.int32)
    return faster_tile.faster_hopper_tile(spec, *lens, DEVICE)


def test_tiles_of_half_the_size_for_rows_that_see_few_keys() -> None:
    """In the mean of their tiles: of a prompt that is half of its keys. Where all begin at once they may be more."""
    spec, half = layer(128), HopperTile(1, 64, 2, beside=2)
    assert other(spec, [1100] * 4, [1100] * 4) == half
    assert other(spec, [1500] * 4, [1500] * 4) is None
    assert other(spec, [1500], [1500]) == half
    assert other(spec, [2000], [2000]) is None
    assert other(spec, [64] * 40, [640] * 40) == half
    assert other(spec, [64] * 40, [900] * 40) is None
    assert other(spec, [64] * 30, [890] * 30) == half
    assert other(layer(128, window_left=127), [1] * 40 + [9000], [9000] * 41) == half
    assert other(layer(64), [700] * 4, [700] * 4) == HopperTile(1, 64, 4, beside=2)
    assert other(layer(64), [1000] * 4, [1000] * 4) is None
    assert other(AttentionSpec(64, 1, 128, dtype=torch.bfloat16), [9] * 4, [90] * 4) == half
    assert other(AttentionSpec(71, 1, 128, dtype=torch.bfloat16), [9] * 4, [90] * 4) is None
    assert other(layer(192), [64] * 40, [300] * 40) is None
    latent = AttentionSpec(16, 16, 192, 128, dtype=torch.bfloat16)  # of which a block of half the size is as wide
    assert other(latent, [1000] * 16, [1000] * 16) == HopperTile(2, 64, 2)
    assert other(latent, [1024], [1024]) == HopperTile(2, 64, 2)
    assert other(latent, [2000] * 3, [2000] * 3) is None
    assert other(layer(128, window_left=127, causal=False), [64] * 40, [9000] * 40) is None


def test_a_third_group_of_warps_where_tiles_are_full() -> None:
    """Of 192 queries, and where they leave fewer of them empty than tiles of 128 do, and see many keys."""
    group_of_8, three = AttentionSpec(64, 8, 64, dtype=torch.bfloat16), HopperTile(3, 128, 4)
    assert other(group_of_8, [24] * 80, [9000] * 80) == three
    assert other(group_of_8, [24] * 40, [9000] * 40) is None
    assert other(group_of_8, [16] * 80, [9000] * 80) is None
    assert other(group_of_8, [8000] * 40, [8000] * 40) == three
    assert other(group_of_8, [2000] * 40, [2000] * 40) is None
    assert other(group_of_8, [118] * 9, [9000] * 9) is None  # which two groups split
    assert other(layer(64), [40] * 40, [9000] * 40) is None
    for changes in ({"window_left": 1000}, {"chunk_size": 1000}):
        assert other(layer(64, **changes), [2000] * 40, [2000] * 40) is None


@pytest.mark.parametrize("seed", range(100))
def test_the_order_of_rows_is_nothing_to_a_tile(seed: int) -> None:
    numbers = Random(seed)
    spec = AttentionSpec(numbers.choice([1, 3, 8, 16]) * 2, 2, numbers.choice([64, 96, 128]), dtype=torch.bfloat16)
    new_tokens = [int(2 ** numbers.uniform(0, 11)) for _ in range(40)]
    rows = [(new, new + int(2 ** numbers.uniform(0, 13))) for new in new_tokens]
    first = other(spec, *map(list, zip(*rows, strict=True)))
    numbers.shuffle(rows)
    assert other(spec, *map(list, zip(*rows, strict=True))) == first

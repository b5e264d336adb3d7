"""TRITON's rule for tiles of decode: what one shape has more of than another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends.spec import AttentionSpec, KVCacheSpec

tuning = pytest.importorskip("attn_backends.backends.triton.tuning", reason="needs triton")

FP8 = torch.float8_e4m3fn
HOPPER = 227 << 10


def tile(head_dim: int, num_rows: int, cached: torch.dtype = torch.bfloat16, query_rows: int = 16) -> Any:
    """The tile of so many rows of 8 KV heads."""
    spec = AttentionSpec(32, 8, head_dim, dtype=torch.bfloat16, cache_dtype=cached)
    return tuning.decode_tile(spec, KVCacheSpec(64, 16), num_rows, query_rows, None, HOPPER)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 200])
def test_programs_keep_enough_loads_under_way(head_dim: int, num_rows: int) -> None:
    """Of 16 bits 64 KiB for each multiprocessor: half of the stages, less those of page ids, hold keys. A block is one
    page's."""
    made = tile(head_dim, num_rows)
    assert made.keys == 16
    assert made.programs * ((made.stages - 1) // 2) * made.keys * 2 * head_dim * 2 >= 64 << 10


@pytest.mark.parametrize("cached", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_a_multiprocessor_holds_all_programs(head_dim: int, cached: torch.dtype) -> None:
    """It has registers for eight warps of decode."""
    for num_rows in (1, 200):
        made = tile(head_dim, num_rows, cached)
        assert made.warps * made.programs <= 8


@pytest.mark.parametrize("head_dim", [32, 64, 192, 256])
def test_blocks_of_narrow_or_wide_keys_of_8_bits_are_longer(head_dim: int) -> None:
    """Unless pairs of a row and a KV head are few."""
    few, many = (tile(head_dim, num_rows, FP8) for num_rows in (4, 5))
    assert many.keys == 2 * few.keys == 2 * tile(head_dim, 5).keys
    assert few.warps * few.programs > many.warps * many.programs


@pytest.mark.parametrize("head_dim", [80, 96, 112, 128])
def test_blocks_of_other_keys_of_8_bits_are_a_page_of_16(head_dim: int) -> None:
    assert tile(head_dim, 4, FP8) == tile(head_dim, 200, FP8)
    assert tile(head_dim, 200, FP8).keys == tile(head_dim, 200).keys


@pytest.mark.parametrize("cached", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("num_rows", [4, 40])
def test_a_key_that_is_too_wide_for_one_warp_has_two(num_rows: int, cached: torch.dtype) -> None:
    assert [tile(head_dim, num_rows, cached).warps for head_dim in (64, 128, 192, 256)] == [1, 1, 2, 2]


def test_only_tiles_of_few_queries_of_16_bits_go_by_the_rule() -> None:
    assert tuning.goes_by_rule(AttentionSpec(8, 8, 64, dtype=torch.bfloat16), 16)
    assert not tuning.goes_by_rule(AttentionSpec(8, 8, 64, dtype=torch.bfloat16), 64)
    assert not tuning.goes_by_rule(AttentionSpec(8, 8, 64, dtype=torch.float32), 16)

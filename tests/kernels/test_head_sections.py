"""Sections of KV heads whose tiles prefill takes one behind the other: by working through the tiles of random rows."""

from __future__ import annotations

import heapq
from random import Random

import pytest
import torch

from attn_backends.spec import AttentionSpec

tiles = pytest.importorskip("attn_backends.kernels.prefill.tiles", reason="needs triton")

NUM_SMS, BESIDE_BLOCKS = 132, 2.0


def taken(spec: AttentionSpec, lens: list[int], section: int) -> float:
    """What the program takes that ends last, in blocks of 128 keys: sections in turn, of one the last tiles first, and
    heads inside."""
    tokens = max(1, 128 // spec.group_size)
    blocks = [-(-(first + tokens) // 128) for length in lens for first in range(0, length, tokens)]
    programs = [0.0] * NUM_SMS
    for first_head in range(0, spec.num_kv_heads, section):
        for of_tile in reversed(blocks):
            for _ in range(min(section, spec.num_kv_heads - first_head)):
                heapq.heapreplace(programs, programs[0] + of_tile + BESIDE_BLOCKS)
    return max(programs)


def test_the_last_section_ends_with_the_others() -> None:
    """Long prompts whose heads do not all fit the L2 cache: sections of as many as do took up to a third longer than
    one section of all."""
    ratios, of_l2 = [], []
    for seed in range(200):
        dice = Random(f"sections {seed}")
        kv_heads, group = dice.choice((4, 8, 12, 16, 32)), dice.choice((1, 1, 2, 4))
        spec = AttentionSpec(kv_heads * group, kv_heads, dice.choice((64, 128, 256)), dtype=torch.bfloat16)
        lens = [int(2 ** dice.uniform(9, 13.3)) for _ in range(dice.choice((1, 1, 2, 3)))]
        fitting = tiles.heads_in_l2(spec, max(lens), 2)
        if fitting < kv_heads:
            best = taken(spec, lens, kv_heads)
            ratios.append(taken(spec, lens, tiles.section_heads(spec, max(lens), 2, kv_heads)) / best)
            of_l2.append(taken(spec, lens, fitting) / best)
    assert len(ratios) > 50
    assert max(ratios) < 1.15
    assert sum(ratios) < 1.015 * len(ratios)
    assert max(of_l2) > 1.3


@pytest.mark.parametrize(
    ("kv_heads", "max_seq_len", "expected"),
    [
        (16, 4352, 8),  # of which 15 fit: one alone would come last
        (64, 2176, 22),  # three sections where 30 fit
        (8, 10_112, 4),
        (8, 20_000, 3),  # as many as fit
        (64, 100_000, 1),
        (5, 1, 5),
    ],
)
def test_known_sections(kv_heads: int, max_seq_len: int, expected: int) -> None:
    spec = AttentionSpec(kv_heads, kv_heads, 128, dtype=torch.bfloat16)
    assert tiles.section_heads(spec, max_seq_len, 2, kv_heads) == expected


@pytest.mark.parametrize("seed", range(50))
def test_no_more_heads_than_fit(seed: int) -> None:
    dice = Random(f"all heads {seed}")
    kv_heads, longest = dice.randint(1, 128), dice.randint(0, 200_000)
    spec = AttentionSpec(kv_heads, kv_heads, 64, dtype=torch.bfloat16)
    section, fitting = tiles.section_heads(spec, longest, 2, kv_heads), tiles.heads_in_l2(spec, longest, 2)
    assert 1 <= section <= min(fitting, kv_heads)
    assert -(-kv_heads // section) == -(-kv_heads // fitting)  # no more sections for it

"""The emulated FlashMLA, in both generations: its schedules, and what it refuses as the real one does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.emulated import flashmla, flashmla_older
from tests.emulated.flashmla_kernel import OVERHEAD_BLOCKS, make_schedule, num_parts

HEADS, PAGES = 4, 12


def call(**changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A call of the newer generation over three rows of one token, changed."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "q": torch.randn(3, 1, HEADS, 576).bfloat16(),
        "k_cache": torch.randn(PAGES, 64, 1, 576).bfloat16(),
        "block_table": torch.arange(PAGES, dtype=torch.int32).view(3, 4),
        "cache_seqlens": torch.tensor([70, 0, 256], dtype=torch.int32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": flashmla.get_mla_metadata()[0],
        "causal": True,
        **changes,
    }
    return flashmla.flash_mla_with_kvcache(**given)


def test_it_attends_to_the_keys_of_a_row() -> None:
    out, lse = call(softmax_scale=0.05)
    torch.manual_seed(0)
    query, cache = torch.randn(3, 1, HEADS, 576).bfloat16().float(), torch.randn(PAGES, 64, 1, 576).bfloat16().float()
    for row, length in ((0, 70), (2, 256)):
        keys = cache[4 * row : 4 * row + 4, :, 0].flatten(0, 1)[:length]
        logits = 0.05 * query[row, 0] @ keys.T
        torch.testing.assert_close(lse[row, :, 0], logits.logsumexp(-1))
        torch.testing.assert_close(out[row, 0].float(), logits.softmax(-1) @ keys[:, :512], atol=1e-2, rtol=1e-2)
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == math.inf).all())
    assert (out.shape, lse.shape) == ((3, 1, HEADS, 512), (3, HEADS, 1))


def test_the_scale_is_that_of_the_width_unless_given() -> None:
    torch.testing.assert_close(call()[1], call(softmax_scale=576**-0.5)[1])


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=12), st.integers(1, 132))
def test_a_schedule_covers_every_block_once(lens: list[int], parts: int) -> None:
    tiles, splits = make_schedule(torch.tensor(lens, dtype=torch.int32), parts)
    assert tiles.shape == (parts, 8)
    covered = [0] * len(lens)
    pieces = [0] * len(lens)
    for first, begin, last, end, _, *_ in tiles.tolist():
        for row in range(first, min(last + 1, len(lens))):
            blocks = max(-(-lens[row] // 64), 1) + OVERHEAD_BLOCKS
            covered[row] += (end if row == last else blocks) - (begin if row == first else 0)
            pieces[row] += 1
    assert covered == [max(-(-n // 64), 1) + OVERHEAD_BLOCKS for n in lens]
    assert splits.tolist() == [sum(pieces[:i]) for i in range(len(lens) + 1)]


def test_parts_are_fewer_where_rows_are_wider() -> None:
    assert [num_parts(n) for n in (1, 64, 65, 128, 1024)] == [132, 132, 66, 66, 8]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(3, 1, HEADS, 576)}, "Unsupported dtype"),
    ({"k_cache": torch.zeros(PAGES, 64, 1, 576).half()}, "same dtype"),
    ({"k_cache": torch.zeros(PAGES, 32, 1, 576).bfloat16()}, "page_block_size must be 64"),
    ({"k_cache": torch.zeros(PAGES, 64, 2, 576).bfloat16()}, "kcache must have shape"),
    ({"q": torch.zeros(3, 1, HEADS, 512).bfloat16()}, "head_size_k == 576"),
    ({"head_dim_v": 576}, "head_size_v == 512"),
    ({"cache_seqlens": torch.zeros(3, dtype=torch.int64)}, "seqlens_k must have dtype int32"),
    ({"cache_seqlens": torch.zeros(2, dtype=torch.int32)}, "seqlens_k must have shape"),
    ({"cache_seqlens": torch.zeros(6, dtype=torch.int32)[::2]}, "seqlens_k must be contiguous"),
    ({"block_table": torch.zeros(3, 4, dtype=torch.int64)}, "block_table must have dtype"),
    ({"block_table": torch.zeros(4, 3, dtype=torch.int32).T}, "contiguous last dimension"),
    ({"block_table": torch.zeros(2, 4, dtype=torch.int32)}, "batch_size rows"),
    ({"out": torch.zeros(3, 1, HEADS, 512)}, "out must have the dtype"),
    ({"out": torch.zeros(3, HEADS, 1, 512).bfloat16()}, "out must have shape"),
    ({"out": torch.zeros(3, 1, HEADS, 1024).bfloat16()[..., :512]}, "out must be contiguous"),
]


@pytest.mark.parametrize(("changes", "told"), WRONG, ids=[told for _, told in WRONG])
def test_what_the_kernel_checks(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        call(**changes)


def test_a_schedule_serves_calls_of_one_shape() -> None:
    meta, _ = flashmla.get_mla_metadata()
    call(tile_scheduler_metadata=meta)
    assert meta.have_initialized
    with pytest.raises(AssertionError, match="inconsistent with sched_meta"):
        call(tile_scheduler_metadata=meta, q=torch.zeros(3, 1, 8, 576).bfloat16())
    with pytest.raises(AssertionError, match="FlashMLASchedMeta"):
        call(tile_scheduler_metadata=torch.zeros(132, 8))
    with pytest.raises(AssertionError, match="num_splits must be None"):
        call(num_splits=torch.zeros(4))


def test_a_schedule_of_other_lengths_shows() -> None:
    meta, _ = flashmla.get_mla_metadata()
    call(tile_scheduler_metadata=meta)
    same_blocks = torch.tensor([65, 1, 193], dtype=torch.int32)
    assert call(tile_scheduler_metadata=meta, cache_seqlens=same_blocks)[0].isfinite().all()
    other = torch.tensor([64, 1, 193], dtype=torch.int32)
    assert call(tile_scheduler_metadata=meta, cache_seqlens=other)[0].isnan().all()


def test_an_older_schedule_of_the_wrong_shape_is_refused() -> None:
    lens = torch.tensor([70, 1, 256], dtype=torch.int32)
    query, cache = torch.zeros(3, 1, 128, 576).bfloat16(), torch.zeros(PAGES, 64, 1, 576).bfloat16()
    table = torch.zeros(3, 4, dtype=torch.int32)
    for tokens, told in ((1, r"tile_scheduler_metadata must have shape \(66, 8\)"), (128, "")):
        made = flashmla_older.get_mla_metadata(lens, tokens, 1)
        if told:
            with pytest.raises(RuntimeError, match=told):
                flashmla_older.flash_mla_with_kvcache(query, cache, table, lens, 512, *made)
        else:
            assert flashmla_older.flash_mla_with_kvcache(query, cache, table, lens, 512, *made)[0].isfinite().all()

"""Rows of requests on the host: how they are arranged, and which pages they have."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from attn_backends.spec import KVCacheSpec
from attn_backends.step.rows import PageRows
from tests.helpers.step_walk import CACHE, LIMITS


@given(st.data(), st.integers(1, 7), st.sampled_from([1, 3]))
@settings(deadline=None)
def test_arrange(data: st.DataObject, num_rows: int, threshold: int) -> None:
    """Decodes in front, prefills behind them, the rest last; with no more swaps than three kinds need."""
    rows = PageRows(LIMITS, CACHE)
    for row in range(num_rows):
        rows.enter(f"r{row}", [row, 40])
    rows.swap_rows(0, num_rows - 1)
    asked = data.draw(st.lists(st.sampled_from(rows.request_ids), min_size=1, unique=True))
    query_lens = data.draw(st.lists(st.integers(1, 5), min_size=len(asked), max_size=len(asked)))
    before, moves = list(rows.request_ids), rows.num_moves
    order = rows.arrange(asked, query_lens, threshold)
    assert [asked[i] for i in order] == rows.request_ids[: len(asked)]
    arranged = [query_lens[i] > threshold for i in order]
    assert arranged == sorted(arranged)
    assert sorted(rows.request_ids) == sorted(before)
    for name in before:
        assert rows.row_of(name) == rows.request_ids.index(name)
        assert rows.pages_of(name).tolist() == [int(name[1:]), 40]
    assert rows.num_moves - moves == fewest_swaps(before, dict(zip(asked, query_lens, strict=True)), threshold)


def fewest_swaps(names: list[str], query_lens: dict[str, int], threshold: int) -> int:
    """Rows that are in each other's place take one swap a pair; the rest are cycles of three, two swaps each."""
    kinds = [2 if name not in query_lens else int(query_lens[name] > threshold) for name in names]
    wrong = dict.fromkeys(product(range(3), repeat=2), 0)
    for kind, place in zip(kinds, sorted(kinds), strict=True):
        wrong[place, kind] += kind != place
    pairs = sum(min(wrong[a, b], wrong[b, a]) for a, b in ((0, 1), (0, 2), (1, 2)))
    return pairs + (sum(wrong.values()) - 2 * pairs) // 3 * 2


@pytest.mark.parametrize("page", [16, 17, 19, 22, 23, 24])
def test_pages_are_told_apart_however_they_came(page: int) -> None:
    """Neighbours, as they share a byte of what is remembered."""
    rows = PageRows(LIMITS, CACHE)
    rows.enter("a", [16, 17])
    rows.append([0], [19])
    rows.append([0], [22])
    rows.extend("a", [24, 23])
    rows.enter("b", [18, 20, 21])
    for edit in (lambda: rows.append([0], [page]), lambda: rows.extend("a", [page])):
        with pytest.raises(ValueError, match=f"'a' would have page {page} twice"):
            edit()
    rows.append([1], [page])


@pytest.mark.parametrize("most", [3, 5])
def test_pages_that_just_fit_go_at_once(most: int) -> None:
    """All of them, or those of the first row: no run is empty, and nothing is left to send that is not."""
    rows = PageRows(LIMITS, CACHE)
    rows.enter("a", [1, 2, 3])
    rows.enter("b", [4, 5])
    runs = rows.take_unsent(most)
    assert runs is not None
    assert runs.pages.tolist() == [1, 2, 3, 4, 5][:most]
    assert runs.starts.tolist() == [0, 3, 5][: len(runs.rows) + 1]
    assert len(runs.rows) == (1 if most == 3 else 2)
    assert rows.has_unsent == (most < 5)


def test_what_the_device_sees_in_place_is_neither_sent_nor_moved_later() -> None:
    rows = PageRows(LIMITS, CACHE)
    rows.enter("a", [1, 2, 3])
    rows.enter("b", [4, 5])
    rows.swap_rows(0, 1)
    rows.mark_sent()
    assert not rows.has_unsent
    assert rows.take_unsent(99) is None
    assert rows.take_moves() is None


def test_the_last_pages_of_a_pool_are_each_rows_own() -> None:
    """Of a pool whose pages do not fill whole bytes: neither a row beside nor one that left is seen in them."""
    rows = PageRows(LIMITS, KVCacheSpec(13, 4))
    for row in range(LIMITS.max_num_requests):
        rows.enter(f"r{row}", [12, 4])
    with pytest.raises(ValueError, match="'r6' would have page 12 twice"):
        rows.append([6], [12])
    rows.leave("r6")
    rows.enter("r7", [12, 4])

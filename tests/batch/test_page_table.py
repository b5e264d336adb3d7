"""The page-table compiler against an obvious loop, and the numbers worked by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from attn_backends.batch.page_table import CompiledPageTable, common_prefix_len, compile_page_table, token_positions
from attn_backends.testing.cases.cases import CsrCase, load_cases


@dataclass(frozen=True)
class Case:
    page_size: int
    pages: list[list[int]]  # lookahead included
    seq_lens: list[int]
    new_kv_lens: list[int]
    padded_rows: int
    padded_tokens: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Rows with any part of their keys new (prefix hits, chunks, decodes, none), lookahead pages, padding."""
    page_size = draw(st.integers(1, 9))
    seq_lens = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    new_kv_lens = [draw(st.integers(0, seq_len)) for seq_len in seq_lens]
    counts = [-(-seq_len // page_size) + draw(st.integers(0, 3)) for seq_len in seq_lens]
    shuffled = draw(st.permutations(range(sum(counts) + 3)))
    starts = np.cumsum([0, *counts])
    pages = [list(shuffled[start : start + count]) for start, count in zip(starts, counts, strict=False)]
    return Case(page_size, pages, seq_lens, new_kv_lens, draw(st.integers(0, 3)), draw(st.integers(0, 5)))


def compiled(case: Case) -> CompiledPageTable:
    return compile_page_table(
        [np.array(row, np.int32) for row in case.pages],
        np.array(case.seq_lens, np.int32),
        np.array(case.new_kv_lens, np.int32),
        case.page_size,
        case.padded_rows,
        case.padded_tokens,
    )


def slots_by_loop(case: Case) -> list[int]:
    slots = []
    for pages, seq_len, new in zip(case.pages, case.seq_lens, case.new_kv_lens, strict=True):
        for position in range(seq_len - new, seq_len):
            slots.append(pages[position // case.page_size] * case.page_size + position % case.page_size)
    return slots + [-1] * case.padded_tokens


@given(cases())
@settings(deadline=None)
def test_slots_are_those_of_a_loop(case: Case) -> None:
    slots = compiled(case).slot_mapping
    assert slots.dtype == np.int64
    assert slots.tolist() == slots_by_loop(case)
    live = slots[slots >= 0]
    assert len(set(live.tolist())) == len(live)


@given(cases())
@settings(deadline=None)
def test_csr_and_dense_table_hold_the_pages_of_a_loop(case: Case) -> None:
    table = compiled(case)
    num_rows = len(case.pages) + case.padded_rows
    assert table.page_table.shape[0] == num_rows == len(table.paged_kv_last_page_len) == len(table.paged_kv_indptr) - 1
    assert {a.dtype for a in (table.page_table, table.paged_kv_indptr, table.paged_kv_indices)} == {np.dtype(np.int32)}
    for row in range(num_rows):
        seq_len = case.seq_lens[row] if row < len(case.pages) else 0
        used = case.pages[row][: -(-seq_len // case.page_size)] if seq_len else []
        csr = table.paged_kv_indices[table.paged_kv_indptr[row] : table.paged_kv_indptr[row + 1]]
        assert csr.tolist() == used
        assert table.page_table[row].tolist() == used + [0] * (table.page_table.shape[1] - len(used))
        keys = max(0, len(used) - 1) * case.page_size + table.paged_kv_last_page_len[row]
        assert keys == seq_len
    assert table.paged_kv_indptr[-1] == len(table.paged_kv_indices)


@pytest.mark.parametrize("case", load_cases().csr, ids=str)
def test_worked_numbers(case: CsrCase) -> None:
    lists = case.page_lists or tuple(tuple(range(10 * i, 10 * i + 9)) for i in range(len(case.seq_lens)))
    lens = np.array(case.seq_lens, np.int32)
    table = compile_page_table([np.array(row, np.int32) for row in lists], lens, lens * 0, case.page_size)
    assert table.paged_kv_indptr.tolist() == list(case.indptr)
    assert table.paged_kv_last_page_len.tolist() == list(case.last_page_len)
    if case.indices is not None:
        assert table.paged_kv_indices.tolist() == list(case.indices)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=6))
@settings(deadline=None)
def test_token_positions(rows: list[tuple[int, int]]) -> None:
    starts, counts = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    got_rows, positions = token_positions(starts, counts)
    expected = [(i, start + k) for i, (start, count) in enumerate(rows) for k in range(count)]
    assert list(zip(got_rows.tolist(), positions.tolist(), strict=True)) == expected


def test_inputs_are_not_changed_or_aliased() -> None:
    pages = [np.array([4, 2, 9], np.int32)]
    table = compile_page_table(pages, np.array([9], np.int32), np.array([1], np.int32), 4)
    table.page_table[:] = -7
    table.paged_kv_indices[:] = -7
    assert pages[0].tolist() == [4, 2, 9]


def test_a_row_without_enough_pages_is_an_error() -> None:
    pages = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    with pytest.raises(ValueError, match=r"row 1 has 1 pages of 4 slots for 5 keys; it needs 2"):
        compile_page_table(pages, np.array([8, 5], np.int32), np.array([1, 1], np.int32), 4)


def test_slots_beyond_two_to_the_31_do_not_wrap() -> None:
    table = compile_page_table(
        [np.array([2**30], np.int32)], np.array([3], np.int32), np.array([3], np.int32), page_size=16
    )
    assert table.slot_mapping.tolist() == [2**34, 2**34 + 1, 2**34 + 2]


@st.composite
def shared_prefixes(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Rows that take pages of few numbers, so that many share some, and contexts that their pages can hold."""
    page_size = draw(st.integers(1, 4))
    prefix = draw(st.lists(st.integers(0, 2), max_size=4))
    tails = draw(st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=1, max_size=5))
    pages = [prefix + tail for tail in tails]
    return pages, [draw(st.integers(0, len(row) * page_size)) for row in pages], page_size


@given(shared_prefixes(), st.sampled_from([list, tuple, np.array]))
@settings(deadline=None)
def test_common_prefix_is_that_of_a_loop(case: tuple[list[list[int]], list[int], int], kind: type) -> None:
    pages, context_lens, page_size = case
    shared = 0
    while all(context_len >= (shared + 1) * page_size for context_len in context_lens) and (
        len({row[shared] for row in pages}) == 1
    ):
        shared += 1
    got = common_prefix_len([kind(row) for row in pages], kind(context_lens), page_size)
    assert got == shared * page_size
    assert type(got) is int


def test_common_prefix_of_many_rows() -> None:
    """256 rows of 1024 pages that part at page 900, one of them at 700."""
    rows = [np.concatenate([np.arange(900), 1000 + 200 * i + np.arange(124)]).astype(np.int32) for i in range(256)]
    assert common_prefix_len(rows, np.full(256, 16 * 1024 - 1), 16) == 900 * 16
    rows[200][700] = 5
    assert common_prefix_len(rows, np.full(256, 16 * 1024 - 1), 16) == 700 * 16
    assert common_prefix_len(rows, [16 * 1024] * 255 + [1000], 16) == 992


def test_common_prefix_errors() -> None:
    with pytest.raises(ValueError, match="row 1 has 1 pages of 4 slots for a context of 5"):
        common_prefix_len([[0, 1], [0]], [5, 5], 4)
    for pages, lens in (([[0]], [1, 1]), ([], [])):
        with pytest.raises(ValueError, match=f"{len(pages)} page lists for {len(lens)} context lengths"):
            common_prefix_len(pages, lens, 4)

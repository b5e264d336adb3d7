"""The page-table compiler against an obvious loop, and the numbers worked by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from attn_backends.page_table import CompiledPageTable, compile_page_table, token_positions
from attn_backends.testing.cases import CsrCase, load_cases


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

"""The edge between decodes and prefills, and the swaps that make one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.batch.order import reorder_batch_to_split_decodes_and_prefills, split_decodes_and_prefills
from attn_backends.testing.cases.cases import SplitCase, load_cases

LENS = st.lists(st.integers(1, 6), min_size=1, max_size=10)
THRESHOLDS = st.integers(1, 5)


def batch_of(
    query_lens: list[int] | tuple[int, ...], num_padded: int = 0, padded_len: int = 1
) -> CommonAttentionMetadata:
    groups = [SequenceGroup(f"r{i}", (SequenceData(3, n, [i]),)) for i, n in enumerate(query_lens)]
    return CommonAttentionMetadata.from_sequence_groups(groups, 16, "cpu", num_padded, padded_len)


class Rows:
    """Rows by name, with their lengths, that count how often they are swapped."""

    def __init__(self, lens: list[int]) -> None:
        self.names, self.lens, self.swaps = list(range(len(lens))), np.array(lens), 0

    def swap_rows(self, first: int, second: int) -> None:
        assert first != second
        self.swaps += 1
        for values in (self.names, self.lens):
            values[first], values[second] = values[second], values[first]


@pytest.mark.parametrize("case", load_cases().split_decodes_and_prefills, ids=str)
def test_worked_numbers(case: SplitCase) -> None:
    assert split_decodes_and_prefills(batch_of(case.query_lens), case.decode_threshold) == case.expect


@given(LENS, THRESHOLDS, st.integers(0, 2))
@settings(deadline=None)
def test_split_of_a_reordered_batch(lens: list[int], threshold: int, num_padded: int) -> None:
    """Reorder, compile, split: the counts of the loop over rows, whatever the order was."""
    rows = Rows(lens)
    reorder_batch_to_split_decodes_and_prefills(rows, lens, threshold)
    decodes, prefills = ([n for n in lens if (n <= threshold) is is_decode] for is_decode in (True, False))
    padding = 0 if prefills else num_padded  # of one token each
    expected = (len(decodes) + padding, len(prefills), sum(decodes) + padding, sum(prefills))
    split = split_decodes_and_prefills(batch_of(rows.lens.tolist(), num_padded), threshold)
    assert split == expected
    assert split._fields == ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens")


def test_padding_behind_decodes() -> None:
    """Counted where it is short enough to be decodes too; a graph of 4 rows has 4 decodes, however many are live."""
    assert split_decodes_and_prefills(batch_of([1, 1], 2)) == (4, 0, 4, 0)
    assert split_decodes_and_prefills(batch_of([2, 2], 2, padded_len=2), 2) == (4, 0, 8, 0)
    assert split_decodes_and_prefills(batch_of([1, 1], 2, padded_len=3)) == (2, 0, 2, 0)
    assert split_decodes_and_prefills(batch_of([1, 5], 2)) == (1, 1, 1, 5)


@given(LENS, THRESHOLDS)
@settings(deadline=None)
def test_reorder(lens: list[int], threshold: int) -> None:
    rows = Rows(lens)
    changed = reorder_batch_to_split_decodes_and_prefills(rows, rows.lens, threshold)  # its own array, live
    is_decode = [n <= threshold for n in lens]
    edge = sum(is_decode)
    assert sorted(rows.names) == list(range(len(lens)))
    assert rows.lens.tolist() == [lens[name] for name in rows.names]
    assert all(is_decode[name] for name in rows.names[:edge])
    assert not any(is_decode[name] for name in rows.names[edge:])

    crossing = [name for name in range(len(lens)) if is_decode[name] != (name < edge)]
    assert changed == bool(crossing)
    assert rows.swaps == len(crossing) / 2, "each swap can bring two rows to their side, and no more"
    assert all(rows.names[name] == name for name in range(len(lens)) if name not in crossing)
    for side in (rows.names[:edge], rows.names[edge:]):
        moved = [name for name in side if name in crossing]
        assert moved == sorted(moved), "those that cross keep their order"
    assert not reorder_batch_to_split_decodes_and_prefills(rows, rows.lens, threshold), "once is enough"


def test_errors_name_the_row() -> None:
    with pytest.raises(ValueError, match=r"row 3 is a decode \(1 query tokens.*behind row 1, a prefill of 5: order"):
        split_decodes_and_prefills(batch_of([1, 5, 5, 1]))
    with pytest.raises(ValueError, match="row 1 has 0 query tokens"):
        reorder_batch_to_split_decodes_and_prefills(Rows([1, 0]), [1, 0])
    with pytest.raises(ValueError, match="decode_threshold is 0"):
        split_decodes_and_prefills(batch_of([1]), 0)
    with pytest.raises(ValueError, match="decode_threshold is 0"):
        reorder_batch_to_split_decodes_and_prefills(Rows([1]), [1], 0)

"""`CommonAttentionMetadata.from_sequence_groups` against an obvious loop over sequences, and its errors."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup

from_groups = CommonAttentionMetadata.from_sequence_groups


@st.composite
def sequences(draw: st.DrawFn, page_size: int, first_page: int, cross: bool) -> SequenceData:
    """A decode, a chunk, a whole prompt or a prefix hit; lookahead pages may follow."""
    context_len, query_len = draw(st.integers(0, 30)), draw(st.integers(1, 12))
    seq_len = draw(st.integers(0, 20)) if cross else context_len + query_len
    count = -(-seq_len // page_size) + draw(st.integers(0, 2))
    pages = [first_page + i for i in draw(st.permutations(range(count)))]
    kind = draw(st.sampled_from([list, tuple, np.array]))
    if not cross:
        return SequenceData(context_len, query_len, kind(pages))
    return SequenceData(
        context_len, query_len, kind(pages), seq_len=seq_len, new_kv_len=draw(st.sampled_from([0, seq_len]))
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[SequenceGroup]]:
    page_size, cross = draw(st.integers(1, 8)), draw(st.booleans())
    groups = [
        SequenceGroup(
            f"r{i}",
            tuple(draw(sequences(page_size, 100 * (3 * i + j), cross)) for j in range(draw(st.integers(1, 3)))),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    return page_size, groups


@given(batches(), st.integers(0, 3), st.integers(1, 2))
@settings(deadline=None)
def test_lengths_and_counts(batch: tuple[int, list[SequenceGroup]], padded: int, padded_query_len: int) -> None:
    page_size, groups = batch
    rows = [seq for group in groups for seq in group.sequences]
    common = from_groups(groups, page_size, "cpu", padded, padded_query_len)
    query_lens = [seq.query_len for seq in rows] + [padded_query_len] * padded
    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    assert common.query_start_loc_cpu.tolist() == common.query_start_loc.tolist() == starts
    assert common.query_lens_cpu.tolist() == query_lens
    seq_lens = [seq.seq_len for seq in rows] + [0] * padded
    assert common.seq_lens_cpu.tolist() == common.seq_lens.tolist() == seq_lens
    assert common.context_lens_cpu.tolist() == [seq.context_len for seq in rows] + [0] * padded
    assert (common.num_reqs, common.num_actual_reqs) == (len(rows) + padded, len(rows))
    assert (common.num_tokens, common.num_actual_tokens) == (starts[-1], starts[len(rows)])
    assert max(seq.query_len for seq in rows) <= common.max_query_len <= max(query_lens)
    assert common.max_seq_len == max(seq_lens)
    new = [seq.new_kv_len for seq in rows] + [0] * padded
    assert common.num_new_kv == sum(new)
    assert common.new_kv_start_loc_cpu.tolist() == [sum(new[:i]) for i in range(len(new) + 1)]
    assert not common.is_profile_run


@given(batches(), st.integers(0, 3))
@settings(deadline=None)
def test_pages_and_slots(batch: tuple[int, list[SequenceGroup]], padded: int) -> None:
    page_size, groups = batch
    rows = [seq for group in groups for seq in group.sequences]
    common = from_groups(groups, page_size, "cpu", padded)
    slots = [
        int(seq.pages[p // page_size]) * page_size + p % page_size
        for seq in rows
        for p in range(seq.seq_len - seq.new_kv_len, seq.seq_len)
    ]
    assert common.slot_mapping.dtype == torch.int64
    assert common.slot_mapping.tolist() == slots + [-1] * padded
    for i in range(common.num_reqs):
        seq_len = rows[i].seq_len if i < len(rows) else 0
        used = [int(page) for page in rows[i].pages[: -(-seq_len // page_size)]] if seq_len else []
        start, stop = common.paged_kv_indptr_cpu[i : i + 2].tolist()
        assert common.paged_kv_indices[start:stop].tolist() == used
        assert common.page_table[i, : len(used)].tolist() == used
        keys = max(0, len(used) - 1) * page_size + int(common.paged_kv_last_page_len_cpu[i])
        assert keys == seq_len
    assert common.paged_kv_indptr.tolist() == common.paged_kv_indptr_cpu.tolist()
    assert common.paged_kv_last_page_len.tolist() == common.paged_kv_last_page_len_cpu.tolist()
    ints = ("query_start_loc", "seq_lens", "page_table", "paged_kv_indptr", "paged_kv_indices", "context_lens_cpu")
    assert {getattr(common, name).dtype for name in ints} == {torch.int32}


def test_a_profile_run_has_no_pages() -> None:
    groups = [SequenceGroup("a", (SequenceData(0, 5, None),)), SequenceGroup("b", (SequenceData(0, 3, None),))]
    common = from_groups(groups, 16, num_padded_reqs=1)
    assert common.is_profile_run
    assert common.query_start_loc.tolist() == [0, 5, 8, 9]
    assert common.seq_lens.tolist() == [5, 3, 0]
    assert common.num_new_kv == 8
    assert common.page_table.shape == (3, 0)
    assert common.slot_mapping.shape == common.paged_kv_indices.shape == (0,)
    assert common.slot_mapping.dtype == torch.int64


def test_cross_attention_writes_at_the_first_step_only() -> None:
    first = SequenceData(0, 2, [7, 8], seq_len=5, new_kv_len=5)
    later = SequenceData(2, 1, [3], seq_len=4, new_kv_len=0)
    common = from_groups([SequenceGroup("a", (first,)), SequenceGroup("b", (later,))], 4)
    assert common.slot_mapping.tolist() == [28, 29, 30, 31, 32]
    assert common.new_kv_start_loc_cpu.tolist() == [0, 5, 5]
    assert common.query_start_loc.tolist() == [0, 2, 3]
    assert common.seq_lens.tolist() == [5, 4]


def test_it_is_frozen_and_leaves_page_lists_alone() -> None:
    pages = np.array([3, 1], np.int32)
    common = from_groups([SequenceGroup("a", (SequenceData(4, 1, pages),))], 4)
    with pytest.raises(FrozenInstanceError):
        common.num_reqs = 2  # type: ignore[misc]
    common.page_table.zero_()
    assert pages.tolist() == [3, 1]


def test_errors_name_the_request() -> None:
    with pytest.raises(ValueError, match="the batch is empty"):
        from_groups([], 16)
    with pytest.raises(ValueError, match=r"request 'b' has 1 pages of 4 slots, which hold 4 keys, but its length is 5"):
        from_groups([SequenceGroup("b", (SequenceData(4, 1, [9]),))], 4)
    last = [SequenceGroup("a", (SequenceData(0, 1, [0]),)), SequenceGroup("b", (SequenceData(4, 1, [2, 9]),))]
    assert from_groups(last, 4, num_pages=10).page_table.tolist() == [[0, 0], [2, 9]]
    with pytest.raises(ValueError, match="request 'b' has page 9, and the pool pages 0 to 8"):
        from_groups(last, 4, num_pages=9)
    for pages in ([1.7], [0, 1.0], np.array([1.7], np.float32), ["a"], [True]):
        with pytest.raises(ValueError, match=r"request 'c' has page ids in .*: pass integers"):
            from_groups([SequenceGroup("c", (SequenceData(0, 1, pages),))], 4)  # type: ignore[arg-type]
    for far in (-1, 2**31, 2**40):
        for pages in ([far], np.array([far])):
            with pytest.raises(ValueError, match=f"page id {far} in the page lists: ids count from 0, to 2147483647"):
                from_groups([SequenceGroup("c", (SequenceData(0, 1, pages),))], 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="page_size is 0; it must be at least 1, as the pool's is"):
        from_groups(last, 0)
    mixed = [SequenceGroup("a", (SequenceData(0, 1, None),)), SequenceGroup("b", (SequenceData(0, 1, [0]),))]
    with pytest.raises(ValueError, match=r"requests \['a'\] have no pages while others have"):
        from_groups(mixed, 4)


@pytest.mark.parametrize(
    ("context_len", "query_len", "lens"), [(-1, 1, {}), (0, 0, {}), (0, 1, {"seq_len": 3, "new_kv_len": 4})]
)
def test_impossible_lengths(context_len: int, query_len: int, lens: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="need context_len >= 0, query_len >= 1"):
        SequenceData(context_len, query_len, [0], **lens)

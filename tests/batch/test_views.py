"""Slices and padding of a batch equal the same rows compiled anew, in every field, and read nothing of the device."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.batch.views import pad_rows, slice_rows, unpad_rows
from tests.helpers.same_batch import Rows, assert_same_batch, rows


@given(rows(), st.integers(0, 3), st.data())
@settings(deadline=None)
def test_a_slice_is_those_rows_compiled(batch: Rows, num_padded: int, data: st.DataObject) -> None:
    actual = len(batch.sequences)
    start = data.draw(st.integers(0, actual - 1))
    stop = data.draw(st.integers(start + 1, actual + num_padded))
    common = batch.compiled(0, actual, num_padded)
    expected = batch.compiled(start, min(stop, actual), max(0, stop - actual))
    got = slice_rows(common, start, stop)
    assert_same_batch(got, expected)
    width = expected.page_table.shape[1]
    assert got.page_table[:, :width].tolist() == expected.page_table.tolist()
    assert not got.page_table[:, width:].any()


@given(rows(), st.integers(0, 3), st.integers(0, 3))
@settings(deadline=None)
def test_padding_is_padding_compiled(batch: Rows, before: int, more: int) -> None:
    actual = len(batch.sequences)
    common = batch.compiled(0, actual, before)
    padded = pad_rows(common, actual + before + more, batch.padded_query_len)
    expected = batch.compiled(0, actual, before + more)
    assert_same_batch(padded, expected)
    assert padded.page_table.tolist() == expected.page_table.tolist()
    if not more:
        assert padded is common


@given(rows(), st.integers(0, 3))
@settings(deadline=None)
def test_unpadding_undoes_it(batch: Rows, num_padded: int) -> None:
    actual = len(batch.sequences)
    common = batch.compiled(0, actual, 0)
    assert_same_batch(unpad_rows(pad_rows(common, actual + num_padded, batch.padded_query_len)), common)
    assert_same_batch(unpad_rows(batch.compiled(0, actual, num_padded)), common)
    assert unpad_rows(common) is common


@given(rows(), st.data())
@settings(deadline=None)
def test_slices_put_together_are_the_batch(batch: Rows, data: st.DataObject) -> None:
    """Every token, slot, new key and page is in one of two parts, in order."""
    common = batch.compiled(0, len(batch.sequences), 2)
    edge = data.draw(st.integers(1, common.num_reqs - 1))
    parts = [slice_rows(common, 0, edge), slice_rows(common, edge, common.num_reqs)]
    for name in ("seq_lens", "context_lens_cpu", "page_table", "slot_mapping", "paged_kv_indices"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(common, name)), name
    for name in ("num_reqs", "num_actual_reqs", "num_tokens", "num_actual_tokens", "num_new_kv"):
        assert sum(getattr(part, name) for part in parts) == getattr(common, name), name


def test_a_slice_of_padding_alone() -> None:
    common = Rows((SequenceData(4, 2, [7, 8]),), 4, padded_query_len=3).compiled(0, 1, 3)
    part = slice_rows(common, 2, 4)
    assert (part.num_reqs, part.num_actual_reqs, part.num_tokens, part.num_actual_tokens) == (2, 0, 6, 0)
    assert part.slot_mapping.tolist() == [-1] * 6
    assert part.query_start_loc.tolist() == [0, 3, 6]
    assert part.seq_lens.tolist() == part.paged_kv_last_page_len.tolist() == [0, 0]
    assert part.paged_kv_indptr.tolist() == [0, 0, 0]
    assert (part.num_new_kv, part.max_seq_len, part.max_query_len) == (0, 0, 3)


def test_device_tensors_come_from_the_device() -> None:
    """Where lengths on the host are upper bounds, those on the device are the real ones and stay so."""
    batch = Rows((SequenceData(4, 1, [7, 8]), SequenceData(9, 1, [1, 2, 3])), 4, seq_lens_are_upper_bounds=True)
    real = torch.tensor([3, 6], dtype=torch.int32)
    common = replace(batch.compiled(0, 2, 0), seq_lens=real, csr=None)
    part, padded = slice_rows(common, 1, 2), pad_rows(common, 3)
    assert (part.seq_lens.tolist(), part.seq_lens_cpu.tolist(), part.max_seq_len) == ([6], [10], 10)
    assert (padded.seq_lens.tolist(), padded.seq_lens_cpu.tolist()) == ([3, 6, 0], [5, 10, 0])
    assert part.paged_kv_indptr.tolist() == [0, 2]
    assert part.paged_kv_indices.tolist() == [1, 2, 0]
    assert part.paged_kv_indptr_cpu.tolist() == [0, 3]


def test_nothing_is_read_of_the_device() -> None:
    """A meta tensor has no values to read. Views share memory with the batch."""
    batch = Rows((SequenceData(4, 1, [7, 8]), SequenceData(9, 3, [1, 2, 3])), 4)
    common = batch.compiled(0, 2, 1, device="meta")
    for made in (slice_rows(common, 1, 3), pad_rows(common, 5, 2), unpad_rows(common)):
        on_device = [field.name for field in fields(made) if _is_device_tensor(common, field.name)]
        assert on_device == ["query_start_loc", "seq_lens", "page_table", "slot_mapping"]
        assert {getattr(made, name).device.type for name in on_device} == {"meta"}
        assert made.paged_kv_indices.shape == (int(made.paged_kv_indptr_cpu[-1]),)
    here = batch.compiled(0, 2, 0)
    part = slice_rows(here, 1, 2)
    for name in ("seq_lens", "page_table", "slot_mapping"):
        assert getattr(part, name).untyped_storage().data_ptr() == getattr(here, name).untyped_storage().data_ptr()


def test_host_tensors_are_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        common = CommonAttentionMetadata.from_sequence_groups([SequenceGroup("a", (SequenceData(3, 2, [0, 1]),))], 4)
        for made in (common, pad_rows(common, 3, 2), slice_rows(pad_rows(common, 3, 2), 0, 1)):
            tensors = {name: tensor for name, tensor in vars(made).items() if isinstance(tensor, torch.Tensor)}
            assert {name: tensor.device.type for name, tensor in tensors.items()} == dict.fromkeys(tensors, "cpu")
            assert made.context_lens_cpu.tolist()[:1] == [3]


def _is_device_tensor(common: CommonAttentionMetadata, name: str) -> bool:
    value = getattr(common, name)
    return isinstance(value, torch.Tensor) and not name.endswith("_cpu")


def test_profile_run_has_no_pages_in_any_form() -> None:
    common = Rows((SequenceData(0, 5, None), SequenceData(0, 3, None)), 4).compiled(0, 2, 0)
    for made in (slice_rows(common, 1, 2), pad_rows(common, 4)):
        assert made.is_profile_run
        assert made.slot_mapping.shape == made.paged_kv_indices.shape == (0,)
        assert made.paged_kv_indptr.tolist() == [0] * (made.num_reqs + 1)


def test_errors() -> None:
    common = CommonAttentionMetadata.from_sequence_groups([SequenceGroup("a", (SequenceData(0, 1, [0]),))], 4)
    for start, stop in ((0, 0), (-1, 1), (0, 2), (1, 1)):
        with pytest.raises(ValueError, match=f"rows {start} to {stop} of a batch of 1: need 0 <= start < stop <= 1"):
            slice_rows(common, start, stop)
    for num_reqs, query_len in ((0, 1), (2, 0)):
        with pytest.raises(ValueError, match=f"pad to {num_reqs} rows with rows of {query_len} tokens"):
            pad_rows(common, num_reqs, query_len)

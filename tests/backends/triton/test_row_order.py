"""Rows that TRITON decodes stand in front, on Hopper too, where rows of more tokens are prefilled: the order that
builders ask engines for is that of the kernels. Nothing is launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.interface import AttentionMetadataBuilder
from attn_backends.registry import get_backend
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, plan_groups

rules = pytest.importorskip("attn_backends.backends.triton.rules", reason="needs triton")

PAIR = "PREFILL=TORCH,DECODE=TRITON"
DECODED = {1: 16, 5: 3, 8: 2, 16: 1, 48: 1}  # tokens of a row on Hopper, by the queries of a KV head


@pytest.fixture(params=[True, False], ids=["hopper", "elsewhere"])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernels for Hopper are taken to serve, however few keys rows see."""
    monkeypatch.setattr(rules, "suits_hopper_kernel", lambda *given: request.param)
    monkeypatch.setattr("attn_backends.backends.triton.metadata.short_tile", lambda *_: None)
    return bool(request.param)


def builder_of(group_size: int, name: str = "TRITON", **options: Any) -> AttentionMetadataBuilder[Any]:
    spec = AttentionSpec(group_size, 1, 64, dtype=torch.bfloat16)
    (group,) = plan_groups({0: spec})
    return get_backend(name).get_builder_cls()(group, KVCacheSpec(64, 16), Limits(16, 512, 256), "cpu", **options)


def ordered(builder: AttentionMetadataBuilder[Any], lens: list[int]) -> list[int]:
    rows = list(lens)

    def swap_rows(first: int, second: int) -> None:
        rows[first], rows[second] = rows[second], rows[first]

    builder.reorder_batch(SimpleNamespace(swap_rows=swap_rows), list(lens))
    return rows


def built(builder: AttentionMetadataBuilder[Any], lens: list[int]) -> Any:
    groups = [SequenceGroup(f"r{i}", (SequenceData(9, length, range(16)),)) for i, length in enumerate(lens)]
    return builder.build(0, CommonAttentionMetadata.from_sequence_groups(groups, 16, "cpu"))


@pytest.mark.parametrize("name", ["TRITON", PAIR])
def test_a_row_that_is_prefilled_has_no_decodes_behind_it(hopper: bool, name: str) -> None:
    builder = builder_of(8, name)
    lens = ordered(builder, [9, 1, 2, 1, 40])
    assert lens == ([1, 1, 2, 9, 40] if hopper else [9, 1, 2, 1, 40])
    metadata = built(builder, lens)
    decoded = metadata.decode if name == PAIR else metadata
    assert metadata.num_decodes == decoded.num_decode_rows == (3 if hopper else 4)
    assert metadata.num_decode_tokens == decoded.num_decode_row_tokens == (4 if hopper else 13)


@pytest.mark.parametrize("group_size", DECODED)
def test_all_rows_that_can_be_decoded_are(hopper: bool, group_size: int) -> None:
    builder, most = builder_of(group_size), DECODED[group_size] if hopper else 16
    assert builder.decode_threshold == most

    @given(st.lists(st.integers(1, 20), min_size=1, max_size=10))
    @settings(deadline=None, max_examples=60)
    def check(lens: list[int]) -> None:
        metadata, short = built(builder, ordered(builder, lens)), [n for n in lens if n <= most]
        assert metadata.num_decodes == metadata.num_decode_rows == len(short)
        assert metadata.num_decode_tokens == metadata.num_decode_row_tokens == sum(short)

    check()


def test_rows_beside_longer_padding_are_decoded(hopper: bool) -> None:
    """The longest row is then one of padding, and none of the others is prefilled for it."""
    rows = [SequenceGroup(f"r{i}", (SequenceData(9, length, range(16)),)) for i, length in enumerate((1, 2))]
    common = CommonAttentionMetadata.from_sequence_groups(rows, 16, "cpu", 2, padded_query_len=17)
    metadata = builder_of(8).build(0, common)
    assert metadata.num_decodes == metadata.num_decode_rows == metadata.max_decode_len == 2
    assert metadata.num_decode_tokens == metadata.num_decode_row_tokens == 3
    assert metadata.num_rows == 4


def test_a_tile_that_is_asked_for_serves_rows_of_16_tokens(hopper: bool) -> None:
    """The portable kernel then prefills, which is no faster."""
    from attn_backends.backends.triton.tuning import TritonOptions

    options = TritonOptions(prefill_tile={"rows": 32, "keys": 32, "warps": 4, "stages": 2})
    assert builder_of(8, options=options).decode_threshold == 16


@pytest.mark.parametrize("query_len", [1, 2, 3, 16])
def test_graphs_take_rows_of_16_tokens_however_they_are_served(hopper: bool, query_len: int) -> None:
    builder = builder_of(8)
    groups = [SequenceGroup(f"r{i}", (SequenceData(9, query_len, range(16)),)) for i in range(3)]
    common = CommonAttentionMetadata.from_sequence_groups(groups, 16, "cpu")
    assert builder.can_run_in_cudagraph(common)
    metadata = builder.build_for_cudagraph_capture(common)
    assert metadata.num_decodes == 3
    assert metadata.num_decode_rows == (0 if hopper and query_len > 2 else 3)

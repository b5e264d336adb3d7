"""The family's builder: which rows decode, how context is cut, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from attn_backends.backends.mla.metadata import MLAMetadataBuilder, RaggedRows, cut_contexts
from attn_backends.backends.mla.options import MLAOptions
from attn_backends.backends.mla.torch_mla.backend import TorchMLABackend
from attn_backends.backends.mla.torch_mla.impl import TorchMLAImpl
from attn_backends.backends.mla.torch_mla.options import TorchMLAOptions
from attn_backends.backends.mla.torch_mla.state import TorchMLAState
from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.kernels.merge_state import merge
from attn_backends.spec import KVCacheSpec, Limits, MLASpec, plan_groups
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, make_layer

CACHE, LIMITS = KVCacheSpec(64, 4), Limits(8, 256, 128)
SPEC = MLASpec(2, head_dim=12, head_dim_vo=8, kv_lora_rank=8, qk_rope_head_dim=4)


def builder(tokens: int = 8) -> MLAMetadataBuilder:
    (group,) = plan_groups({0: SPEC})
    return MLAMetadataBuilder(group, CACHE, LIMITS, "cpu", options=MLAOptions(context_workspace_tokens=tokens))


def batch(*rows: tuple[int, int]) -> CommonAttentionMetadata:
    """Rows of (context, query) lengths, row i in pages 8 i and on."""
    groups = [
        SequenceGroup(str(i), (SequenceData(context, query, range(8 * i, 8 * i + 8)),))
        for i, (context, query) in enumerate(rows)
    ]
    return CommonAttentionMetadata.from_sequence_groups(groups, CACHE.page_size)


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 50))
def test_contexts_are_cut_whole_and_in_bounds(context_lens: list[int], limit: int) -> None:
    chunks = cut_contexts(context_lens, limit)
    for chunk in chunks:
        assert 0 < sum(piece.stop - piece.first for piece in chunk) <= limit
        assert all(piece.stop > piece.first for piece in chunk)
        assert [piece.row for piece in chunk] == list(range(chunk[0].row, chunk[0].row + len(chunk)))
    covered = [(piece.row, key) for chunk in chunks for piece in chunk for key in range(piece.first, piece.stop)]
    assert covered == [(row, key) for row, length in enumerate(context_lens) for key in range(length)]
    if all(context_lens):
        assert len(chunks) == -(-sum(context_lens) // limit)


@pytest.mark.parametrize(
    ("query_lens", "num_decodes"),
    [((1, 1, 1), 3), ((3, 3), 2), ((8, 8), 2), ((9, 9), 0), ((1, 1, 2), 2), ((2, 1, 1), 1), ((12, 1), 0)],
)
def test_decodes_are_the_leading_rows_of_one_short_length(query_lens: tuple[int, ...], num_decodes: int) -> None:
    metadata = builder().build(0, batch(*((5, n) for n in query_lens)))
    assert (metadata.num_decodes, metadata.num_prefills) == (num_decodes, len(query_lens) - num_decodes)
    assert (metadata.decode is not None, metadata.prefill is not None) == (num_decodes > 0, metadata.num_prefills > 0)


class Rows:
    def __init__(self, lens: list[int]) -> None:
        self.lens = lens

    def swap_rows(self, first: int, second: int) -> None:
        self.lens[first], self.lens[second] = self.lens[second], self.lens[first]


@pytest.mark.parametrize(
    ("lens", "ordered"), [([9, 3, 1, 3], [3, 3, 1, 9]), ([20, 1, 1], [1, 1, 20]), ([9, 30], [9, 30]), ([2, 2], [2, 2])]
)
def test_reordering_brings_the_commonest_decode_length_to_the_front(lens: list[int], ordered: list[int]) -> None:
    rows, before = Rows(list(lens)), list(lens)
    moved = builder().reorder_batch(rows, list(lens))
    assert (rows.lens, moved) == (ordered, ordered != before)


def test_chunks_name_slots_and_rows() -> None:
    metadata = builder(8).build(0, batch((3, 1), (10, 12), (5, 9)))
    assert metadata.prefill is not None
    first, second = metadata.prefill.chunks
    assert first.slots.tolist() == list(range(32, 40))  # row 1 has pages 8 to 15 of 4 slots
    assert (first.tokens, first.rows.query_starts.tolist(), first.rows.key_starts.tolist()) == (
        slice(0, 12), [0, 12], [0, 8],
    )  # fmt: skip
    assert second.slots.tolist() == [40, 41, 64, 65, 66, 67, 68]
    assert (second.tokens, second.rows.query_starts.tolist(), second.rows.key_starts.tolist()) == (
        slice(0, 21), [0, 12, 21], [0, 2, 7],
    )  # fmt: skip
    assert (second.rows.max_query_len, second.rows.max_key_len, second.rows.causal) == (12, 5, False)


def test_upper_bounds_are_refused_for_prefills_with_context_alone() -> None:
    for rows, refused in ((((5, 1), (9, 1)), False), (((5, 1), (0, 12)), False), (((5, 1), (3, 12)), True)):
        bounds = replace(batch(*rows), seq_lens_are_upper_bounds=True)
        if refused:
            with pytest.raises(ValueError, match="upper bounds"):
                builder().build(0, bounds)
        else:
            builder().build(0, bounds)


def test_graphs_are_of_decodes() -> None:
    long = replace(batch((0, 9), (0, 9)), for_graph=True)
    with pytest.raises(ValueError, match="up to 8 tokens"):
        builder().build(0, long)
    metadata = builder().build(0, replace(batch((4, 2), (0, 2)), for_graph=True))
    assert metadata.for_graph
    assert metadata.decode is not None
    assert metadata.decode.idle is not None
    assert metadata.decode.idle.tolist() == [False] * 4


class PlansByName(TorchMLAState):
    def plan_prefill(self, spec: MLASpec, rows: RaggedRows) -> Any:
        return "plan", rows.key_starts_cpu.tolist()


class ChecksPlans(TorchMLAImpl):
    def _prefill(self, given: Any, rows: RaggedRows, plan: Any) -> None:
        assert plan == ("plan", rows.key_starts_cpu.tolist())
        super()._prefill(given, rows, None)


def test_every_part_of_a_prefill_gets_its_own_plan() -> None:
    parts = {"state_cls": PlansByName, "impl_cls": ChecksPlans}
    backend: Any = type("Planning", (TorchMLABackend,), parts)
    random = random_batch(backend, SPEC, (30, 41), (10, 12), page_size=4)
    layer = make_layer(backend, random, options=TorchMLAOptions(context_workspace_tokens=16))
    step: Any = layer.begin(random)
    assert len(step.prefill_plans) == 5  # the new tokens, and 49 cached ones
    assert_matches(layer.forward(random, step), random)


def test_merge_is_one_softmax() -> None:
    logits, values = torch.randn(3, 2, 20, dtype=torch.float64), torch.randn(20, 5, dtype=torch.float64)
    parts = [(logits[..., keys].softmax(-1) @ values[keys], logits[..., keys].logsumexp(-1))
             for keys in (slice(0, 3), slice(3, 11), slice(11, 20))]  # fmt: skip
    (output, lse), *others = parts
    for more, more_lse in others:
        merge(output, lse, more, more_lse)
    torch.testing.assert_close(output, logits.softmax(-1) @ values)
    torch.testing.assert_close(lse, logits.logsumexp(-1))

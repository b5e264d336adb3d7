"""What TRITON's steps and graphs keep, plan and refuse, on the host alone: nothing is launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.batch.views import without_new_keys
from attn_backends.graphs.inputs import HeldTensors
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, plan_groups

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")
listing = pytest.importorskip("attn_backends.kernels.variants").listing
triton_state = pytest.importorskip("attn_backends.backends.triton.state")
triton_metadata = pytest.importorskip("attn_backends.backends.triton.metadata")

CPU, BF16 = torch.device("cpu"), torch.bfloat16
H200 = launching.Machine(132, 227 << 10, True, True, True)
CACHE, LIMITS = KVCacheSpec(9000, 16), Limits(8, 256, 1024)


@pytest.fixture(autouse=True)
def _on_hopper() -> Iterator[None]:
    with listing(H200):
        yield


def state_of(spec: AttentionSpec, limits: Limits = LIMITS) -> Any:
    return triton_state.TritonState(plan_groups({0: spec}), CACHE, limits, CPU)


def builder_of(spec: AttentionSpec, limits: Limits = LIMITS) -> Any:
    return triton_metadata.TritonMetadataBuilder(plan_groups({0: spec})[0], CACHE, limits, CPU)


def batch_of(query_lens: list[int], context: int = 9) -> CommonAttentionMetadata:
    rows = [SequenceData(context, length, range(-(-(context + length) // 16))) for length in query_lens]
    groups = [SequenceGroup(str(i), (row,)) for i, row in enumerate(rows)]
    return CommonAttentionMetadata.from_sequence_groups(groups, 16, CPU)


def test_what_graphs_write_stays_where_it_was() -> None:
    """A graph that was captured has its addresses, and later ones share it: of more rows too."""
    state = state_of(AttentionSpec(8, 2, 64, dtype=BF16))
    assert state.graph_workspace is None
    state.hold_graph_buffers(2)
    first = state.graph_workspace
    assert first is not state.workspace
    state.hold_graph_buffers(8)
    assert state.graph_workspace is first
    for clone in (state.graph_clone(8, 1), state.graph_clone(2, 16), state.mixed_graph_clone(8, 99)):
        assert clone.steps[0].workspace is first


def test_graphs_of_mixed_batches_have_room_for_prefills_within_any_limits() -> None:
    """Of one token too, which eager steps decode: a list is made with room for what a GPU works on at a time."""
    spec = AttentionSpec(8, 8, 128, dtype=BF16)
    state = state_of(spec, Limits(4, 4, 1024))
    state.hold_graph_buffers(4)
    splits = state.mixed_graph_clone(4, 4).steps[0].splits
    assert splits is not None
    assert splits.max_split_items == 132 // 8


@pytest.mark.parametrize("group_size", [1, 2, 4, 8, 16])
def test_a_list_of_mixed_rows_has_room_for_all_that_are_not_decoded(group_size: int) -> None:
    """There are most of rows of one token more than is decoded, each a tile, with one for tokens behind all rows."""
    spec = AttentionSpec(2 * group_size, 2, 64, dtype=BF16)
    longest = max(1, 16 // group_size) + 1
    for num_rows in (1, 7, 100, 300):
        for num_tokens in (num_rows * longest, num_rows * longest + 9):
            state = state_of(spec, Limits(num_rows, num_tokens, 1024))
            state.hold_graph_buffers(num_rows)
            step = state.mixed_graph_clone(num_rows, num_tokens).steps[0]
            assert step.metadata.max_decode_len == longest - 1
            num_tiles = num_rows * -(-longest // step.splits.tile.tokens) + (num_tokens > num_rows * longest)
            assert len(step.splits.work_items) >= num_tiles + step.splits.max_split_items


@pytest.mark.parametrize(("heads", "tokens", "seq_len"), [((192, 8), 3, 29_918), ((284, 4), 16, 1652)], ids=str)
def test_few_tokens_whose_keys_prefill_splits_have_room(heads: tuple[int, int], tokens: int, seq_len: int) -> None:
    """Within limits of so few tokens that the decode kernel could serve them, where prefill's is the faster one."""
    spec = AttentionSpec(*heads, 256, dtype=BF16)
    limits = Limits(1, tokens, 1 << 17)
    step = state_of(spec, limits).begin_forward(builder_of(spec, limits).build(0, batch_of([tokens], seq_len - tokens)))
    assert step.schedule is None
    assert step.splits is not None


@pytest.mark.parametrize("heads", [(8, 8), (2, 1)], ids=str)
def test_a_token_of_cross_attention_has_room_without_a_cache(heads: tuple[int, int]) -> None:
    """Nothing is decoded then, however few tokens the limits allow, and an encoder's many keys are split."""
    spec = AttentionSpec(*heads, 128, dtype=BF16, causal=False, attention_type=AttentionType.CROSS)
    limits = Limits(1, 1, 1 << 17)
    row = SequenceData(0, 1, None, seq_len=100_000, new_kv_len=100_000)
    common = CommonAttentionMetadata.from_sequence_groups([SequenceGroup("row", (row,))], 16, CPU)
    metadata = builder_of(spec, limits).build(0, replace(common, is_profile_run=True))
    assert state_of(spec, limits).begin_forward(metadata).splits is not None


def tensors(has_starts: bool) -> Any:
    held = HeldTensors.make(8, 256, 64, CPU)
    named = {name: getattr(held, name) for name in ("page_table", "seq_lens", "slot_mapping")}
    return held if has_starts else SimpleNamespace(**named)


@pytest.mark.parametrize(
    ("shares", "has_starts", "expected"),
    [(False, False, [False, False]), (True, False, [True, False]), (True, True, [True, True])],
    ids=["copies", "but query starts", "all"],
)
def test_plans_without_metadata_are_of_an_engines_tensors_alone(
    shares: bool, has_starts: bool, expected: list[bool]
) -> None:
    """Of rows of equal lengths, and of mixed ones, whose query starts a graph may have a copy of: that is of the last
    batch until metadata fills it."""
    spec = AttentionSpec(8, 2, 64, dtype=BF16)
    state = state_of(spec)
    state.hold_graph_buffers(8, tensors(has_starts) if shares else None)
    state.graph_clone(4, 1)
    state.mixed_graph_clone(4, 99)
    assert [steps is not None for steps in (state.replanned(4, 1), state.replanned_mixed(4, 99))] == expected


def test_cross_attention_is_not_planned_without_metadata() -> None:
    """Its lengths are an encoder's, of which an engine's tensors have none."""
    spec = AttentionSpec(8, 2, 64, dtype=BF16, causal=False, attention_type=AttentionType.CROSS)
    state = state_of(spec)
    state.hold_graph_buffers(8, tensors(True))
    state.graph_clone(4, 1)
    assert state.replanned(4, 1) is None


def test_rows_of_a_graph_have_16_tokens_at_most() -> None:
    """By builders and by states; in mixed batches they are of any length."""
    spec = AttentionSpec(8, 2, 64, dtype=BF16)
    state, builder = state_of(spec), builder_of(spec)
    state.hold_graph_buffers(8)
    assert state.graph_clone(2, 16).steps[0].metadata.num_tokens == 32
    with pytest.raises(ValueError, match=r"up to 16 query tokens a row, and 17 were asked for: run longer rows eager"):
        state.graph_clone(2, 17)
    assert builder.build(0, replace(batch_of([16, 16]), for_graph=True)).for_graph
    long = batch_of([17, 17])
    assert not builder.can_run_in_cudagraph(long)
    with pytest.raises(ValueError, match=r"of up to 16 query tokens a row .*: run this batch eager"):
        builder.build(0, replace(long, for_graph=True))
    assert builder.build(0, replace(long, for_graph=True, is_mixed=True)).is_mixed


def test_a_graph_reads_pages() -> None:
    spec = AttentionSpec(8, 2, 64, dtype=BF16)
    state = state_of(spec)
    state.hold_graph_buffers(8)
    clone = state.graph_clone(2, 1)
    metadata = builder_of(spec).build(0, replace(batch_of([1, 1]), for_graph=True))
    with pytest.raises(ValueError, match="this metadata reads no cache: run it eager"):
        clone.begin_forward(replace(metadata, page_table=None))


@pytest.mark.parametrize("query_lens", [[40], [1, 40]], ids=str)
def test_programs_count_their_tiles_from_nothing(query_lens: list[int]) -> None:
    """Whatever a launch that was cut short has left."""
    spec = AttentionSpec(8, 8, 128, dtype=BF16, logits_soft_cap=30.0)
    state = state_of(spec)
    state.workspace.tiles.fill_(7)
    step = state.begin_forward(builder_of(spec).build(0, batch_of(query_lens)))
    assert step.splits is None
    assert step.workspace.tiles.tolist() == [0, 0]


def test_a_view_of_rows_that_prefills_kernel_serves_has_all_of_their_tokens() -> None:
    """Rows of few tokens count as decodes, and go along where rows see few keys."""
    spec = AttentionSpec(8, 2, 128, dtype=BF16)
    metadata = builder_of(spec).build(0, batch_of([1, 3, 40]))
    assert metadata.short_tile is not None
    assert (metadata.num_decodes, metadata.num_decode_rows) == (2, 0)
    view = metadata.decode_metadata
    assert (view.num_rows, view.num_decode_rows, view.num_row_tokens, view.num_decode_row_tokens) == (2, 0, 4, 0)


def test_a_view_of_decodes_has_no_padding() -> None:
    spec = AttentionSpec(8, 2, 128, dtype=BF16)
    common = CommonAttentionMetadata.from_sequence_groups(
        [SequenceGroup("row", (SequenceData(9, 2, range(1)),))], 16, CPU, 3
    )
    metadata = builder_of(spec).build(0, common)
    assert (metadata.num_decode_rows, metadata.num_decode_row_tokens) == (4, 5)
    view = metadata.decode_metadata
    assert (view.num_rows, view.num_decode_rows, view.num_decode_row_tokens) == (1, 1, 2)


def test_keys_that_an_engine_writes_are_read_from_pages() -> None:
    """A prompt brings all of its keys, unless the engine wrote them or some were there before."""
    spec = AttentionSpec(8, 8, 128, dtype=BF16)
    builder, prompt = builder_of(spec), batch_of([200], 0)
    assert builder.build(0, prompt).prefills_are_prompts
    assert not builder.build(0, without_new_keys(prompt)).prefills_are_prompts
    assert not builder.build(0, batch_of([200], 16)).prefills_are_prompts
    over_8_bits = builder_of(replace(spec, cache_dtype=torch.float8_e4m3fn))
    assert not over_8_bits.build(0, prompt).prefills_are_prompts  # which round keys

"""Virtual batches: the worked numbers, the same rows compiled anew, and attention equal to that in chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.batch.common import CommonAttentionMetadata, SequenceData
from attn_backends.batch.local_attention import make_local_attention_virtual_batches
from attn_backends.batch.views import pad_rows
from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.cases import LocalCase, load_cases
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import make_layer
from attn_backends.testing.reference import reference_attention
from tests.helpers.same_batch import Rows, assert_same_batch, rows

SPEC = AttentionSpec(2, 1, 4, dtype=torch.float64)


@pytest.mark.parametrize("case", load_cases().local_attention_virtual_batches, ids=lambda case: f"chunk-{case.chunk}")
def test_worked_numbers(case: LocalCase) -> None:
    """The rows in the note are of a table of 9 columns, row i with pages 9i to 9i + 8, and stop at its edge."""
    worked = json.loads(case.note.split("gives rows ")[1])
    sequences = [
        SequenceData(s - q, q, list(range(9 * i, 9 * i + 9)))
        for i, (s, q) in enumerate(zip(case.seq_lens, case.query_lens, strict=True))
    ]
    common = Rows(tuple(sequences), case.page_size).compiled(0, len(sequences), 0)
    whole = replace(common, page_table=torch.arange(27, dtype=torch.int32).view(3, 9), csr=None)
    virtual = make_local_attention_virtual_batches(whole, case.chunk)
    assert virtual.query_lens_cpu.tolist() == list(case.virtual_query_lens)
    assert virtual.seq_lens_cpu.tolist() == virtual.seq_lens.tolist() == list(case.virtual_seq_lens)
    assert virtual.page_table.tolist() == worked
    pages = [row[: -(-n // case.page_size)] for row, n in zip(worked, case.virtual_seq_lens, strict=True)]
    compiled = make_local_attention_virtual_batches(common, case.chunk)  # a table of each row's own pages alone
    assert compiled.paged_kv_indices.tolist() == virtual.paged_kv_indices.tolist() == [p for row in pages for p in row]


def by_loop(batch: Rows, chunk_size: int) -> tuple[SequenceData, ...]:
    """Every run of neighbouring new tokens in one chunk, as a sequence with the chunk's pages."""
    found = []
    for seq in batch.sequences:
        for chunk in range(seq.context_len // chunk_size, (seq.seq_len - 1) // chunk_size + 1):
            begin, end = chunk * chunk_size, min((chunk + 1) * chunk_size, seq.seq_len)
            context_len = max(0, seq.context_len - begin)
            pages = None if seq.pages is None else seq.pages[begin // batch.page_size : -(-end // batch.page_size)]
            found.append(SequenceData(context_len, end - begin - context_len, pages))
    return tuple(found)


@given(rows(kinds=("decoder", "profile"), flags=False), st.integers(1, 4), st.integers(0, 3))
@settings(deadline=None)
def test_they_are_the_chunks_compiled(batch: Rows, pages_per_chunk: int, num_padded: int) -> None:
    chunk_size = pages_per_chunk * batch.page_size
    common = batch.compiled(0, len(batch.sequences), num_padded)
    virtual = make_local_attention_virtual_batches(common, chunk_size)
    sequences = by_loop(batch, chunk_size)
    expected = replace(batch, sequences=sequences).compiled(0, len(sequences), num_padded)
    assert_same_batch(virtual, expected)
    assert virtual.page_table.shape == expected.page_table.shape
    assert virtual.slot_mapping is common.slot_mapping


def test_many_chunks() -> None:
    common = Rows((SequenceData(1000, 3096, list(range(1024))),), 4).compiled(0, 1, 0)
    virtual = make_local_attention_virtual_batches(common, 8)
    assert virtual.seq_lens.tolist() == [8] * 387
    assert virtual.page_table.flatten().tolist() == list(range(250, 1024))
    assert virtual.context_lens_cpu.tolist() == [0] * 387


def random_rows(features: dict[str, Any], lens: list[tuple[int, int]], chunk_size: int, page_size: int) -> Batch:
    spec = replace(SPEC, chunk_size=chunk_size, **features)
    seq_lens, query_lens = [context + query for context, query in lens], [query for _, query in lens]
    return random_batch(TorchBackend, spec, seq_lens, query_lens, page_size=page_size, poison=float("nan"))


LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 14)), min_size=1, max_size=3)
FEATURES = st.sampled_from(
    [{}, {"logits_soft_cap": 2.0}, {"alibi_slopes": (0.5, -0.25)}, {"sinks": True}, {"causal": False}]
)


@given(FEATURES, LENGTHS, st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))
@settings(deadline=None, max_examples=40)
def test_attending_them_is_attention_in_chunks(
    features: dict[str, Any], lens: list[tuple[int, int]], page_size: int, pages_per_chunk: int, num_padded: int
) -> None:
    """Each virtual row through the reference, without chunks, over the keys its pages hold after the step's writes."""
    batch = random_rows(features, lens, page_size * pages_per_chunk, page_size)
    virtual = make_local_attention_virtual_batches(batch.common(num_padded), page_size * pages_per_chunk)
    spec, pool = replace(batch.spec, chunk_size=None), batch.pool_after()
    assert pool is not None
    outs = []
    for row in range(virtual.num_actual_reqs):
        key, value = keys_of(virtual, row, pool)
        tokens = slice(*virtual.query_start_loc_cpu[row : row + 2].tolist())
        context_len = int(virtual.context_lens_cpu[row])
        outs.append(reference_attention(batch.query[tokens], key, value, spec, context_len=context_len,
                                        sinks=batch.sinks))  # fmt: skip
    expected, expected_lse = batch.expected()
    torch.testing.assert_close(torch.cat([out for out, _ in outs]), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([lse for _, lse in outs]), expected_lse, rtol=1e-12, atol=1e-12)


def keys_of(common: CommonAttentionMetadata, row: int, pool: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    begin, end = common.paged_kv_indptr[row : row + 2].tolist()
    pages = common.paged_kv_indices[begin:end].long()
    key, value = (cached[pages].flatten(0, 1)[: int(common.seq_lens[row])] for cached in pool)
    return key, value


@pytest.mark.parametrize("num_padded", [0, 2])
def test_a_backend_serves_them(num_padded: int) -> None:
    """From builder to output on TORCH, as a layer without chunks; it writes the new keys to the batch's slots."""
    batch = random_rows({}, [(9, 14), (3, 1), (0, 7), (16, 1)], 8, 4)
    virtual = make_local_attention_virtual_batches(batch.common(num_padded), 8)
    plain = replace(batch, spec=SPEC, rows=tuple(row for row in batch.rows for _ in range(4)))  # limits: more rows
    layer = make_layer(TorchBackend, plain, num_padded_reqs=num_padded)
    step = layer.state.begin_forward(layer.builder.build(0, virtual))
    result = layer.forward(batch, step, num_padded_reqs=num_padded)
    expected, _ = batch.expected()
    torch.testing.assert_close(result.output[: len(expected)], expected, rtol=1e-12, atol=1e-12)
    assert not result.output[len(expected) :].any()
    pool = batch.pool_after()
    assert pool is not None
    assert result.kv_cache is not None
    torch.testing.assert_close(result.kv_cache.key, pool.key, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_read_of_the_device() -> None:
    """A meta tensor has no values to read."""
    batch = Rows((SequenceData(4, 9, [7, 8, 9, 6]), SequenceData(9, 3, [1, 2, 3])), 4)
    virtual = make_local_attention_virtual_batches(batch.compiled(0, 2, 1, device="meta"), 8)
    assert virtual.page_table.device.type == virtual.seq_lens.device.type == virtual.slot_mapping.device.type == "meta"
    assert virtual.page_table.shape == (4, 2)
    assert virtual.paged_kv_indices.shape == (int(virtual.paged_kv_indptr_cpu[-1]),)


def test_errors() -> None:
    batch = Rows((SequenceData(0, 2, [0]), SequenceData(4, 2, [1, 2])), 4)
    common = batch.compiled(0, 2, 0)
    for chunk_size in (6, 2, 0, -4):
        with pytest.raises(ValueError, match=f"chunk_size is {chunk_size} and the page size 4.*divisor"):
            make_local_attention_virtual_batches(common, chunk_size)
    with pytest.raises(ValueError, match=r"upper bounds \(seq_lens_are_upper_bounds\), and where rows are cut"):
        make_local_attention_virtual_batches(replace(common, seq_lens_are_upper_bounds=True), 8)
    with pytest.raises(ValueError, match=r"a graph's, and where rows are cut.*pad_rows"):
        make_local_attention_virtual_batches(replace(pad_rows(common, 4), for_graph=True), 8)
    first = SequenceData(0, 2, [0])
    for seq_len, new in ((4, 4), (3, 0), (4, 1)):  # the last two are told by one number each
        cross = Rows((first, SequenceData(2, 1, [1], seq_len=seq_len, new_kv_len=new)), 4).compiled(0, 2, 0)
        told = f"row 1 has 1 query tokens after 2, and {seq_len} keys of which {new} are new: that is cross attention"
        with pytest.raises(ValueError, match=told):
            make_local_attention_virtual_batches(cross, 8)

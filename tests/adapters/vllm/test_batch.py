"""vLLM's batches in our words, over stand-ins that have its fields: no vLLM is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, Limits, Plans, Unsupported, get_backend
from attn_backends.adapters.vllm.batch import batch_of, check_batch, uniform_query_len
from attn_backends.adapters.vllm.graphs import CapturedGraphs, are_mixed
from attn_backends.cache.kv_cache import KVCache
from attn_backends.testing.reference import reference_attention

PAGE = 16


def batch(query_lens: list[int], seq_lens: list[int], *, tokens: int | None = None, **more: Any) -> SimpleNamespace:
    """What vLLM hands to a builder: rows of zero tokens are its padding, tokens beyond the rows' belong to none."""
    starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    rows, lens = len(query_lens), torch.tensor(seq_lens, dtype=torch.int32)
    width = max(seq_lens) // PAGE + 3
    table = torch.arange(1, rows * width + 1, dtype=torch.int32).view(rows, width)
    tokens = int(starts[-1]) if tokens is None else tokens
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        places = torch.arange(length - count, length)
        slots[int(starts[row]) : int(starts[row + 1])] = table[row, places // PAGE].long() * PAGE + places % PAGE
    given = {
        "query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": lens, "num_reqs": rows,
        "num_actual_tokens": tokens, "max_query_len": max(query_lens), "max_seq_len": max(seq_lens),
        "block_table_tensor": table, "slot_mapping": slots, "causal": True, "seq_lens_cpu_upper_bound": None,
    }  # fmt: skip
    return SimpleNamespace(**given | more)


def test_a_batch_is_read_where_it_lies() -> None:
    theirs = batch([3, 1, 0], [20, 5, 0])
    ours = batch_of(theirs, PAGE)
    assert (ours.num_reqs, ours.num_tokens, ours.num_new_kv, ours.max_seq_len) == (2, 4, 4, 20)
    assert ours.context_lens_cpu.tolist() == [17, 4]
    assert ours.page_table.data_ptr() == theirs.block_table_tensor.data_ptr()
    assert ours.slot_mapping.data_ptr() == theirs.slot_mapping.data_ptr()
    assert not ours.seq_lens_are_upper_bounds


def test_host_tensors_may_change_afterwards() -> None:
    theirs = batch([2, 1], [9, 4])
    ours = batch_of(theirs, PAGE)
    theirs.query_start_loc_cpu.zero_()
    theirs.seq_lens.zero_()
    assert ours.query_start_loc_cpu.tolist() == [0, 2, 3]
    assert ours.seq_lens_cpu.tolist() == [9, 4]


def test_tokens_beyond_the_rows_are_counted() -> None:
    assert batch_of(batch([1, 1], [7, 3], tokens=8), PAGE).num_tokens == 8


def test_a_graphs_rows_have_equal_lengths() -> None:
    ours = batch_of(batch([2, 2, 0, 0], [9, 4, 0, 0], tokens=8), PAGE, for_graph=True)
    assert (ours.for_graph, ours.num_reqs, ours.num_tokens, ours.max_query_len) == (True, 4, 8, 2)


@pytest.mark.parametrize(
    ("query_lens", "tokens", "expected"),
    [
        ([1, 1, 1], 3, 1),
        ([1, 1, 0, 0], 4, 1),
        ([3, 3], 6, 3),
        ([3, 0], 6, 3),
        ([2, 1], 3, 0),
        ([3, 2], 6, 0),
        ([4], 8, 0),
        ([2, 1, 1], 6, 0),
        ([2, 2, 0, 2], 8, 0),
        ([1, 2, 1, 0], 8, 0),
        ([3, 3, 0], 6, 0),  # a graph of three rows has 9 tokens
    ],
)
def test_uniform_batches(query_lens: list[int], tokens: int, expected: int) -> None:
    theirs = batch(query_lens, [10 if count else 0 for count in query_lens], tokens=tokens)
    assert uniform_query_len(theirs) == expected


class OnAGpu(torch.Tensor):
    """Says that it is there."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


def on_a_gpu(theirs: SimpleNamespace, bounds: list[int] | None) -> SimpleNamespace:
    """The batch, with lengths on the device, and what the host knows of them."""
    given = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    lens = theirs.seq_lens.as_subclass(OnAGpu)
    return SimpleNamespace(**vars(theirs) | {"seq_lens": lens, "seq_lens_cpu_upper_bound": given})


def test_lengths_on_a_device_are_the_hosts() -> None:
    ours = batch_of(on_a_gpu(batch([1, 1], [9, 4]), [9, 4, 77]), PAGE)
    assert (ours.seq_lens_cpu.tolist(), ours.seq_lens_are_upper_bounds) == ([9, 4], False)


def test_lengths_on_a_device_may_have_bounds_alone() -> None:
    """As with speculation under asynchronous scheduling. None is shorter than its query."""
    ours = batch_of(on_a_gpu(batch([1, 3], [9, 4]), [10, 2]), PAGE, exact=False)
    assert (ours.seq_lens_cpu.tolist(), ours.seq_lens_are_upper_bounds) == ([10, 3], True)


def test_lengths_that_the_host_does_not_have_are_the_longest() -> None:
    ours = batch_of(on_a_gpu(batch([1, 1], [9, 4]), None), PAGE)
    assert (ours.seq_lens_cpu.tolist(), ours.seq_lens_are_upper_bounds) == ([9, 9], True)


def test_lengths_that_were_read_take_the_place_of_bounds() -> None:
    theirs = on_a_gpu(batch([1, 1], [9, 4]), [12, 7])
    ours = batch_of(theirs, PAGE, exact=False, lens=torch.tensor([9, 4], dtype=torch.int32))
    assert (ours.seq_lens_cpu.tolist(), ours.seq_lens_are_upper_bounds) == ([9, 4], False)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"causal": False}, "causal"),
        ({"causal": torch.tensor([True])}, "causal"),
        ({"mm_req_doc_ranges": {0: [(1, 3)]}}, "mm_prefix"),
        ({"rswa_prefix_lens": torch.tensor([3])}, "rswa"),
    ],
)
def test_what_none_serves_is_refused(given: dict[str, Any], code: str) -> None:
    with pytest.raises(Unsupported) as refused:
        check_batch("TORCH", batch([1], [3], **given))
    assert [each.code for each in refused.value.rejections] == [code]
    check_batch("TORCH", batch([1], [3], mm_req_doc_ranges={0: []}))


def test_graphs_serve_batches_that_lie_in_their_tensors() -> None:
    state: Any = SimpleNamespace(hold_graph_buffers=lambda rows, inputs: held.append(rows))
    held: list[int] = []
    graphs = CapturedGraphs(state)
    first = batch([1, 1, 1, 1], [5, 6, 7, 8])
    assert graphs.size_of(first) is None
    graphs.capture(first, False)
    graphs.capture(first, False)
    assert held == [4]
    assert graphs.size_of(first) == (4, 1)
    padded = SimpleNamespace(**vars(first))
    padded.query_start_loc_cpu = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    assert graphs.size_of(padded) == (4, 1)
    assert graphs.size_of(batch([1, 1, 1, 1], [5, 6, 7, 8])) is None  # elsewhere
    for name in ("block_table_tensor", "seq_lens", "slot_mapping"):  # one of them is
        assert graphs.size_of(SimpleNamespace(**vars(first) | {name: getattr(first, name).clone()})) is None
    ragged = SimpleNamespace(**vars(first))
    ragged.query_start_loc_cpu = torch.tensor([0, 2, 3, 4, 4], dtype=torch.int32)
    ragged.max_query_len = 2
    assert graphs.size_of(ragged) is None


def test_graphs_go_by_the_tokens_of_a_row() -> None:
    graphs = CapturedGraphs(SimpleNamespace(hold_graph_buffers=lambda rows, inputs: None))  # type: ignore[arg-type]
    drafts = batch([3, 3], [5, 6])
    graphs.capture(drafts, False)
    assert graphs.size_of(drafts) == (2, 3)
    decodes = {"query_start_loc_cpu": torch.tensor([0, 1, 2]), "num_actual_tokens": 2, "max_query_len": 1}
    assert graphs.size_of(SimpleNamespace(**vars(drafts) | decodes)) is None


def test_graphs_of_mixed_batches_go_by_tokens() -> None:
    graphs = CapturedGraphs(SimpleNamespace(hold_graph_buffers=lambda rows, inputs: None))  # type: ignore[arg-type]
    first = batch([1, 1, 1, 5], [5, 6, 7, 8])
    graphs.capture(first, True)
    assert graphs.are_mixed
    ragged = SimpleNamespace(**vars(first) | {"query_start_loc_cpu": None})
    assert graphs.size_of(ragged) == (4, 8)
    assert graphs.size_of(SimpleNamespace(**vars(first) | {"num_reqs": 3})) == (4, 8)
    for other in ({"num_actual_tokens": 7}, {"num_reqs": 5}, {"query_start_loc": first.query_start_loc.clone()}):
        assert graphs.size_of(SimpleNamespace(**vars(first) | other)) is None


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", None])
def test_full_graphs_are_mixed_where_there_is_no_other_mode(mode: str | None) -> None:
    of_mixed = SimpleNamespace(name="NONE" if mode == "FULL_DECODE_ONLY" else mode)
    given = None if mode is None else SimpleNamespace(mixed_mode=lambda: of_mixed)
    assert are_mixed(SimpleNamespace(cudagraph_mode=given)) is (mode == "FULL")


def test_a_mixed_graphs_rows_keep_their_lengths() -> None:
    theirs = batch([3, 0, 2], [9, 0, 4], tokens=8)
    ours = batch_of(theirs, PAGE, for_graph=True, is_mixed=True)
    assert (ours.num_reqs, ours.num_tokens, ours.num_actual_tokens) == (3, 8, 5)
    assert ours.query_start_loc.data_ptr() == theirs.query_start_loc.data_ptr()
    assert (len(ours.slot_mapping), ours.query_lens_cpu.tolist()) == (8, [3, 0, 2])


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_over_vllms_cache_match_float64(seed: int) -> None:
    """Keys and values side by side in a row, pages and rows as vLLM lays them, padding at the end."""
    numbers = np.random.default_rng(seed)
    rows = int(numbers.integers(1, 5))
    query_lens = [int(n) for n in numbers.choice([1, 1, 2, 7, 30], rows)] + [0] * int(numbers.integers(0, 3))
    seq_lens = [n + int(numbers.integers(0, 60)) if n else 0 for n in query_lens]
    theirs = batch(query_lens, seq_lens, tokens=sum(query_lens) + int(numbers.integers(0, 4)))
    spec = AttentionSpec(4, 2, 32, dtype=torch.float32, window_left=int(numbers.choice([-1, 19])))
    cache = KVCacheSpec(None, PAGE)
    plans = Plans(get_backend("TORCH"), {"layer": spec}, cache, Limits(8, 128, 128), "cpu")
    plans.bind("layer")
    generator = torch.Generator().manual_seed(seed)
    pages = int(theirs.block_table_tensor.max()) + 1
    packed = torch.randn(pages, PAGE, 2, 64, generator=generator).transpose(
        1, 2
    )  # [blocks, heads, block_size, 2D], NHD
    kv_cache = KVCache(*packed.transpose(1, 2).split([32, 32], -1))
    query, key, value = (torch.randn(theirs.num_actual_tokens, n, 32, generator=generator) for n in (4, 2, 2))
    got = plans.forward("layer", query, key, value, kv_cache, plans.plan(batch_of(theirs, PAGE)))
    starts = theirs.query_start_loc_cpu.tolist()
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if count:
            held = [cached[theirs.block_table_tensor[row].long()].flatten(0, 1)[:length] for cached in kv_cache]
            expected, _ = reference_attention(query[starts[row] : starts[row] + count], *held, spec)
            assert (got[starts[row] : starts[row] + count] - expected).abs().max() < 2e-5
    assert not got[starts[-1] :].any()

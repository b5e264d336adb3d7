"""vLLM's full graphs of mixed batches by TRITON, interpreted: one capture, and batches that vLLM writes into its
tensors afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.testing.reference import reference_attention
from tests.adapters.vllm.test_batch import PAGE, batch
from tests.adapters.vllm.test_builder import adapter, built
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted

__all__ = ["adapter"]  # a fixture
ROWS, TOKENS = 8, 24


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


def padded(query_lens: list[int], seq_lens: list[int], rows: int = ROWS, tokens: int = TOKENS) -> Any:
    """As vLLM pads a batch for such a graph: rows without tokens behind the others, and tokens of no row."""
    more = [0] * (rows - len(query_lens))
    return batch(query_lens + more, seq_lens + more, tokens=tokens, max_seq_len=256)


def put(theirs: Any, held: Any) -> Any:
    """The batch, in vLLM's persistent tensors."""
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        getattr(held, name)[: len(getattr(theirs, name))] = getattr(theirs, name)
    table = theirs.block_table_tensor
    held.block_table_tensor[: len(table), : table.shape[1]] = table
    lying = {name: getattr(held, name)[: len(getattr(theirs, name))] for name in
             ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor")}  # fmt: skip
    return SimpleNamespace(**vars(theirs) | lying)


@only_interpreted
def test_one_capture_serves_every_batch_of_its_tokens(adapter: Any) -> None:
    builder = built(adapter, ours="TRITON", mixed="FULL")
    held = padded([3] * ROWS, [3] * ROWS)
    held.block_table_tensor = torch.zeros(ROWS, 20, dtype=torch.int32)
    step = builder.build_for_cudagraph_capture(held).steps["layer"]
    small = put(padded([4, 4], [4, 4], 4, 8), held)
    other = builder.build_for_cudagraph_capture(small).steps["layer"]
    packed = torch.randn(200, PAGE, 2, 64)
    cache = packed.transpose(1, 2)  # [blocks, heads, block_size, 2 * head_size]
    (layer,) = (builder.vllm_config.compilation_config.static_forward_context[name] for name in ("layer",))
    for query_lens, seq_lens, size in (
        ([1, 17, 3, 1], [40, 17, 30, 33], (ROWS, TOKENS)),
        ([1] * ROWS, [9, 50, 3, 1, 80, 7, 20, 33], (ROWS, TOKENS)),
        ([24], [60], (ROWS, TOKENS)),
        ([5, 1], [5, 20], (4, 8)),
    ):
        theirs = put(padded(query_lens, seq_lens, *size), held)
        theirs.num_reqs = len(query_lens)  # vLLM may leave its padding out, and has it in its tensors all the same
        served = builder.build(0, theirs)
        assert served.steps["layer"] is (step if size == (ROWS, TOKENS) else other)
        assert served.num_actual_tokens == size[1]
        query, key, value = (torch.randn(size[1], heads, 32) for heads in (4, 2, 2))
        output = torch.full_like(query, torch.nan)
        layer.impl.forward(layer, query, key, value, cache, served, output)
        starts = theirs.query_start_loc.tolist()
        for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
            pages = packed[theirs.block_table_tensor[row].long()].flatten(0, 1)[:length]
            tokens = slice(starts[row], starts[row] + count)
            expected, _ = reference_attention(query[tokens], *pages.split([32, 32], -1), layer.impl.impl.spec)
            assert (output[tokens] - expected).abs().max() < 2e-5
        assert not output[starts[-1] :].any()


@only_interpreted
def test_other_batches_are_eager(adapter: Any) -> None:
    builder = built(adapter, ours="TRITON", mixed="FULL")
    held = padded([3] * ROWS, [3] * ROWS)
    captured = builder.build_for_cudagraph_capture(held).steps["layer"]
    for theirs in (padded([3] * ROWS, [3] * ROWS), put(padded([1], [1], tokens=7), held)):
        assert builder.build(0, theirs).steps["layer"] is not captured


@pytest.mark.parametrize("mixed", ["NONE", "PIECEWISE"])
@only_interpreted
def test_without_mixed_graphs_rows_are_equal(adapter: Any, mixed: str) -> None:
    builder = built(adapter, ours="TRITON", mixed=mixed)
    step = builder.build_for_cudagraph_capture(padded([3] * ROWS, [3] * ROWS)).steps["layer"]
    assert not step.metadata.is_mixed

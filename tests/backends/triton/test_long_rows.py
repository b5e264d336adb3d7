"""On a GPU: rows in hundreds of splits, which many programs combine, and kernels that start early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.batch.views import without_new_keys
from attn_backends.cache.kv_cache import KVCache
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, make_layer

pytest.importorskip("triton", reason="needs triton")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")
joins = pytest.importorskip("tests.helpers.joins")

pytestmark = pytest.mark.gpu

WIDE = AttentionSpec(num_qo_heads=8, num_kv_heads=1, head_dim=256, dtype=torch.bfloat16)
REPLAYS = 30


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("joined", [None, 2, 4, 8])
@pytest.mark.parametrize("seq_lens", [(70_001,), (128_000, 17)], ids=str)
def test_rows_in_hundreds_of_splits(seq_lens: tuple[int, ...], joined: int | None, query_len: int) -> None:
    """More than 256 with parts of 64 keys, and those that the shipped tile gives; and a launch leaves its counters so
    that the next one can count."""
    backend, query_lens = get_backend("TRITON"), (query_len,) * len(seq_lens)
    batch = random_batch(backend, WIDE, seq_lens, query_lens, device="cuda")
    tile = joined and tuning.DecodeTile(keys=32, warps=4, stages=6, programs=2, min_keys=64, joined=joined)
    layer = make_layer(backend, batch, options=tuning.TritonOptions(decode_tile=tile) if tile else None)
    expected, step = batch.expected(), layer.begin(batch)
    for turn in range(3):
        assert_matches(layer.forward(batch, step), batch, f"turn {turn}", expected)
        assert joins.are_at_rest(step.workspace.counters)


def clear_and_fill(query: torch.Tensor, source: torch.Tensor, cache: KVCache, values: torch.Tensor) -> None:
    """A memset of half of the pages right before attention's kernel, and copies before that."""
    cache.value.copy_(values)
    query.copy_(source)
    cache.value[: len(values) // 2].zero_()


def fill_elsewhere(query: torch.Tensor, source: torch.Tensor, cache: KVCache, values: torch.Tensor) -> None:
    """Queries that another stream writes late."""
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        torch.cuda._sleep(1_000_000)
        query.copy_(source)
    cache.value.zero_()
    cache.value.copy_(values)
    here.wait_stream(other)


@pytest.mark.parametrize("prepare", [clear_and_fill, fill_elsewhere])
def test_kernels_wait_for_what_is_captured_before_them(prepare: Callable[..., None]) -> None:
    """They start early, and read nothing before the memset, the copy or the other stream in front has ended; what comes
    behind them may write over what they read."""
    backend = get_backend("TRITON")
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    batch = random_batch(backend, spec, (3000,) * 8 + (60_000,), (1,) * 9, device="cuda")
    layer = make_layer(backend, batch)
    step = layer.state.begin_forward(layer.builder.build(0, without_new_keys(batch.common())))
    cache = batch.fresh_pool()
    query, source, output = batch.query.clone(), torch.empty_like(batch.query), torch.empty_like(batch.query)
    values = cache.value.clone()

    def attend() -> None:
        layer.impl.forward(query, None, None, cache, step, output)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare(query, source, cache, values)
        attend()
        query.zero_()
    for turn in range(REPLAYS):
        source.normal_()
        output.fill_(torch.nan)
        graph.replay()
        got = output.clone()
        query.copy_(source)
        attend()
        assert torch.equal(got, output), f"replay {turn}"

"""ALiBi in 16 bits, with slopes below zero: the oldest keys weigh most, and no road of TORCH may round their bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.options import TorchOptions
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.graphs.harness import CapturedStep, make_recorder
from attn_backends.testing.harness import assert_matches, make_layer

PLAIN = TorchOptions(native_decode=False, native_prefill=False)
ROADS = {
    "kernel": TorchOptions(),
    "together": PLAIN,
    "pieces": TorchOptions(native_decode=False, gather_together_bytes=0, piece_bytes=1 << 12),
}
LAYERS: dict[str, dict[str, Any]] = {"plain": {}, "by hand": {"logits_soft_cap": 20.0}, "sinks": {"sinks": True}}
LENGTHS = (200, 133, 190)

pytestmark = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def make_batch(dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, query_len: int = 1, **layer: Any) -> Batch:
    spec = AttentionSpec(4, 2, 32, dtype=dtype, alibi_slopes=(-0.7, -0.35, -0.1, -0.03), **layer)
    return random_batch(TorchBackend, spec, lengths, (query_len,) * len(lengths), poison=float("nan"))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("lengths", [LENGTHS, (201,)], ids=["rows", "one row"])
@pytest.mark.parametrize("road", ROADS)
def test_decodes(road: str, lengths: tuple[int, ...], layer: str, dtype: torch.dtype) -> None:
    batch = make_batch(dtype, lengths, **LAYERS[layer])
    made = make_layer(TorchBackend, batch, options=ROADS[road])
    for want_lse in (False, True):
        assert_matches(made.forward(batch, made.begin(batch), want_lse=want_lse), batch)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("query_len", [1, 3])
def test_where_queries_and_bias_must_have_one_dtype(
    query_len: int, layer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose fused kernels refuse what a CPU's take."""
    fused, seen = F.scaled_dot_product_attention, []

    def strict(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **how: Any) -> Any:
        seen.append({tensor.dtype for tensor in (query, key, value, mask)})
        return fused(query, key, value, mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", strict)
    monkeypatch.setattr("attn_backends.backends.torch.impl.can_add", lambda bias, query: bias.dtype == query.dtype)
    batch = make_batch(dtype, query_len=query_len, **LAYERS[layer])
    made = make_layer(TorchBackend, batch, options=PLAIN)
    assert_matches(made.forward(batch, made.begin(batch)), batch)
    assert seen == [{torch.float32}] * len(seen)
    assert bool(seen) == (layer == "plain")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("query_len", [1, 3])
def test_replays(query_len: int, layer: str, dtype: torch.dtype) -> None:
    batch = make_batch(dtype, query_len=query_len, **LAYERS[layer])
    made, rows = make_layer(TorchBackend, batch), len(batch.rows)
    with made.state.graph_capture(rows):
        clone = made.state.graph_clone(rows, query_len)
        captured = CapturedStep([made], clone, [batch], rows, query_len, make_recorder("cpu"))
    captured.fill([batch])
    assert_matches(captured.replay()[0], batch)

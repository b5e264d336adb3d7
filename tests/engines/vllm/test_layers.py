"""Layers of every kind that vLLM makes, through the adapter's classes, against float64; and what is refused of them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from attn_backends import Unsupported
from attn_backends.adapters.vllm import served
from tests.engines.vllm.batches import HEADS, Batch, run
from tests.engines.vllm.processes import ROOT

ROWS = [70, 33, 5, 128, 64], [1, 33, 4, 7, 1]
SLOPES = [2.0**-i for i in range(1, HEADS + 1)]
SINKS = torch.linspace(-1, 2, HEADS)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # in vLLM's words, and in ours
    "window": ({"sliding_window": 20}, {"window_left": 19}),
    "soft cap": ({"logits_soft_cap": 3.0}, {"logits_soft_cap": 3.0}),
    "no soft cap": ({"logits_soft_cap": 0.0}, {}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": tuple(SLOPES)}),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}),
    "all": (
        {"sliding_window": 20, "logits_soft_cap": 3.0, "sinks": SINKS},
        {"window_left": 19, "logits_soft_cap": 3.0, "sinks": SINKS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_matches_float64(kind: str, layout: str) -> None:
    theirs, ours = KINDS[kind]
    batch = Batch(*ROWS, layout)
    assert (run(served.CPU_ATTN__TORCH, batch, layout, **theirs) - batch.expected(**ours)).abs().max() < 1e-5


@pytest.mark.parametrize(("word", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_a_cache_of_fp8_has_the_layers_scales(word: str, dtype: torch.dtype) -> None:
    """vLLM's caches of fp8 are bytes. The layer's keys and values are what the cache holds of them."""
    lengths = [40, 3, 97]
    batch = Batch(lengths, lengths, "LBNHC")
    batch.kv_cache = batch.kv_cache.to(torch.uint8)
    batch.rows = [
        (query, *((each / scale).to(dtype).to(torch.float32) * scale for each, scale in ((key, 0.5), (value, 2.0))))
        for query, key, value in batch.rows
    ]
    got = run(served.CPU_ATTN__TORCH, batch, "LBNHC", scales=(0.5, 2.0), kv_cache_dtype=word)
    assert (got - batch.expected()).abs().max() < 1e-5


def test_a_layer_that_shares_a_cache_writes_nothing() -> None:
    batch = Batch(*ROWS, "LBNHC")
    run(served.CPU_ATTN__TORCH, batch, "LBNHC")
    before = batch.kv_cache.clone()
    batch.key, batch.value = (torch.full_like(each, torch.nan) for each in (batch.key, batch.value))
    got = run(served.CPU_ATTN__TORCH, batch, "LBNHC", kv_sharing_target_layer_name="another")
    assert torch.equal(batch.kv_cache, before)
    assert (got - batch.expected()).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"attn_type": "encoder_only"}, "attn_type"),
        ({"attn_type": "encoder_decoder"}, "attn_type"),
        ({"chunk_lookback": 2}, "chunk_lookback"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
        ({"what_comes_next": 1}, "what_comes_next"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
    ],
)
def test_what_none_serves_is_refused_by_name(asked: dict[str, Any], code: str) -> None:
    with pytest.raises(Unsupported) as refused:
        run(served.CPU_ATTN__TORCH, Batch(*ROWS, "LBNHC"), "LBNHC", **asked)
    assert [each.code for each in refused.value.rejections] == [code]


def test_what_the_backend_refuses_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "plugin"))
    importlib.import_module("attn_backends_naive")  # which registers it
    with pytest.raises(NotImplementedError, match="NAIVE cannot serve layer in vLLM: window: got window_left=19"):
        run(served.CPU_ATTN__NAIVE, Batch(*ROWS, "LBNHC"), "LBNHC", sliding_window=20)

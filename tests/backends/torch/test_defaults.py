"""TORCH under other defaults of torch, on the roads that the kit's small batches do not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec
from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.options import TorchOptions
from attn_backends.spec import KVCacheSpec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_step, make_layer
from attn_backends.testing.kit.defaults import DEFAULTS, Default, torch_default

ROADS: dict[str, TorchOptions] = {
    "kernels": TorchOptions(),
    "together": TorchOptions(native_decode=False, native_prefill=False),
    "pieces": TorchOptions(native_decode=False, native_prefill=False, gather_together_bytes=0, piece_bytes=1024),
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "soft cap": {"logits_soft_cap": 1.5},
}


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("want_lse", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("road", ROADS)
def test_a_shared_prefix_that_is_attended_once(
    road: str, layer: str, want_lse: bool, default: Default, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_backends.backends.torch.metadata.CASCADE_MIN_BYTES", 1)
    spec = AttentionSpec(4, 2, 32, dtype=torch.float32, **LAYERS[layer])
    batch = random_batch(TorchBackend, spec, (65, 73, 94, 84), (1, 1, 1, 12), shared_prefix_len=64)
    with torch_default(default):
        one = make_layer(TorchBackend, batch, options=ROADS[road])
        step = one.begin(batch, common_prefix_len=64)
        result = one.forward(batch, step, want_lse=want_lse)
    assert step.metadata.common_prefix_len == 64
    assert_step(result, batch, f"{road}, {layer}, a default of {default}")


def test_slopes_are_those_of_the_layer() -> None:
    slopes = (0.7, 0.3, 0.11, 0.013)
    with torch_default(torch.bfloat16):
        kernel = TorchImpl(AttentionSpec(4, 2, 32, alibi_slopes=slopes), KVCacheSpec(4, 16), "cpu").kernel
    assert kernel is not None
    assert kernel.constants[1].tolist() == torch.tensor(slopes, dtype=torch.float32).tolist()


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("road", ROADS)
def test_keys_that_a_query_may_not_see_stay_hidden_at_any_scale(road: str, scale: float) -> None:
    """Torch's causal kernels hide keys before they scale, and -inf times such a scale is +inf or NaN."""
    spec = AttentionSpec(6, 2, 17, scale=scale)
    batch = random_batch(TorchBackend, spec, (9, 40, 5), (1, 3, 5))
    result = make_layer(TorchBackend, batch, options=ROADS[road]).run(batch)
    assert_step(result, batch, f"{road}, a scale of {scale}")

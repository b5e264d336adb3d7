"""TORCH passes the conformance kit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.native.paged_rows import PagedKernel
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.conformance import BackendConformance
from attn_backends.testing.harness import assert_matches, make_layer


class TestTorch(BackendConformance):
    """Decode rows by the kernel in C, where it serves them."""

    backend_name = "TORCH"
    dtypes = (torch.float32, torch.bfloat16)


@pytest.mark.long
class TestTorchInOtherDtypes(BackendConformance):
    backend_name = "TORCH"
    dtypes = (torch.float16, torch.float64)


class WithoutKernel(BackendConformance):
    backend_name = "TORCH"

    @pytest.fixture(autouse=True)
    def _without_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PagedKernel, "serves", lambda spec, device: False)


@pytest.mark.sampled
class TestTorchWithoutKernel(WithoutKernel):
    dtypes = (torch.float32,)


@pytest.mark.long
class TestTorchWithoutKernelInOtherDtypes(WithoutKernel):
    dtypes = (torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.gpu
class TestTorchCuda(BackendConformance):
    backend_name = "TORCH"
    device = "cuda"


@pytest.mark.parametrize("changes", [{}, {"logits_soft_cap": 30.0}, {"sinks": True}], ids=str)
def test_a_graphs_padding_saw_no_key(changes: dict[str, Any]) -> None:
    batch = random_batch(TorchBackend, AttentionSpec(4, 2, 32, **changes), [9, 20], [1, 1], page_size=4)
    layer = make_layer(TorchBackend, batch, num_padded_reqs=2)
    step = layer.state.begin_forward(layer.builder.build(0, replace(batch.common(2), for_graph=True)))
    assert_matches(layer.forward(batch, step, num_padded_reqs=2, want_lse=True), batch)

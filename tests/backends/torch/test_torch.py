"""TORCH passes the conformance kit."""

from __future__ import annotations

import pytest
import torch

from attn_backends.backends.torch.native.paged_rows import PagedKernel
from attn_backends.testing.conformance import BackendConformance


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


class TestTorchWithoutKernel(WithoutKernel):
    dtypes = (torch.float32,)


@pytest.mark.long
class TestTorchWithoutKernelInOtherDtypes(WithoutKernel):
    dtypes = (torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.gpu
class TestTorchCuda(BackendConformance):
    backend_name = "TORCH"
    device = "cuda"

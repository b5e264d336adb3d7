"""TORCH passes the conformance kit."""

from __future__ import annotations

import pytest

from attn_backends.testing.conformance import BackendConformance


class TestTorch(BackendConformance):
    backend_name = "TORCH"


@pytest.mark.gpu
class TestTorchCuda(BackendConformance):
    backend_name = "TORCH"
    device = "cuda"

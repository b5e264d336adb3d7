"""TORCH_MLA passes the conformance kit of the family."""

from __future__ import annotations

import pytest

from attn_backends.testing.conformance import MLAConformance


class TestTorchMLA(MLAConformance):
    backend_name = "TORCH_MLA"


@pytest.mark.gpu
class TestTorchMLACuda(MLAConformance):
    backend_name = "TORCH_MLA"
    device = "cuda"

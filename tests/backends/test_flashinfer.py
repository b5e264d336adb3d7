"""FLASHINFER passes the conformance kit: over emulated wrappers on a CPU, over FlashInfer itself on a GPU."""

from __future__ import annotations

import pytest

from attn_backends.testing.conformance import BackendConformance
from tests.backends import flashinfer_emulated  # noqa: F401 (registers)


class TestFlashInferEmulated(BackendConformance):
    backend_name = "FLASHINFER_EMULATED"


@pytest.mark.gpu
class TestFlashInfer(BackendConformance):
    backend_name = "FLASHINFER"
    device = "cuda"

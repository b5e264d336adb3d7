"""FLASHINFER passes the conformance kit: over emulated wrappers on a CPU, over FlashInfer itself on a GPU."""

from __future__ import annotations

import pytest
import torch

from attn_backends.testing.conformance import BackendConformance
from tests.helpers import flashinfer_emulated  # noqa: F401 (registers)


@pytest.mark.sampled
class TestFlashInferEmulated(BackendConformance):
    backend_name = "FLASHINFER_EMULATED"
    dtypes = (torch.bfloat16,)


@pytest.mark.long
class TestFlashInferEmulatedInFloat16(BackendConformance):
    backend_name = "FLASHINFER_EMULATED"
    dtypes = (torch.float16,)


@pytest.mark.gpu
class TestFlashInfer(BackendConformance):
    backend_name = "FLASHINFER"
    device = "cuda"

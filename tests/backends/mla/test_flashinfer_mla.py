"""FLASHINFER_MLA passes the conformance kit: over emulated wrappers on a CPU, over FlashInfer itself on a GPU."""

from __future__ import annotations

import pytest
import torch

from attn_backends.testing.conformance import MLAConformance
from tests.helpers import flashinfer_mla_emulated  # noqa: F401 (registers)


@pytest.mark.sampled
class TestFlashInferMLAEmulated(MLAConformance):
    backend_name = "FLASHINFER_MLA_EMULATED"


@pytest.mark.gpu
class TestFlashInferMLA(MLAConformance):
    backend_name = "FLASHINFER_MLA"
    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)  # the ready kernels first

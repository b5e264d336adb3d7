"""FLASHMLA passes the conformance kit: over both generations of emulated kernels, over the real ones on a GPU."""

from __future__ import annotations

import pytest
import torch

from attn_backends.testing.conformance import MLAConformance
from tests.helpers import flashmla_emulated  # noqa: F401 (registers)


@pytest.mark.sampled
class TestFlashMLAEmulated(MLAConformance):
    backend_name = "FLASHMLA_EMULATED"


@pytest.mark.first
@pytest.mark.rest
class TestFlashMLAEmulatedOlder(MLAConformance):
    backend_name = "FLASHMLA_EMULATED_OLDER"
    dtypes = (torch.float16,)


@pytest.mark.long
class TestFlashMLAEmulatedOlderInBfloat16(MLAConformance):
    backend_name = "FLASHMLA_EMULATED_OLDER"
    dtypes = (torch.bfloat16,)


@pytest.mark.gpu
class TestFlashMLA(MLAConformance):
    backend_name = "FLASHMLA"
    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)  # the ready kernels first

"""Pairs of backends pass the conformance kit as one backend does: over prefill's and decode's kernels together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from attn_backends.testing.conformance import BackendConformance
from tests.helpers import flash_attn_backends, flashinfer_emulated  # noqa: F401 (they register)

sys.path.append(str(Path(__file__).parents[2] / "examples" / "plugin"))
import attn_backends_naive  # noqa: F401 (it registers)


@pytest.mark.sampled
class TestPlainLoopsPrefill(BackendConformance):
    """NAIVE declares little, and has no graphs: those are TORCH's."""

    backend_name = "prefill=NAIVE,decode=TORCH"


@pytest.mark.long
class TestPlainLoopsDecode(BackendConformance):
    """Neither graphs nor most features."""

    backend_name = "prefill=TORCH,decode=NAIVE"
    dtypes = (torch.float32,)


@pytest.mark.long
class TestTorchPrefills(BackendConformance):
    """All that both serve, over emulated FlashInfer."""

    backend_name = "prefill=TORCH,decode=FLASHINFER_EMULATED"
    dtypes = (torch.bfloat16,)


@pytest.mark.long
class TestTorchDecodes(BackendConformance):
    backend_name = "prefill=FLASH_ATTN_FLASH_ATTN_EMULATED,decode=TORCH"
    dtypes = (torch.bfloat16,)


@pytest.mark.gpu
class TestFlashInferPrefillsOnAGpu(BackendConformance):
    backend_name = "prefill=FLASHINFER,decode=TRITON"
    device = "cuda"
    dtypes = (torch.bfloat16,)


@pytest.mark.gpu
class TestFlashInferDecodesOnAGpu(BackendConformance):
    backend_name = "prefill=TRITON,decode=FLASHINFER"
    device = "cuda"
    dtypes = (torch.bfloat16,)

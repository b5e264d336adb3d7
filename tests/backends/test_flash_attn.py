"""FLASH_ATTN passes the conformance kit with each provider: over emulated kernels on a CPU, and on a GPU for real."""

from __future__ import annotations

import pytest
import torch

from attn_backends.testing.conformance import BackendConformance
from tests.backends import flash_attn_backends  # noqa: F401 (registers)


class TestFlashAttn2Emulated(BackendConformance):
    backend_name = "FLASH_ATTN_FLASH_ATTN_EMULATED"


class TestFlashAttnInterfaceEmulated(BackendConformance):
    """The only test of this provider: there is no build of it to run."""

    backend_name = "FLASH_ATTN_FLASH_ATTN_INTERFACE_EMULATED"


class TestVllmFa2Emulated(BackendConformance):
    """The only test of this provider: there is no build of it to run."""

    backend_name = "FLASH_ATTN_VLLM_FA2_EMULATED"


class TestVllmFa3Emulated(BackendConformance):
    backend_name = "FLASH_ATTN_VLLM_FA3_EMULATED"


class TestVllmFa3EmulatedBf16(BackendConformance):
    """In bfloat16 alone, so that cases of fp8 caches find them served."""

    backend_name = "FLASH_ATTN_VLLM_FA3_EMULATED"
    dtypes = (torch.bfloat16,)


@pytest.mark.gpu
class TestFlashAttn2(BackendConformance):
    backend_name = "FLASH_ATTN_FLASH_ATTN"
    device = "cuda"


@pytest.mark.gpu
class TestVllmFa3(BackendConformance):
    backend_name = "FLASH_ATTN_VLLM_FA3"
    device = "cuda"


@pytest.mark.gpu
class TestVllmFa3Bf16(BackendConformance):
    """In bfloat16 alone, so that cases of fp8 caches find them served."""

    backend_name = "FLASH_ATTN_VLLM_FA3"
    device = "cuda"
    dtypes = (torch.bfloat16,)

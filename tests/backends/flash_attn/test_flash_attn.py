"""FLASH_ATTN passes the conformance kit with each provider: over emulated kernels on a CPU, and on a GPU for real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from attn_backends import AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.conformance import BackendConformance
from tests.helpers import flash_attn_backends  # noqa: F401 (registers)
from tests.helpers.large_cache import check_large_cache


@pytest.mark.first
@pytest.mark.rest
class TestFlashAttn2Emulated(BackendConformance):
    backend_name = "FLASH_ATTN_FLASH_ATTN_EMULATED"
    dtypes = (torch.float16,)


@pytest.mark.long
class TestFlashAttn2EmulatedInBfloat16(BackendConformance):
    backend_name = "FLASH_ATTN_FLASH_ATTN_EMULATED"
    dtypes = (torch.bfloat16,)


@pytest.mark.first
@pytest.mark.rest
class TestFlashAttnInterfaceEmulated(BackendConformance):
    """The only test of this provider: there is no build of it to run."""

    backend_name = "FLASH_ATTN_FLASH_ATTN_INTERFACE_EMULATED"
    dtypes = (torch.bfloat16,)


@pytest.mark.long
class TestFlashAttnInterfaceEmulatedInFloat16(BackendConformance):
    backend_name = "FLASH_ATTN_FLASH_ATTN_INTERFACE_EMULATED"
    dtypes = (torch.float16,)


@pytest.mark.first
@pytest.mark.rest
class TestVllmFa2Emulated(BackendConformance):
    """The only test of this provider: there is no build of it to run."""

    backend_name = "FLASH_ATTN_VLLM_FA2_EMULATED"
    dtypes = (torch.bfloat16,)


@pytest.mark.long
class TestVllmFa2EmulatedInFloat16(BackendConformance):
    backend_name = "FLASH_ATTN_VLLM_FA2_EMULATED"
    dtypes = (torch.float16,)


@pytest.mark.long
class TestVllmFa3Emulated(BackendConformance):
    backend_name = "FLASH_ATTN_VLLM_FA3_EMULATED"
    dtypes = (torch.float16,)  # the other one below


class InBf16(BackendConformance):
    """In bfloat16 alone, so that cases of fp8 caches find them served, with sinks that kernels take as they are."""

    dtypes = (torch.bfloat16,)

    def make_batch(self, spec: AttentionSpec, shape: BatchShape | str, **how: Any) -> Batch:
        batch = super().make_batch(spec, shape, **how)
        return batch if batch.sinks is None else replace(batch, sinks=batch.sinks.bfloat16().float())


@pytest.mark.sampled
class TestVllmFa3EmulatedBf16(InBf16):
    backend_name = "FLASH_ATTN_VLLM_FA3_EMULATED"


@pytest.mark.long
class TestFlashAttn4Emulated(BackendConformance):
    backend_name = "FLASH_ATTN_FLASH_ATTN_4_EMULATED"
    dtypes = (torch.float16,)  # the other one below


@pytest.mark.first
@pytest.mark.rest
class TestFlashAttn4EmulatedBf16(InBf16):
    backend_name = "FLASH_ATTN_FLASH_ATTN_4_EMULATED"


class OnGpu(BackendConformance):
    device = "cuda"
    module: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip(self.module)


class OnHopper(OnGpu):
    backend_name = "FLASH_ATTN_VLLM_FA3"
    module = "vllm.vllm_flash_attn.flash_attn_interface"

    @pytest.fixture(autouse=True)
    def _hopper(self) -> None:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("for Hopper GPUs")


@pytest.mark.gpu
class TestFlashAttn2(OnGpu):
    backend_name = "FLASH_ATTN_FLASH_ATTN"
    module = "flash_attn"


@pytest.mark.gpu
class TestVllmFa3(OnHopper):
    pass


@pytest.mark.gpu
class TestVllmFa3Bf16(OnHopper, InBf16):
    pass


@pytest.mark.gpu
class TestFlashAttn4(OnHopper):
    backend_name = "FLASH_ATTN_FLASH_ATTN_4"
    module = "flash_attn.cute.interface"


@pytest.mark.gpu
def test_large_caches_by_flash_attention_2() -> None:
    pytest.importorskip("flash_attn")
    check_large_cache(TestFlashAttn2())


@pytest.mark.gpu
def test_large_caches_by_flash_attention_3() -> None:
    pytest.importorskip("vllm.vllm_flash_attn.flash_attn_interface")
    check_large_cache(TestVllmFa3())

"""Emulated FlashAttention prefills and TRITON decodes, interpreted, in a process of its own."""

from __future__ import annotations

import pytest
import torch

from attn_backends.testing.conformance import BackendConformance
from tests.backends.triton.test_triton import SMALL
from tests.helpers import flash_attn_backends  # noqa: F401 (it registers)
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted


@pytest.mark.rest
@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__, SMALL)


@only_interpreted
class TestTritonDecodes(BackendConformance):
    backend_name = "prefill=FLASH_ATTN_FLASH_ATTN_EMULATED,decode=TRITON"
    dtypes = (torch.float16,)
    num_random_layers = 2

"""pymllm's `FlashInferAttnBackend` over FlashInfer itself, on a GPU."""

from __future__ import annotations

import pytest
import torch

from attn_backends import get_backend
from attn_backends.adapters.req_to_token.flashinfer import FlashInferAttnBackend
from attn_backends.registry.table import BackendImportError
from tests.helpers.pymllm_engine import serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(autouse=True)
def _importable() -> None:
    try:
        get_backend("FLASHINFER")
    except BackendImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("num_heads", [4, 8], ids=lambda heads: f"tensor cores {'on' if heads == 8 else 'off'}")
@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_decodes_and_graphs(page_size: int, num_heads: int, window: int | None) -> None:
    """As test_flashinfer.py has it over FlashInfer as it is emulated."""
    engine = serve(FlashInferAttnBackend, "cuda", page_size, num_heads, window)
    assert engine.adapter.decode_use_tensor_cores is (num_heads == 8)

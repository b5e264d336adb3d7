"""A pair of the MLA family passes its conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from attn_backends.registry import validate_options
from attn_backends.testing.conformance import MLAConformance
from tests.helpers import flashinfer_mla_emulated  # noqa: F401 (it registers)


@pytest.mark.long
class TestPlainTorchPrefillsLatents(MLAConformance):
    backend_name = "prefill=TORCH_MLA,decode=FLASHINFER_MLA_EMULATED"
    test_chunks_do_not_grow_with_the_context = None  # type: ignore[assignment]  # it reads one backend's own step

    def workspace_options(self, tokens: int) -> Any:
        each = {"context_workspace_tokens": tokens}
        return validate_options(self.backend_name, {"prefill": each, "decode": each})

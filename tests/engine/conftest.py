"""The default model, fetched and converted once a machine; and tiny models saved as folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_backends.engine.checkpoint import DEFAULT_MODEL, find_model
from attn_backends.engine.hf import convert_gguf


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return find_model(DEFAULT_MODEL, convert_gguf)

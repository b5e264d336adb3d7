"""The default model, fetched and converted once a machine; and a tiny one as a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attn_backends.engine.models.checkpoint import DEFAULT_MODEL, find_model
from attn_backends.engine.models.hf import convert_gguf
from tests.helpers.tiny_models import save_tiny


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model; `ATTN_BACKENDS_MODEL` names its folder or GGUF file on a machine that cannot fetch it."""
    return find_model(os.environ.get("ATTN_BACKENDS_MODEL", DEFAULT_MODEL), convert_gguf)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama")

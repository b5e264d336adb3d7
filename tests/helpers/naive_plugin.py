"""The example plugin, registered as NAIVE where a test module imports the fixture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_backends.registry import backends, register_backend

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture(autouse=True)
def naive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PLUGIN))
    was_there = "attn_backends_naive" in sys.modules  # other modules' tests have its classes then
    if "NAIVE" not in backends:
        register_backend("NAIVE", "attn_backends_naive:NaiveBackend")
    yield
    if not was_there:
        sys.modules.pop("attn_backends_naive", None)

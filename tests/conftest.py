"""For all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _cascade_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH attends a shared prefix once however short it is, so that small cases go that way."""
    monkeypatch.setattr("attn_backends.backends.torch.CASCADE_MIN_BYTES", 0)

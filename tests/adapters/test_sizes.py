"""Adapters are thin: what they share is the core's."""

from __future__ import annotations

from pathlib import Path

import pytest

ADAPTERS = Path(__file__).parents[2] / "attn_backends" / "adapters"
FILES = sorted(path for path in ADAPTERS.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_has_fewer_than_200_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 200

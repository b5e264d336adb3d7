"""Fragments of the changelog: how they are named, wrapped, and put under the unreleased version."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BEFORE = """# Changelog

## [0.2.0] - unreleased

### Fixed

- An old one.

## [0.1.0] - 2026-01-01

### Added

- The first.
"""


@pytest.fixture(scope="module")
def collect() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collect", ROOT / "changelog.d" / "collect.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["collect"] = module
    spec.loader.exec_module(module)
    return module


def test_the_committed_fragments_are_well_named(collect: ModuleType) -> None:
    assert all(collect.kind_of(path) in collect.KINDS for path in collect.fragments(ROOT / "changelog.d"))


def test_without_fragments_nothing_changes(collect: ModuleType) -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert collect.collected(text, []) == text
    assert collect.collected(BEFORE, []) == BEFORE


def test_fragments_come_first_under_their_kind(collect: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.fixed.md").write_text("A new one.\n")
    (tmp_path / "y.added.md").write_text("Something\nnew.\n")
    text = collect.collected(BEFORE, collect.fragments(tmp_path))
    assert "### Added\n\n- Something new.\n\n### Fixed\n\n- A new one.\n- An old one.\n\n## [0.1.0]" in text
    assert text.endswith("- The first.\n")


@pytest.mark.parametrize(("name", "text"), [("x.md", "a"), ("x.nothing.md", "a"), ("x.added.md", " \n")])
def test_a_fragment_without_kind_or_text_is_refused(collect: ModuleType, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match=name.replace(".", r"\.")):
        collect.fragments(tmp_path)


def test_a_changelog_without_an_unreleased_version_is_refused(collect: ModuleType) -> None:
    with pytest.raises(SystemExit, match="unreleased"):
        collect.collected("# Changelog\n", [])

"""Where things lie: a backend's folder, its five classes, and what adding one touches."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from attn_backends.registry import get_backend
from attn_backends.registry.table import BUILT_IN, BackendEntry

ROOT = Path(__file__).parent.parent
FOLDERS = ROOT / "attn_backends" / "backends"
FILE_OF = {"impl_cls": "impl", "metadata_cls": "metadata", "builder_cls": "metadata", "state_cls": "state"}
MOST_PLUGIN_LINES = 100


def folder_of(entry: BackendEntry) -> Path:
    return ROOT / Path(*entry.target.partition(":")[0].split(".")[:-1])


def backend(entry: BackendEntry) -> Any:
    """The class, without what its library or its probe would refuse here."""
    module, _, name = entry.target.partition(":")
    if "triton" in module:
        pytest.importorskip("triton", reason="needs triton")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_a_backend_is_a_folder_of_its_name(entry: BackendEntry) -> None:
    module = entry.target.partition(":")[0].split(".")
    assert module[-1] == "backend"
    assert module[-2] == entry.name.lower()
    assert folder_of(entry).is_relative_to(FOLDERS)


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_each_class_is_in_the_file_of_its_kind(entry: BackendEntry) -> None:
    """A backend has those of the files that it does not inherit: of the base, or of its family."""
    made, own = backend(entry), folder_of(entry)
    for attribute, file in FILE_OF.items():
        module = getattr(made, attribute).__module__
        path = ROOT / Path(*module.split(".")).with_suffix(".py")
        inherited = path.is_relative_to(ROOT / "attn_backends" / "interface") or path.parent == own.parent
        assert path.stem == file, f"{module} holds {attribute}"
        assert path.parent == own or inherited, f"{attribute} of {entry.name} lies in {module}"


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_options_are_in_the_file_of_options(entry: BackendEntry) -> None:
    if entry.options is not None:
        module = str(entry.options).partition(":")[0]
        assert module.endswith((".options", ".tuning")), module


def test_no_folder_is_without_a_row() -> None:
    families = {path.parent.parent for path in FOLDERS.rglob("*/backend.py")} - {FOLDERS}
    folders = {path.parent for path in FOLDERS.rglob("backend.py")} - families
    assert folders == {folder_of(entry) for entry in BUILT_IN}


def test_the_example_of_a_backend_is_short() -> None:
    (plugin,) = (ROOT / "examples" / "plugin").glob("*.py")
    assert len(plugin.read_text().splitlines()) < MOST_PLUGIN_LINES


def test_names_are_those_of_the_rows() -> None:
    for entry in BUILT_IN:
        try:
            assert get_backend(entry.name).get_name() == entry.name
        except ImportError:
            continue  # its library is not here

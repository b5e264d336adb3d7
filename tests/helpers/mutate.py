"""A function with one piece of its source replaced, in the place of the real one."""

from __future__ import annotations
import __future__

import importlib.util
import inspect
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def mutate(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: str, after: str) -> None:
    """Put `after` where `before` stands, once, in a function of a module or class; it must do without `super()`."""
    held = inspect.getattr_static(owner, name)
    function = inspect.unwrap(held.__func__ if isinstance(held, staticmethod) else held)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(before) == 1, f"{name} has {source.count(before)} of {before!r}"
    flags = __future__.annotations.compiler_flag
    made: dict[str, Any] = {}
    exec(compile(source.replace(before, after), f"<mutated {name}>", "exec", flags), function.__globals__, made)
    monkeypatch.setattr(owner, name, made[name])


def mutated_module(module: ModuleType, folder: Path, before: str, after: str) -> ModuleType:
    """A copy of a module with a file of its own, which kernels are read from."""
    return copied_module(module, folder, (before, after))


def copied_module(module: ModuleType, folder: Path, *edits: tuple[str, str]) -> ModuleType:
    """The same with any number of pieces replaced, none of them among them."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    for before, after in edits:
        assert source.count(before) == 1, f"{module.__name__} has {source.count(before)} of {before!r}"
        source = source.replace(before, after)
    path = folder / f"mutated_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made

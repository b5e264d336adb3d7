"""A function with one piece of its source replaced, in the place of the real one."""

from __future__ import annotations
import __future__

import inspect
import textwrap
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

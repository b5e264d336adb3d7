"""Modules that a command imports before it looks for a backend, as `--import` names them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable


def import_modules(names: Iterable[str]) -> None:
    """Import modules that register backends.

    Raises:
        ValueError: one has no such name, or cannot be imported; says which option, and what to give.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, TypeError, ValueError) as error:
            raise ValueError(
                f"--import {name!r}: {error}; give a module that is installed, by its whole name: package.module"
            ) from error

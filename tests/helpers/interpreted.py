"""Kernels under Triton's interpreter: it decides at its first import whether they are, so a process of their own."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreted, in a process of its own")


def in_own_process(test: Callable[[], None]) -> Callable[[], None]:
    """Marks the test that starts it."""
    is_that_process = pytest.mark.skipif(INTERPRETED, reason="this is that process")
    too_old = pytest.mark.skipif(
        triton.__version__ < "3.7", reason="the interpreter of triton 3.6 fails with numpy 2.4"
    )
    return pytest.mark.first(is_that_process(too_old(test)))


def run_interpreted(file: str, keyword: str = "") -> None:
    """All tests of a file that do not want a GPU, and of these those that a `-k` keyword selects."""
    chosen = ["-k", keyword] if keyword else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *chosen, file],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def _quicken() -> None:
    """Without what Triton's interpreter repeats to no end, which is half of its time.

    It puts its functions in the place of the language's at each call of a device function: once a module is enough
    where all is interpreted. It works out whether integers overflow and, but for `debug`, drops the answer. And it
    makes and checks the shape of each tensor anew.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    put, done = interpreter._patch_lang, set()

    def put_once(function: Callable[..., object]) -> Any:
        if function.__module__ not in done:
            done.add(function.__module__)
            put(function)
        return interpreter._LangPatchScope()  # nothing to put back

    interpreter._patch_lang = put_once

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(type.shape if type.is_block() else ())

    make_checked_type = tl.block_type.__init__
    made: dict[object, tuple[Any, ...]] = {}

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(getattr(size, "value", size) for size in shape))
        if key not in made:
            make_checked_type(self, element_ty, shape)
            made[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = made[key]

    tl.tensor.__init__, tl.block_type.__init__ = make_tensor, make_type


if INTERPRETED and triton.__version__.startswith("3.7."):  # these are its insides: others are as slow as they are
    _quicken()

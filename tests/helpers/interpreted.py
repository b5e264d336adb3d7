"""Kernels under Triton's interpreter: it decides at its first import whether they are, so a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


if INTERPRETED and triton.__version__.startswith("3.7."):  # these are its insides: others are as slow as they are
    from tests.helpers.quick_interpreter import quicken

    quicken()

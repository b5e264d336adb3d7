"""TRITON passes the conformance kit: interpreted on a CPU, in a process of its own, and compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_backends.testing.conformance import BackendConformance
from tests.backends.large_cache import check_large_cache

triton = pytest.importorskip("triton", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The interpreter takes 10 ms a program: what has many is for a GPU.
SMALL = "not (long or medium or (nan and float8) or (window_edges and not 16))"


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(triton.__version__ < "3.7", reason="the interpreter of triton 3.6 fails with numpy 2.4")
def test_interpreted() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-k", SMALL, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreted, in a process of its own")
class TestTritonInterpreted(BackendConformance):
    backend_name = "TRITON"
    dtypes = (torch.float32,)  # the interpreter multiplies no bfloat16, and is slow: the others are for a GPU


@pytest.mark.gpu
class TestTriton(BackendConformance):
    backend_name = "TRITON"
    device = "cuda"


class _Half(BackendConformance):
    backend_name = "TRITON"
    device = "cuda"
    dtypes = (torch.float16,)


@pytest.mark.gpu
def test_large_caches() -> None:
    check_large_cache(_Half())

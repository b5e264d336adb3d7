"""TRITON_MLA passes the family's conformance kit: interpreted on a CPU, in a process of its own, and compiled on a GPU.

Interpreted, those cases run that say something of this kernel; TORCH_MLA runs all of what the family shares.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_backends.testing.conformance import MLAConformance

triton = pytest.importorskip("triton", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TELLING = ("small_decode or mixed_small or verify_lengths or head_counts or widths or written or Graph and "
           "replay or fp8 or page or Split")  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(triton.__version__ < "3.7", reason="the interpreter of triton 3.6 fails with numpy 2.4")
def test_interpreted() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-k", TELLING, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreted, in a process of its own")
class TestTritonMLAInterpreted(MLAConformance):
    backend_name = "TRITON_MLA"
    dtypes = (torch.float32, torch.float16)  # the interpreter multiplies no bfloat16


@pytest.mark.gpu
class TestTritonMLA(MLAConformance):
    backend_name = "TRITON_MLA"
    device = "cuda"

"""TRITON passes the conformance kit: interpreted on a CPU, in a process of its own, and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from attn_backends.testing.conformance import BackendConformance
from tests.backends.large_cache import check_large_cache
from tests.interpreted import in_own_process, only_interpreted, run_interpreted

# The interpreter takes 10 ms a program: what has many is for a GPU.
SMALL = "not (long or medium or (nan and float8) or (window_edges and not 16))"


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__, SMALL)


@only_interpreted
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

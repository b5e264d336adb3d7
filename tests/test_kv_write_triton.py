"""The write kernel against the plain scatter, interpreted: heads of keys and values, and latent rows of two parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends import kv_cache
from attn_backends.kv_cache import KVCache, write_kv, write_latent

triton = pytest.importorskip("triton", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreted, in a process of its own")
SLOTS = torch.tensor([7, -1, 0, 19, 12, -1])
PAGES, PAGE_SIZE = 5, 4
DTYPES = [torch.float32, torch.float16]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(triton.__version__ < "3.7", reason="the interpreter of triton 3.6 fails with numpy 2.4")
def test_interpreted() -> None:
    """Triton decides at its first import whether kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parent.parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def by_both(monkeypatch: pytest.MonkeyPatch, write: Any, cache: KVCache) -> None:
    """`write(cache)` by the kernel gives, bit for bit, what it gives by the scatter."""
    plain = KVCache(*(tensor.clone(memory_format=torch.preserve_format) for tensor in cache))
    write(plain)
    assert not torch.equal(plain.key, cache.key)
    monkeypatch.setattr(kv_cache, "_has_kernel", lambda cached: True)
    write(cache)
    for got, want in zip(cache, plain, strict=True):
        assert torch.equal(got, want)


@only_interpreted
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_latent_rows(monkeypatch: pytest.MonkeyPatch, cache_dtype: torch.dtype, scale: float) -> None:
    """576 columns, of which the parts are views of one projection, as models hand them over."""
    rows = torch.randn(len(SLOTS), 700)
    latent, rope_key = rows[:, 20:532], rows[:, 600:664]
    cache = KVCache(torch.randn(PAGES, PAGE_SIZE, 576).to(cache_dtype), torch.empty(PAGES, PAGE_SIZE, 0))
    by_both(monkeypatch, lambda to: write_latent(latent, rope_key, to.key, SLOTS, scale), cache)


@only_interpreted
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_keys_and_values(monkeypatch: pytest.MonkeyPatch, cache_dtype: torch.dtype) -> None:
    key, value = torch.randn(len(SLOTS), 3, 8), torch.randn(len(SLOTS), 3, 6)
    cache = KVCache(*(torch.randn(PAGES, 3, PAGE_SIZE, dim).to(cache_dtype).transpose(1, 2) for dim in (8, 6)))
    by_both(monkeypatch, lambda to: write_kv(key, value, to, SLOTS, 0.5, 2.0), cache)

"""The write kernel against the plain scatter, interpreted: heads of keys and values, and latent rows of two parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends import kv_cache
from attn_backends.kv_cache import KVCache, write_kv, write_latent
from tests.interpreted import in_own_process, only_interpreted, run_interpreted

SLOTS = torch.tensor([7, -1, 0, 19, 12, -1])
PAGES, PAGE_SIZE = 5, 4
DTYPES = [torch.float32, torch.float16]


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


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

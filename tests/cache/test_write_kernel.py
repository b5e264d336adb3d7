"""The write kernel against the plain scatter, interpreted: heads of keys and values, and latent rows of two parts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from attn_backends.cache import kv_cache
from attn_backends.cache.kv_cache import KVCache, quantise, write_kv, write_latent
from attn_backends.spec import FP8_DTYPES
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted
from tests.helpers.placed_caches import far_apart

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
    assert not torch.equal(plain.key.float(), cache.key.float())
    monkeypatch.setattr(kv_cache, "_has_kernel", lambda *tensors: True)
    write(cache)
    for got, want in zip(cache, plain, strict=True):
        assert_same(got, want)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype is want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)


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
@pytest.mark.parametrize("num_tokens", [2, len(SLOTS)])
def test_keys_and_values(monkeypatch: pytest.MonkeyPatch, num_tokens: int, cache_dtype: torch.dtype) -> None:
    """Of as many tokens as there are slots, or fewer."""
    key, value = torch.randn(num_tokens, 3, 8), torch.randn(num_tokens, 3, 6)
    cache = KVCache(*(torch.randn(PAGES, 3, PAGE_SIZE, dim).to(cache_dtype).transpose(1, 2) for dim in (8, 6)))
    by_both(monkeypatch, lambda to: write_kv(key, value, to, SLOTS, 0.5, 2.0), cache)


def new_at_random(random: Random, heads: int, dim: int) -> torch.Tensor:
    """Tokens as models hand them over: in one piece, as a part of a projection, heads first, or with columns apart."""
    num_tokens = len(SLOTS)
    whole, part = torch.randn(num_tokens, heads, dim), torch.randn(num_tokens, 9 + heads * dim)[:, 5:-4]
    heads_first, columns_apart = torch.randn(heads, num_tokens, dim), torch.randn(num_tokens, heads, 2 * dim)
    return random.choice([whole, part.view(whole.shape), heads_first.transpose(0, 1), columns_apart[..., ::2]])


@only_interpreted
@pytest.mark.parametrize("seed", range(30))
def test_tokens_at_random(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Keys and values that lie anyhow, divided by a scale each. Of 8 bits they need no rounding, see below, but some of
    them are too large before a scale divides them, or behind it."""
    random = Random(f"write {seed}")
    dtype, heads = random.choice([*DTYPES, *FP8_DTYPES]), random.randint(1, 3)
    is_fp8, dims = dtype in FP8_DTYPES, random.choices([3, 8, 20], k=2)
    scales = random.choices([1.0, 0.5, 4.0] if is_fp8 else [1.0, 0.5, 3.0], k=2)
    new = [new_at_random(random, heads, dim) for dim in dims]
    for tensor, scale in zip(new, scales, strict=True):
        if is_fp8:
            tensor.copy_(tensor.to(dtype).float() * scale)
            tensor[0, 0, :3] = torch.tensor([-1.0, 2.0, 4.0]) * torch.finfo(dtype).max
    cache = KVCache(*(torch.randn(PAGES, PAGE_SIZE, heads, dim).to(dtype) for dim in dims))
    stored = [quantise(tensor, dtype, 1.0) for tensor in new]
    by_both(monkeypatch, lambda to: write_kv(*new, to, SLOTS, *scales), cache)
    for tensor, plain, scale in zip(new, stored, scales, strict=True):
        if is_fp8 and scale >= 1:  # numbers near zero need rounding else
            assert_same(quantise(tensor, dtype, 1.0), plain)


@only_interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=str)
def test_tokens_and_pages_beyond_31_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Tokens of a long prompt, and pages of a large cache, begin at elements that 31 bits cannot count."""
    key, value = (far_apart(torch.randn(len(SLOTS), 2, 8).to(dtype).float()) for _ in range(2))
    cache = KVCache(*(far_apart(torch.zeros(PAGES, PAGE_SIZE, 2, 8).to(dtype)) for _ in range(2)))
    stored = quantise(key, dtype, 1.0)
    by_both(monkeypatch, lambda to: write_kv(key, value, to, SLOTS), cache)
    assert_same(quantise(key, dtype, 1.0), stored)


NOT_FINITE = [torch.nan, torch.inf, -torch.inf, 1e5]


@only_interpreted
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_fp8_saturates(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In the cache, and of a tensor alone whose heads lie apart. But for what is too large these numbers need no
    rounding, for which the interpreter has a rule of its own; of NaN it makes a number of e4m3."""
    new = torch.randn(len(SLOTS), 3, 20).to(dtype).float()[..., :8]
    new[0, 1, :4] = torch.tensor([0.0 if dtype is torch.float8_e4m3fn else torch.nan, *NOT_FINITE[1:]])
    plain = quantise(new, dtype, 1.0)
    cache = KVCache(*(torch.zeros(PAGES, PAGE_SIZE, 3, 8).to(dtype) for _ in range(2)))
    by_both(monkeypatch, lambda to: write_kv(new, new, to, SLOTS), cache)
    assert_same(quantise(new, dtype, 1.0), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("of_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp8_on_a_gpu(of_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Rounded as on a CPU, NaN too."""
    new = torch.randn(len(SLOTS), 3, 200, dtype=of_dtype)[..., :80] * 100
    new[0, 1, :4] = torch.tensor(NOT_FINITE)
    assert_same(quantise(new.cuda(), dtype, 1.0).cpu(), quantise(new, dtype, 1.0))
    caches = [KVCache(*torch.zeros(2, PAGES, PAGE_SIZE, 3, 80, device=device).to(dtype)) for device in ("cuda", "cpu")]
    for cache, device in zip(caches, ("cuda", "cpu"), strict=True):
        moved = new.to(device)
        write_kv(moved, moved, cache, SLOTS.to(device), 0.5, 2.0)
    for got, want in zip(*caches, strict=True):
        assert_same(got.cpu(), want)

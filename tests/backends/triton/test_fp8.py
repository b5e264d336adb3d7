"""TRITON and TRITON_MLA over caches of 8 bits: products of float16, and values that are read two by two."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from attn_backends import AttentionSpec, MLASpec, get_backend
from attn_backends.cache.kv_cache import KVCache
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, run_backend
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted

launch = pytest.importorskip("attn_backends.backends.triton.launch", reason="needs triton")

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [pytest.param("cpu", marks=only_interpreted), ON_GPU]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CACHED = [torch.float8_e4m3fn, torch.float8_e5m2]
ROWS = {"decode": ([70, 1, 33], [1, 1, 1]), "verify": ([70, 37], [3, 3]), "prefill": ([70, 20], [40, 20])}


@pytest.mark.rest
@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whether values were read two by two, a launch each."""
    told: list[int] = []
    ask = launch._can_be_pairs

    def tell(value: torch.Tensor) -> int:
        told.append(ask(value))
        return told[-1]

    monkeypatch.setattr(launch, "_can_be_pairs", tell)
    return told


def a_batch(device: str, dtype: torch.dtype, cache_dtype: torch.dtype, rows: Sequence[list[int]], dim: int) -> Batch:
    spec = AttentionSpec(4, 2, dim, dtype=dtype, cache_dtype=cache_dtype)
    return random_batch(get_backend("TRITON"), spec, *rows, device=device, k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("dim", [32, 48])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cache_dtype", CACHED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_right(
    device: str, dtype: torch.dtype, cache_dtype: torch.dtype, rows: str, dim: int, pairs: list[int]
) -> None:
    batch = a_batch(device, dtype, cache_dtype, ROWS[rows], dim)
    assert_matches(run_backend(get_backend("TRITON"), batch, want_lse=True), batch)
    assert pairs == ([] if rows == "prefill" else [1])


@pytest.mark.parametrize("cache_dtype", CACHED, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_no_pairs(device: str, cache_dtype: torch.dtype, pairs: list[int]) -> None:
    batch = a_batch(device, torch.float16, cache_dtype, ROWS["decode"], 32)
    wider = [torch.nn.functional.pad(of.view(torch.uint8), (0, 1)).view(cache_dtype) for of in batch.fresh_pool()]
    pool = KVCache(*(of[..., :-1] for of in wider))
    assert_matches(run_backend(get_backend("TRITON"), batch, want_lse=True, kv_cache=pool), batch)
    assert pairs == [0]


@pytest.mark.parametrize("heads", [3, 80])
@pytest.mark.parametrize("rows", ["decode", "verify"])
@pytest.mark.parametrize("cache_dtype", CACHED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_latent_rows(device: str, dtype: torch.dtype, cache_dtype: torch.dtype, rows: str, heads: int) -> None:
    if device == "cpu" and heads > 16 and dtype is torch.bfloat16:
        pytest.skip("tiles of 64 queries multiply bfloat16, which the interpreter does not")
    spec = MLASpec(heads, kv_lora_rank=48, qk_rope_head_dim=16, dtype=dtype, cache_dtype=cache_dtype)
    batch = random_batch(get_backend("TRITON_MLA"), spec, *ROWS[rows], device=device, k_scale=0.5)
    assert_matches(run_backend(get_backend("TRITON_MLA"), batch, want_lse=True), batch)


@pytest.mark.parametrize("columns", ["latent", "rope"])
@pytest.mark.parametrize("device", DEVICES)
def test_latent_queries_of_unlike_columns(device: str, columns: str) -> None:
    """Queries of bfloat16 are divided by the largest of all of their columns for products of float16."""
    spec = MLASpec(4, kv_lora_rank=48, qk_rope_head_dim=16, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    batch = random_batch(get_backend("TRITON_MLA"), spec, *ROWS["verify"], device=device, k_scale=0.5)
    for row in batch.rows:
        latent = row.query[..., : spec.qk_nope_head_dim]
        (row.query[..., spec.qk_nope_head_dim :] if columns == "latent" else latent).mul_(1e-6)
    assert_matches(run_backend(get_backend("TRITON_MLA"), batch, want_lse=True), batch)


@pytest.mark.parametrize("device", DEVICES)
def test_latent_rows_of_no_pairs(device: str) -> None:
    spec = MLASpec(3, kv_lora_rank=35, qk_rope_head_dim=17, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn)
    batch = random_batch(get_backend("TRITON_MLA"), spec, *ROWS["decode"], device=device)
    assert_matches(run_backend(get_backend("TRITON_MLA"), batch, want_lse=True), batch)


@pytest.mark.parametrize("name", ["TRITON", "TRITON_MLA"])
@pytest.mark.parametrize("device", DEVICES)
def test_queries_of_any_size(device: str, name: str) -> None:
    """float16 holds none of these, nor their logits."""
    dtypes = {"dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn, "scale": 1e-7}
    spec = AttentionSpec(4, 2, 32, **dtypes) if name == "TRITON" else MLASpec(4, **dtypes)
    batch = random_batch(get_backend(name), spec, *ROWS["decode"], device=device)
    for row, size in zip(batch.rows, (1e6, 1e-6, 0.0), strict=True):
        row.query.mul_(size)
    assert_matches(run_backend(get_backend(name), batch, want_lse=True), batch)

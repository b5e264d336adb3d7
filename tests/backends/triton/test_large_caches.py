"""TRITON and TRITON_MLA over caches of 2^32 elements, interpreted: of addresses alone, which take no memory."""

from __future__ import annotations

from random import Random

import pytest
import torch

from attn_backends import AttentionSpec, MLASpec, get_backend
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, run_backend
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted
from tests.helpers.placed_caches import in_large_cache

metadata = pytest.importorskip("attn_backends.backends.triton.metadata", reason="needs triton")

ROWS = {  # lengths, and their query tokens
    "short": ([20, 33, 64], [1, 2, 1]), "long": ([150, 90, 40], [1, 1, 3]), "prefill": ([150, 90, 33], [30, 90, 17]),
}  # fmt: skip
SEEDS = 32


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


def a_batch(seed: int) -> Batch:
    dice = Random(f"large caches {seed}")
    dtype, cached = dice.choice((torch.float16, torch.float32)), dice.choice((None, torch.float8_e5m2))
    seen = dice.choice(({}, {}, {"window_left": 50}))
    rows = dice.choice([*ROWS.values()])
    spec = AttentionSpec(4, 2, 64, dtype=dtype, cache_dtype=cached, **seen)
    if dice.random() < 0.25:
        spec = MLASpec(4, kv_lora_rank=48, qk_rope_head_dim=16, dtype=dtype, cache_dtype=cached)
        rows = (rows[0], [2] * len(rows[0]))
    name = "TRITON_MLA" if isinstance(spec, MLASpec) else "TRITON"
    return random_batch(get_backend(name), spec, *rows, page_size=dice.choice((16, 48, 64)), seed=seed)


@only_interpreted
@pytest.mark.parametrize("seed", range(SEEDS))
def test_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: seed % 2 == 0)
    batch = a_batch(seed)
    large, kv_cache = in_large_cache(batch)
    backend = get_backend("TRITON_MLA" if isinstance(batch.spec, MLASpec) else "TRITON")
    assert_matches(run_backend(backend, large, kv_cache=kv_cache, want_lse=True), large, str(batch.spec))

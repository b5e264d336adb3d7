"""Positions inside FLASHINFER's kernels: `pos_encoding_mode` as FlashInfer's decode wrappers have it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from attn_backends.backends.flashinfer.backend import FlashInferBackend
from attn_backends.backends.flashinfer.plans import Plan
from attn_backends.registry import get_backend
from attn_backends.registry.table import BUILT_IN, BackendImportError
from attn_backends.spec import FP8_DTYPES, AttentionSpec, KVCacheSpec, MLASpec, alibi_slopes
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, assert_pool, output_error, run_backend
from tests.helpers.flashinfer_emulated import EmulatedFlashInfer

CACHE = KVCacheSpec(64, 16)
ROPE = AttentionSpec(4, 2, 64, dtype=torch.float16, pos_encoding_mode="ROPE_LLAMA")
PAPER = replace(ROPE, pos_encoding_mode="NONE", alibi_slopes=alibi_slopes(4))


def drawn_layer(numbers: Random) -> tuple[AttentionSpec, KVCacheSpec]:
    kv_heads = numbers.choice((1, 2, 3))
    given: dict[str, Any] = {
        "pos_encoding_mode": "ROPE_LLAMA",
        "rope_scale": numbers.choice((1.0, numbers.uniform(0.25, 16.0))),
        "rope_theta": numbers.choice((1e4, numbers.uniform(100.0, 2e6))),
        "window_left": numbers.choice((-1, -1, int(2 ** numbers.uniform(0, 8)) - 1)),
        "logits_soft_cap": numbers.choice((None, None, numbers.uniform(1.0, 50.0))),
        "sinks": numbers.random() < 0.25,
        "causal": numbers.random() < 0.9,
        "scale": numbers.choice((None, numbers.uniform(0.03, 0.2))),
        "dtype": numbers.choice((torch.float16, torch.bfloat16)),
    }
    heads = kv_heads * numbers.choice((1, 2, 3, 4, 5)), kv_heads, numbers.choice((64, 128, 256))
    return AttentionSpec(*heads, **given), KVCacheSpec(
        64, numbers.choice((1, 8, 16, 32)), numbers.choice(("NHD", "HND"))
    )


@pytest.mark.parametrize("block", [*range(3), *(pytest.param(more, marks=pytest.mark.long) for more in range(3, 10))])
def test_random_layers_rotate_as_the_reference_does(block: int) -> None:
    """200 layers, heads, pages and rows that nobody chose, decodes, chunks and whole prompts together."""
    numbers = Random(f"rope {block}")
    for _ in range(20):
        spec, cache = drawn_layer(numbers)
        rows = sorted(numbers.choice((1, 1, numbers.randint(2, 20))) for _ in range(numbers.randint(1, 4)))
        seq_lens = [row + numbers.choice((0, numbers.randint(1, 150))) for row in rows]
        scales = numbers.choice(((1.0, 1.0), (numbers.uniform(0.2, 0.6), numbers.uniform(1.5, 3.0))))
        batch = random_batch(
            EmulatedFlashInfer, spec, seq_lens, rows, page_size=cache.page_size, layout=cache.layout,
            seed=numbers.randrange(1 << 30), k_scale=scales[0], v_scale=scales[1],
        )  # fmt: skip
        padded = numbers.choice((0, 0, 2))
        result = run_backend(EmulatedFlashInfer, batch, want_lse=numbers.random() < 0.5, num_padded_reqs=padded)
        assert_matches(result, batch, f"{spec}, {cache}, {rows} of {seq_lens}")
        assert_pool(result.kv_cache, batch.pool_after(), str(spec), batch.has_exact_scales)


@pytest.mark.parametrize("changed", [{"rope_theta": 1.1e4}, {"rope_scale": 1.01}, {"pos_encoding_mode": "NONE"}])
def test_another_rotation_shows(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(EmulatedFlashInfer, ROPE, [300, 40], [1, 12])
    right = output_error(run_backend(EmulatedFlashInfer, batch).output, batch.expected()[0])
    kept = Plan._constants
    monkeypatch.setattr(Plan, "_constants", lambda plan: kept(plan) | changed)
    wrong = output_error(run_backend(EmulatedFlashInfer, batch).output, batch.expected()[0])
    assert right < batch.tolerance < wrong


def test_off_by_default() -> None:
    assert AttentionSpec(4, 2, 64).pos_encoding_mode == "NONE"
    assert not AttentionSpec(4, 2, 64).encodes_positions


@pytest.mark.parametrize("name", [entry.name for entry in BUILT_IN if not entry.name.startswith("FLASHINFER")])
def test_every_other_backend_refuses_it_by_name(name: str) -> None:
    try:
        backend = get_backend(name)
    except BackendImportError as error:
        pytest.skip(str(error))
    spec = MLASpec(16, pos_encoding_mode="ROPE_LLAMA") if backend.capabilities().mla else ROPE
    (told,) = [each for each in backend.reject(spec, CACHE, "cpu") if each.code == "rope"]
    assert str(told).startswith("rope: got pos_encoding_mode=ROPE_LLAMA; supported: layers without it")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"pos_encoding_mode": "ALIBI"}, "allowed: NONE, ROPE_LLAMA. For ALiBi leave it out, and give alibi_slopes"),
        ({"rope_theta": 5e5}, "set pos_encoding_mode to ROPE_LLAMA"),
        ({"pos_encoding_mode": "ROPE_LLAMA", "alibi_slopes": alibi_slopes(8)}, "excludes alibi_slopes"),
        ({"pos_encoding_mode": "ROPE_LLAMA", "head_dim": 63}, "even head_dim"),
        ({"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 0.0}, "both must be positive"),
        (
            {"pos_encoding_mode": "ROPE_LLAMA", "causal": False, "attention_type": "encoder_decoder"},
            "no common positions",
        ),
    ],
)
def test_rotations_without_a_meaning(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AttentionSpec(**{"num_qo_heads": 8, "num_kv_heads": 8, "head_dim": 64, **given})


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            replace(ROPE, cache_dtype=torch.float8_e4m3fn),
            "rope: got ROPE_LLAMA over torch.float8_e4m3fn; supported: 16-bit",
        ),
        (replace(PAPER, alibi_slopes=(0.5, 0.25, 0.1, 0.2)), "supported: slopes of ALiBi's paper"),
        (replace(PAPER, logits_soft_cap=30.0), "alibi: got alibi_slopes with logits_soft_cap; supported: either one"),
    ],
)
def test_what_its_kernels_do_not_have(spec: AttentionSpec, told: str) -> None:
    assert told in "; ".join(map(str, FlashInferBackend.reject(spec, CACHE, "cuda")))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 12, 20])
def test_slopes_of_the_paper_are_served(num_heads: int) -> None:
    """To what float32 holds of them, as models keep them; what a query's index shifts is taken out of the LSE."""
    slopes = torch.tensor(alibi_slopes(num_heads)).tolist()
    spec = replace(PAPER, num_qo_heads=num_heads, num_kv_heads=1, alibi_slopes=tuple(slopes))
    for window in (-1, 37):
        layer = replace(spec, window_left=window)
        assert not EmulatedFlashInfer.reject(layer, CACHE, "cpu")
        batch = random_batch(EmulatedFlashInfer, layer, [1, 90, 61, 200], [1, 1, 5, 20])
        assert_matches(run_backend(EmulatedFlashInfer, batch, want_lse=True), batch, f"{num_heads} heads, {window}")


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_slopes_over_fp8_caches(num_kv_heads: int, cache_dtype: torch.dtype) -> None:
    """FlashInfer's `IsInvalid` (attention/prefill.cuh) leaves out rotations over a byte a number, and no slopes."""
    spec = replace(PAPER, num_kv_heads=num_kv_heads, cache_dtype=cache_dtype)
    assert not EmulatedFlashInfer.reject(spec, CACHE, "cpu")
    batch = random_batch(EmulatedFlashInfer, spec, [1, 90, 61, 200], [1, 1, 5, 20], k_scale=0.5, v_scale=2.0)
    assert_matches(run_backend(EmulatedFlashInfer, batch, want_lse=True), batch)

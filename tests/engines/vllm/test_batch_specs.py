"""The batches of vLLM's own tests of attention backends, through the adapter's classes and through vLLM's attention for
CPUs, against float64.

The numbers are those of BATCH_SPECS in vLLM's tests/v1/attention/test_attention_backends.py but the encoder-only ones,
and those of the steps that verify drafts, in test_mla_backends.py beside it.
"""

from __future__ import annotations

import pytest
from vllm.v1.attention.backends import cpu_attn

from attn_backends.adapters.vllm import served
from tests.engines.vllm.batches import Batch, run

SPECS: dict[str, tuple[list[int], list[int]]] = {  # lengths, and how many of each are new
    "small_decode": ([32, 40], [1, 1]),
    "small_prefill": ([32, 40], [8, 8]),
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "medium_decode": ([128, 256, 512, 1024] * 2, [1] * 8),
    "medium_prefill": ([256, 512, 1024, 2048], [16] * 4),
    "mixed_medium": ([512, 1024, 2048] * 2, [1, 1, 1, 7, 7, 7]),
    "large_decode": ([2048] * 32, [1] * 32),
    "large_prefill": ([4096] * 8, [32] * 8),
    "mixed_large": ([1024, 2048, 4096] * 2, [1, 1, 1, 32, 32, 32]),
    "single_decode": ([1024], [1]),
    "single_prefill": ([1024], [64]),
    "spec_decode_small": ([128, 256, 512, 1024], [4] * 4),
    "spec_decode_medium": ([512, 1024, 2048] * 2, [8] * 6),
}


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("name", SPECS)
def test_ours_matches_float64(name: str, layout: str) -> None:
    batch = Batch(*SPECS[name], layout)
    assert (run(served.CPU_ATTN__TORCH, batch, layout) - batch.expected()).abs().max() < 1e-5


@pytest.mark.parametrize("name", SPECS)
def test_ours_is_as_near_to_float64_as_vllms_own(name: str) -> None:
    batch = Batch(*SPECS[name], "LBHNC")
    expected = batch.expected()
    ours, theirs = (
        (run(backend, batch, "LBHNC") - expected).abs().max().item()
        for backend in (served.CPU_ATTN__TORCH, cpu_attn.CPUAttentionBackend)
    )
    assert theirs < 1e-5
    assert ours < 2 * theirs + 1e-6

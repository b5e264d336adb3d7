"""The batches of vLLM's own tests of MLA backends, through its layer on our MLA family and on its attention for CPUs,
against float64.

The numbers are those of BATCH_SPECS in vLLM's tests/v1/attention/test_mla_backends.py, with DeepSeek-R1's sizes at the
largest of its tensor_parallel_size, 16.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from attn_backends.adapters.vllm import served
from tests.engines.vllm.latent_batches import LatentBatch, Weights, config_of, run
from tests.engines.vllm.test_batch_specs import SPECS

LATENT = {name: spec for name, spec in SPECS.items() if name != "mixed_large"}  # which only other backends' tests have


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return config_of(tmp_path_factory.mktemp("latent"))


@pytest.mark.parametrize("name", LATENT)
def test_ours_is_as_near_to_float64_as_vllms_own(name: str, config: Any) -> None:
    batch = LatentBatch(*LATENT[name])
    expected = batch.expected(Weights())
    ours, theirs = (
        (run(backend, batch, config) - expected).abs().max().item()
        for backend in (served.CPU_MLA__TORCH_MLA, CPUMLABackend)
    )
    assert theirs < 1e-5
    assert ours < min(1e-5, 2 * theirs + 1e-6)

"""The kit finds what it should: it fails on every mutation of TORCH, and passes on TORCH."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.testing.conformance import BackendConformance
from attn_backends.testing.quick_check import quick_check
from tests.helpers.mutants import (
    Backend,
    declares,
    mutant,
    other_batch,
    other_forward,
    other_scales,
    other_spec,
    with_seq_lens,
)
from tests.helpers.mutations import LESS, MUTATIONS, SERVES_ALL, Mutation


def kit(backend: Backend) -> BackendConformance:
    return type("Kit", (BackendConformance,), {"backend_name": "TORCH", "backend": backend})()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_kit_fails_on(mutation: Mutation) -> None:
    with pytest.raises(AssertionError):
        mutation.case(kit(mutation.backend))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_kit_passes_without(mutation: Mutation) -> None:
    mutation.case(kit(TorchBackend))


def test_the_unchanged_seams_pass() -> None:
    """A mutant that changes nothing passes, so a failure above is the mutation's."""
    for backend in (
        other_spec(lambda spec: spec),
        other_batch(lambda common: with_seq_lens(common, common.seq_lens_cpu)),
        other_scales(lambda k, v: (k, v)),
        other_forward(lambda forward, layer, given: forward(**given)),
        mutant(capabilities=declares(lse=True)),
    ):
        assert kit(backend).test_features("gpt_oss", torch.float32) is None
        assert kit(backend).test_cache_dtypes(torch.float8_e4m3fn, "NHD", torch.float32) is None


def test_quick_check_finds_a_dropped_soft_cap() -> None:
    results = quick_check(other_spec(lambda spec: replace(spec, logits_soft_cap=None)))
    assert {result.name for result in results if not result.ok} == {"soft_cap", "gemma2"}
    assert all(result.ok for result in quick_check(TorchBackend))


def test_quick_check_reports_refusals_and_silence() -> None:
    refused = {result.name: result for result in quick_check(mutant(capabilities=LESS))}
    assert refused["soft_cap"].ok
    assert refused["soft_cap"].detail == "refused: soft_cap"
    silent = {result.name: result for result in quick_check(mutant(capabilities=LESS, reject=SERVES_ALL))}
    assert not silent["soft_cap"].ok
    assert "not refused" in silent["soft_cap"].detail

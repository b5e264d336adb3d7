"""Lint finds what it should: each seeded fault by the right check, code and place, whatever the seed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.testing.lint.finding import CODES
from attn_backends.testing.lint.run import CHECKS
from attn_backends.testing.lint.subject import Subject
from tests.helpers.flashinfer_emulated import EmulatedFlashInfer
from tests.helpers.lint_mutants import MUTATIONS, LintMutation
from tests.helpers.toy_backend import ToyBackend


def findings(backend: Any, check: str, seed: int) -> list[str]:
    found = list(CHECKS[check](Subject(backend, seed=seed)))
    assert {each.code for each in found} <= set(CODES)
    assert all(vars(each).values() for each in found), "a finding lacks code, where, what or hint"
    return list(map(str, found))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
@pytest.mark.sampled
def test_lint_finds(mutation: LintMutation, seed: int) -> None:
    """The check stops at the finding: it is a generator."""
    instead = []
    for each in CHECKS[mutation.check](Subject(mutation.backend, seed=seed)):
        if each.code in mutation.code.split("|") and re.search(mutation.where, str(each)):
            return
        instead.append(str(each))
    pytest.fail(f"found instead: {instead}")


def test_they_are_many() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40


@pytest.mark.parametrize("check", sorted({mutation.check for mutation in MUTATIONS} | set(CHECKS)))
def test_it_finds_nothing_without(check: str) -> None:
    assert findings(TorchBackend, check, 2) == []


def test_the_toys_builder_is_pure() -> None:
    assert [each for each in findings(ToyBackend, "builders", 0) if each.startswith("metadata")] == []


def test_it_finds_an_engines_host_tensors_in_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps them out is the batch's copy; without it, a builder that keeps host lengths keeps the engine's."""
    backend = EmulatedFlashInfer
    assert findings(backend, "host tensors", 0) == []
    whole = CommonAttentionMetadata.from_tensors

    def uncopied(page_size: int, *given: Any) -> CommonAttentionMetadata:
        return replace(whole(page_size, *given), seq_lens_cpu=given[3])

    monkeypatch.setattr(CommonAttentionMetadata, "from_tensors", staticmethod(uncopied))
    assert [each for each in findings(backend, "host tensors", 0) if each.startswith("metadata-aliases-host")]

"""`verify` finds what it should: each broken backend within a bounded number of cases, and nothing in TORCH."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from attn_backends.backends.torch.backend import TorchBackend
from tests.helpers.quick_native import quick_native
from tests.helpers.verify_mutants import MUTATIONS, VerifyMutation, first_finding, outcomes

SEEDS = range(64)


@pytest.fixture(autouse=True, scope="module")
def _shapes_that_nobody_chose() -> Iterator[None]:
    with quick_native():
        yield


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
@pytest.mark.sampled
def test_verify_finds(mutation: VerifyMutation) -> None:
    found = first_finding(mutation.backend, SEEDS)
    assert found, f"{len(SEEDS)} cases find nothing"
    assert re.search(mutation.told, found), found


def test_verify_finds_nothing_else() -> None:
    """All cases pass on the whole TORCH, so that each finding is the mutation's."""
    found = [outcome for outcome in outcomes(TorchBackend, SEEDS) if outcome.finding]
    assert not found, [(outcome.seed, outcome.finding) for outcome in found]

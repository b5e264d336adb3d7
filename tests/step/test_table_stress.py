"""10,000 random scheduler steps, with every tensor checked against the plain compiler at each of them."""

from __future__ import annotations

import pytest

from attn_backends.step.table import StepTable
from tests.helpers.step_walk import CACHE, LIMITS, SIDES, StepWalk

EVENTS = {"admit", "resume", "prefix hit", "chunk", "decode", "verify", "preempt", "swap", "abort", "finish", "advance"}


@pytest.mark.first
@pytest.mark.parametrize("num_steps", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_steps(num_steps: int) -> None:
    """On memory shared with the host, and on a copy that is brought up to date by copies of few pages."""
    tables = [StepTable(LIMITS, CACHE, make_side=side) for side in SIDES.values()]
    walk = StepWalk(tables, seed=0)
    walk.run(num_steps)
    assert set(walk.seen) == EVENTS
    assert min(walk.seen.values()) > num_steps // 100, walk.seen

"""A step table under edits and steps in any order, against a list of page lists, on both sides.

Hypothesis drew these rules before, and passed at every seed where pages of a request that had left were handed to the
next one in its row: that takes a step, an append to the last row, its leave, a step that moves no row, an enter and a
step. Drawn evenly, as `EditWalk` does, it takes about a hundred calls to come by.
"""

from __future__ import annotations

import numpy as np
import pytest

from attn_backends.step.table import StepTable
from tests.helpers.edit_walk import EditWalk, mutable_arguments
from tests.helpers.step_walk import (
    CACHE,
    LIMITS,
    SIDES,
    assert_both_sides_equal,
    assert_step,
    compiled,
    copied_at_once,
    table_of_three,
)

EVENTS = {"enter", "extend", "append", "leave", "swap_rows", "arrange", "refused", "step", "advance"}


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_edits_and_steps(seed: int) -> None:
    """On memory shared with the host, and on copies that are brought up to date by few pages at a time, or by all."""
    sides = (*SIDES.values(), copied_at_once)
    walk = EditWalk([StepTable(LIMITS, CACHE, make_side=side) for side in sides], seed)
    walk.run(500)
    assert set(walk.seen) == EVENTS
    assert min(walk.seen.values()) > 20, walk.seen
    assert walk.overwritten == mutable_arguments(StepTable), "say in EditWalk how to call what is new"


@pytest.fixture(params=SIDES)
def table(request: pytest.FixtureRequest) -> StepTable:
    table = table_of_three(request.param)
    table.step([11, 7, 4], [1, 1, 1])
    return table


@pytest.mark.parametrize("pages", [[21, 22], [21, 22, 23, 24, 25, 26], list(range(21, 33))], ids=len)
def test_a_row_is_its_new_requests_alone(table: StepTable, pages: list[int]) -> None:
    """The last request leaves with a page that was never sent, and others step before another one takes its row."""
    table.append([2], [31])
    table.leave("c")
    assert_step(table.step([11, 7], [1, 1]), compiled(table, [11, 7], [1, 1]))
    assert table.enter("d", pages) == 2
    assert_step(table.step([11, 7, 7], [1, 1, 1]), compiled(table, [11, 7, 7], [1, 1, 1]))
    assert_both_sides_equal(table)


def test_appended_pages_are_those_of_the_call(table: StepTable) -> None:
    """Whatever the caller's arrays hold when the step comes."""
    rows, pages = np.array([0, 1]), np.array([30, 31], np.int32)
    table.append(rows, pages)
    rows[:], pages[:] = [1, 2], [46, 46]
    assert_step(table.step([12, 8], [1, 1]), compiled(table, [12, 8], [1, 1]))
    assert_both_sides_equal(table)

"""What travels to the device: from a guarded ring, in copies of a fixed size, and no more than a step needs."""

from __future__ import annotations

import torch

from attn_backends.spec import KVCacheSpec, Limits
from attn_backends.step.device import DeviceCopy
from attn_backends.step.table import StepTable
from tests.helpers.step_walk import CACHE, LIMITS, assert_both_sides_equal, assert_step, compiled


class Copying:
    """A CUDA event of a copy that runs until somebody waits for it."""

    made: list[Copying]

    def __init__(self) -> None:
        self.made.append(self)
        self.is_done = True
        self.num_waits = 0

    def record(self) -> None:
        assert self.is_done, "the buffer was used again while its last copy may still run"
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.num_waits += 1
        self.is_done = True


def test_a_staging_buffer_is_not_rewritten_while_its_copy_may_run() -> None:
    class Mine(Copying):
        made: list[Copying] = []  # noqa: RUF012 (one list for this test)

    table = StepTable(LIMITS, CACHE, make_side=lambda rows: DeviceCopy(rows, torch.device("cpu"), make_event=Mine))
    table.enter("a", [1, 2, 3])
    side = table.side
    assert isinstance(side, DeviceCopy)
    depth = len(side.ring.buffers)
    made = Mine.made[:depth]  # the others guard the ring of advances
    assert depth > 1
    for i in range(depth):
        table.step([i], [1])
    assert [event.num_waits for event in made] == [0] * depth  # the host runs ahead by that many
    assert all(not event.is_done for event in made)
    table.step([8], [1])
    assert sum(event.num_waits for event in made) == 1
    lens = sorted(int(buffer[0]) for buffer in side.ring.buffers)  # of the last steps, the first one overwritten
    assert lens == [*range(2, depth + 1), 9]


def test_one_event_guards_a_group_of_advances() -> None:
    class Mine(Copying):
        made: list[Copying] = []  # noqa: RUF012 (one list for this test)

    table = StepTable(LIMITS, CACHE, make_side=lambda rows: DeviceCopy(rows, torch.device("cpu"), make_event=Mine))
    table.enter("a", range(12))
    side = table.side
    assert isinstance(side, DeviceCopy)
    guards = Mine.made[len(side.ring.buffers) :]
    depth = len(side.ring_ahead.buffers)
    assert len(guards) * 4 == depth
    step = table.step([0], [1])
    for num_sent in range(1, depth + 1):
        step = table.advance(step)
        assert sum(not event.is_done for event in guards) == num_sent // 4  # behind the last copy of each group
    assert [(event.is_done, event.num_waits) for event in guards] == [(False, 0)] * len(guards)
    step = table.advance(step)
    assert [event.num_waits for event in guards] == [1, 0, 0, 0]
    for _ in range(3):
        step = table.advance(step)
    assert sum(event.num_waits for event in guards) == 1
    assert [event.is_done for event in guards] == [False] * len(guards)


def test_many_pages_go_in_several_copies() -> None:
    """The buffers never grow: what does not fit goes ahead, in copies of pages alone."""
    made: list[Copying] = []

    class Mine(Copying):
        pass

    Mine.made = made
    table = StepTable(
        LIMITS, CACHE, make_side=lambda rows: DeviceCopy(rows, torch.device("cpu"), max_pages_a_copy=5, make_event=Mine)
    )
    sizes = [len(buffer) for buffer in table.side.ring.buffers]  # type: ignore[attr-defined]
    for i in range(4):
        table.enter(f"r{i}", range(12 * i, 12 * i + 12))
    context, query = [40, 3, 0, 46 - 1], [1, 1, 9, 1]
    assert_step(table.step(context, query), compiled(table, context, query))
    assert_both_sides_equal(table)
    assert sum(event.num_waits for event in made[:4]) == 10 - 4  # 48 pages, 5 a copy
    assert sizes == [len(buffer) for buffer in table.side.ring.buffers]  # type: ignore[attr-defined]


def test_a_decode_step_moves_what_its_rows_need() -> None:
    """Not what their contexts are long."""
    sent = []
    for length in (160, 16000):
        limits, cache = Limits(8, 64, length + 16), KVCacheSpec(8 * (length // 16 + 1), 16)
        table = StepTable(limits, cache, make_side=lambda rows: DeviceCopy(rows, torch.device("cpu")))
        for i in range(8):
            first = i * (length // 16 + 1)
            table.enter(f"r{i}", range(first, first + length // 16))
        table.step([length - 1] * 8, [1] * 8)
        table.append([2, 5], [3 * (length // 16 + 1) - 1, 6 * (length // 16 + 1) - 1])
        table.step([length - 1] * 8, [1] * 8)
        assert isinstance(table.side, DeviceCopy)
        sent.append(table.side.packed.size)
        assert_both_sides_equal(table)
    assert sent[0] == sent[1] < 40


def test_the_largest_step_and_the_largest_advance_fit_their_buffers() -> None:
    """Every row has moved and has a new page, and all tokens are used; sizes fill what copies are rounded up to."""
    limits, cache = Limits(64, 256, 768), KVCacheSpec(192, 256)
    table = StepTable(limits, cache, make_side=lambda rows: DeviceCopy(rows, torch.device("cpu"), max_pages_a_copy=64))
    rows, context, query = range(64), [250] * 64, [193, *[1] * 63]
    for row in rows:
        table.enter(f"r{row}", [row])
    table.step(context, [1] * 64)
    for row in range(32):
        table.swap_rows(row, 63 - row)
    table.append(rows, range(64, 128))
    ids = list(range(256))
    step = table.step(context, query, ids)
    assert_step(step, compiled(table, context, query), ids)
    assert_both_sides_equal(table)
    step = table.step([511] * 64, [1] * 64)
    table.append(rows, range(128, 192))
    assert_step(table.advance(step), compiled(table, [512] * 64, [1] * 64))
    assert_both_sides_equal(table)

"""`StepTable`: rows and pages on both sides, steps equal to the plain compiler's, advance in place, refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from attn_backends.spec import KVCacheSpec, Limits
from attn_backends.step.device import DeviceCopy
from attn_backends.step.table import StepTable
from attn_backends.testing.kit.defaults import DEFAULTS, Default, torch_default
from tests.helpers.edit_walk import EditWalk
from tests.helpers.step_walk import (
    CACHE,
    LIMITS,
    SIDES,
    StepWalk,
    assert_both_sides_equal,
    assert_step,
    compiled,
    copied_at_once,
    table_of_three,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=SIDES)
def table(request: pytest.FixtureRequest) -> StepTable:
    return table_of_three(request.param)


@pytest.mark.parametrize(
    ("context", "query", "padded", "padded_query_len"),
    [
        ([11, 7, 4], [1, 1, 1], 0, 1),  # decode
        ([11, 7, 4], [1, 1, 1], 4, 1),  # padded for a graph
        ([8, 4, 12], [4, 4, 4], 2, 4),  # verify, padded
        ([11, 0, 3], [1, 8, 9], 0, 1),  # a decode, a whole prompt, a chunk
        ([11], [1], 0, 1),  # one row of three
        ([3, 0], [2, 3], 1, 2),
    ],
)
def test_a_step_is_the_plain_compilers(
    table: StepTable, context: list[int], query: list[int], padded: int, padded_query_len: int
) -> None:
    table.step([0, 0, 3], [9, 8, 14], list(range(1, 32)))  # leaves something in every place that is padding later
    for repeat in range(3):
        ids = [100 * repeat + i for i in range(sum(query))]
        step = table.step(context, query, ids, num_padded_reqs=padded, padded_query_len=padded_query_len)
        assert_step(step, compiled(table, context, query, padded, padded_query_len), ids)
        assert_both_sides_equal(table)


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("side", SIDES)
def test_a_step_under_other_defaults_of_torch(side: str, default: Default) -> None:
    ids = [5, 6, 7, 8]
    with torch_default(default):
        table = table_of_three(side)
        step = table.step([11, 7, 4], [1, 1, 2], ids, num_padded_reqs=2, padded_query_len=2)
        assert_step(step, compiled(table, [11, 7, 4], [1, 1, 2], 2, 2), ids)
        assert_both_sides_equal(table)


def test_the_last_step_is_the_callers_to_keep(table: StepTable) -> None:
    """The table remembers it, and does not hold it."""
    steps = [weakref.ref(table.step([11, 7], [1, 1]))]
    steps.append(weakref.ref(table.advance(table.step([8, 6], [1, 1]))))
    gc.collect()
    assert [step() for step in steps] == [None, None]


def test_the_page_table_is_as_wide_as_a_row_may_become(table: StepTable) -> None:
    capacity = -(-LIMITS.max_model_len // CACHE.page_size)
    assert table.step([11, 7], [1, 1]).common.page_table.shape == (2, capacity)


def test_flags(table: StepTable) -> None:
    common = table.step([11], [1], for_graph=True).common
    assert (common.for_graph, common.seq_lens_are_upper_bounds) == (True, False)
    assert not table.step([11], [1]).common.for_graph


def test_without_token_ids_those_on_the_device_stay(table: StepTable) -> None:
    step = table.step([11, 7, 4], [1, 1, 1], [5, 6, 7])
    step.token_ids[1] = 60
    assert table.step([11, 7, 5], [1, 1, 1]).token_ids.tolist() == [5, 60, 7]


def test_lengths_that_only_the_device_knows(table: StepTable) -> None:
    """The host's are bounds: they give shapes. All that is on the device follows from its own."""
    exact = torch.tensor([9, 2, 8], dtype=torch.int32)
    step = table.step([10, 4, 16], [1, 2, 1], num_padded_reqs=1, context_lens_on_device=exact)
    common, expected = step.common, compiled(table, exact.tolist(), [1, 2, 1], 1)
    assert common.seq_lens_are_upper_bounds
    assert common.seq_lens_cpu.tolist() == [11, 6, 17, 0]
    assert common.max_seq_len == 17
    for name in ("seq_lens", "slot_mapping", "query_start_loc", "paged_kv_indptr", "paged_kv_last_page_len"):
        assert getattr(common, name).tolist() == getattr(expected, name).tolist(), name
    pages = expected.paged_kv_indices.tolist()
    assert common.paged_kv_indices.tolist() == pages + [0] * (int(common.paged_kv_indptr_cpu[-1]) - len(pages))
    assert step.positions.tolist() == [9, 2, 3, 8, 0]

    step = table.advance(step)
    expected = compiled(table, [10, 4, 9], [1, 1, 1], 1)
    assert step.common.seq_lens_are_upper_bounds
    assert step.common.seq_lens_cpu.tolist() == [12, 7, 18, 0]
    for name in ("seq_lens", "slot_mapping", "query_start_loc", "paged_kv_indptr", "paged_kv_last_page_len"):
        assert getattr(step.common, name).tolist() == getattr(expected, name).tolist(), name
    assert step.positions.tolist() == [10, 4, 9, 0]


def test_pages_travel_along_with_an_advance(table: StepTable) -> None:
    """One a row, and so many at once that they go ahead in copies of their own."""
    step = table.step([11, 7], [1, 1])
    table.append([0, 1], [30, 31])
    step = table.advance(step)
    assert_step(step, compiled(table, [12, 8], [1, 1]))
    assert_both_sides_equal(table)
    table.extend("a", [32, 33, 34, 35, 36, 37, 38])
    table.extend("b", [39, 40, 41])
    for further in range(1, 4):
        step = table.advance(step)
        assert_step(step, compiled(table, [12 + further, 8 + further], [1, 1]))
        assert_both_sides_equal(table)


def test_advance_is_the_step_after(table: StepTable) -> None:
    """From chunks too, over the edge of a page, with padded rows that stay idle."""
    table.extend("a", [31])
    table.extend("b", [32])
    context, query = [8, 6, 3], [3, 1, 9]
    step = table.step(context, query, num_padded_reqs=2, padded_query_len=2)
    for advanced in range(1, 4):
        context, query = [c + q for c, q in zip(context, query, strict=True)], [1, 1, 1]
        sampled = torch.tensor([advanced, 2 * advanced, 3 * advanced])
        step = table.advance(step, sampled)
        assert step.num_advanced == advanced
        assert_step(step, compiled(table, context, query, 2))
        assert step.token_ids[:3].tolist() == sampled.tolist()


def test_a_step_is_in_place_and_its_host_side_is_kept(table: StepTable) -> None:
    first = table.step([10, 6, 3], [1, 1, 1])
    kept = {name: value.tolist() for name, value in vars(first.common).items() if name.endswith("_cpu")}
    second = table.advance(first)
    third = table.step([3, 0, 4], [5, 8, 9], num_padded_reqs=1)
    for name in ("query_start_loc", "seq_lens", "page_table", "slot_mapping"):
        addresses = {getattr(step.common, name).data_ptr() for step in (first, second, third)}
        assert len(addresses) == 1, name
    assert len({step.positions.data_ptr() for step in (first, second, third)}) == 1
    assert len({step.token_ids.data_ptr() for step in (first, second, third)}) == 1
    assert {name: value.tolist() for name, value in vars(first.common).items() if name in kept} == kept


def test_arrays_of_the_caller_are_not_kept(table: StepTable) -> None:
    context, query = np.array([10, 7], np.int32), np.array([1, 1], np.int32)
    common = table.step(context, query).common
    context += 1
    assert common.context_lens_cpu.tolist() == [10, 7]


def test_a_row_that_leaves_is_taken_by_the_last(table: StepTable) -> None:
    assert table.leave("a") == 0
    assert table.request_ids == ["c", "b"]
    assert [table.row_of("c"), table.row_of("b")] == [0, 1]
    assert table.pages_of("c").tolist() == [1, 47, 7, 8, 20]
    assert table.enter("a", [3]) == 2  # preempted and resumed
    assert_step(table.step([17, 7, 0], [1, 1, 4]), compiled(table, [17, 7, 0], [1, 1, 4]))


def test_pages_of_one_request_are_free_for_another_once_it_left(table: StepTable) -> None:
    table.leave("b")
    table.enter("b", [3, 10])
    table.extend("b", [47])
    assert table.pages_of("b").tolist() == [3, 10, 47]


MOVES: dict[str, Callable[[StepTable], object]] = {
    "leave": lambda table: table.leave("r1"),
    "leave of two": lambda table: (table.leave("r0"), table.leave("r2")),
    "leave, and another enters": lambda table: (table.leave("r1"), table.enter("new", [9])),
    "swap": lambda table: table.swap_rows(0, 3),
    "rotation": lambda table: (table.swap_rows(0, 3), table.swap_rows(3, 1), table.swap_rows(1, 2)),
    "arrange": lambda table: table.arrange(["r3", "r1"], [1, 5]),
    "swap and back": lambda table: (table.swap_rows(0, 3), table.swap_rows(3, 0)),
}


@pytest.mark.parametrize("move", MOVES)
def test_rows_that_move_cost_rows_and_not_contexts(move: str) -> None:
    """One copy, two i32 for a row that moved, and none of the pages that are on the device already."""
    table = StepTable(Limits(4, 64, 8192), KVCacheSpec(4096, 2), make_side=copied_at_once)
    for row in range(4):
        table.enter(f"r{row}", range(1000 * row, 1000 * row + 1000))
    table.step([1990] * 4, [1] * 4)
    MOVES[move](table)
    assert isinstance(table.side, DeviceCopy)
    sent: list[int] = []
    send = table.side.ring.send
    table.side.ring.send = lambda count: (sent.append(count), send(count))[1]  # type: ignore[method-assign]
    step = table.step([10] * (table.num_rows - 1), [1] * (table.num_rows - 1))
    assert_step(step, compiled(table, [10] * 3, [1] * (table.num_rows - 1)))
    assert_both_sides_equal(table)
    most = {"swap and back": 0, "leave, and another enters": 6}.get(move, 8)
    assert len(sent) == 1
    assert sent[0] <= 2 * (table.num_rows - 1) + 1 + most


# On a GPU.


@pytest.mark.gpu
@needs_gpu
def test_random_steps_on_a_gpu() -> None:
    walk = StepWalk([StepTable(LIMITS, CACHE), StepTable(LIMITS, CACHE, "cuda")], seed=1)
    walk.run(500)
    assert {"advance", "prefix hit", "verify", "preempt"} <= set(walk.seen)


@pytest.mark.gpu
@needs_gpu
def test_any_order_of_edits_and_steps_on_a_gpu() -> None:
    EditWalk([StepTable(LIMITS, CACHE), StepTable(LIMITS, CACHE, "cuda")], seed=1).run(500)


@pytest.mark.gpu
@needs_gpu
def test_no_step_waits_for_the_gpu() -> None:
    """Decodes with new pages, chunks, admissions, rows that move, exact lengths on the device, and the advance."""
    table = StepTable(LIMITS, CACHE, "cuda")
    table.enter("a", [1, 2, 3])
    exact = torch.tensor([5], dtype=torch.int32, device="cuda")
    sampled = torch.tensor([7], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        table.step([0], [4], list(range(4)))
        table.append([0], [9])
        table.enter("b", [4, 5])
        table.advance(table.step([11, 6], [1, 1], [1, 2], num_padded_reqs=2))
        table.swap_rows(0, 1)
        table.step([6, 12], [1, 1])
        table.leave("b")
        table.advance(table.step([6], [1], context_lens_on_device=exact), sampled)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_gpu
def test_the_host_may_run_ahead_of_the_gpu() -> None:
    """More steps than the ring has buffers, queued behind a kernel that keeps the GPU busy."""
    table = StepTable(LIMITS, CACHE, "cuda")
    table.enter("a", range(12))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    copies = []
    for i in range(40):
        step = table.step([i], [1], [1000 + i])
        copies.append((step.common.seq_lens.clone(), step.common.slot_mapping.clone(), step.token_ids.clone()))
    got = [[int(tensor) for tensor in tensors] for tensors in copies]
    assert got == [[i + 1, i, 1000 + i] for i in range(40)]

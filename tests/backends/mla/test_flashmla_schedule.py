"""FlashMLA's schedules by our kernel: interpreted against the rule that FlashMLA deals rows out by, one block after
the other, and on a GPU against FlashMLA."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_backends import MLASpec
from attn_backends.backends.mla.flashmla.library import FilledSchedule, Kernels, RefilledSchedule, load_kernels
from attn_backends.backends.mla.metadata import DecodeRows
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import make_layer
from tests.emulated import flashmla
from tests.helpers.flashmla_emulated import EmulatedFlashMLA
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted

schedules = pytest.importorskip("attn_backends.backends.mla.flashmla.schedule", reason="needs triton")
OVERHEAD = 5
Parts = list[list[int]]


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


def dealt_out(lens: list[int], num_parts: int) -> tuple[Parts, list[int]]:
    """By hand: parts take turns at blocks, and pay OVERHEAD for each row that they touch."""
    blocks = [max(-(-length // 64), 1) for length in lens]
    room = -(-sum(count + OVERHEAD for count in blocks) // num_parts) + OVERHEAD
    parts: Parts = []
    row = block = split = 0
    splits = [0]
    for _ in range(num_parts):
        first = (row, block, split)
        left = room
        while row < len(lens):
            if left >= blocks[row] - block + OVERHEAD:
                left -= blocks[row] - block + OVERHEAD
                splits.append(splits[-1] + split + 1)
                row, block, split = row + 1, 0, 0
                continue
            if left > OVERHEAD:
                block, split = block + left - OVERHEAD, split + 1
            break
        last = (row, block) if block else (row - 1, -(-lens[row - 1] // 64))
        is_split = [int(first[1] > 0), int(block > 0)]
        if first[0] == last[0]:
            is_split = [max(is_split)] * 2
        parts.append([first[0], last[0], first[1], last[1], first[2], *is_split])
    return parts, splits


@pytest.mark.parametrize("num_parts", [1, 2, 16, 46, 78, 108, 114, 132, 142, 148, 160, 192])
def test_splits_are_as_many_as_the_library_makes_room_for(num_parts: int) -> None:
    """Its partial results are for a split a row and one a part more; a schedule for more is never made."""
    for num_rows in (*range(1, 513, 7), 512):
        for longest in (1, 64, 4000):
            lens = [1 + (nth * 7919) % longest for nth in range(num_rows)]
            assert dealt_out(lens, num_parts)[1][-1] <= num_rows + num_parts


def test_room_of_another_size_is_refused() -> None:
    lens, parts, splits = (torch.ones(n, dtype=torch.int32) for n in (3, 16, 4))
    for wrong in ((parts.view(4, 4), splits), (parts.view(2, 8), splits[:3]), (parts.view(8, 2).t(), splits)):
        with pytest.raises(ValueError, match=r"a schedule of 3 rows is 8 numbers a part and 4 splits"):
            schedules.fill(lens, *wrong)


def filled(lens: list[int], num_parts: int, device: str) -> tuple[Parts, list[int]]:
    parts = torch.full((num_parts, 8), -7, dtype=torch.int32, device=device)
    splits = torch.full((len(lens) + 1,), -7, dtype=torch.int32, device=device)
    schedules.fill(torch.tensor(lens, dtype=torch.int32, device=device), parts, splits)
    assert bool((parts[:, 7] == -7).all())
    return parts[:, :7].tolist(), splits.tolist()


@only_interpreted
@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 5000), st.just(0), st.just(64)), min_size=1, max_size=12), st.integers(1, 132))
def test_rows_are_dealt_out_as_by_hand(lens: list[int], num_parts: int) -> None:
    assert filled(lens, num_parts, "cpu") == dealt_out(lens, num_parts)


@only_interpreted
def test_more_rows_than_are_read_at_a_time() -> None:
    lens = [37 * row % 900 for row in range(150)]
    assert filled(lens, 132, "cpu") == dealt_out(lens, 132)


def dealing(change: Any = None) -> Any:
    """A kernel that fills schedules by the rule, changed."""

    def decode(query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, dim: int, made: Any,
               splits: None, causal: bool) -> None:  # fmt: skip
        parts, found = dealt_out(lens.tolist(), 132)
        made.tile_scheduler_metadata = torch.tensor([[*part, 99] for part in parts], dtype=torch.int32)
        made.num_splits = torch.tensor(found, dtype=torch.int32)
        if change is not None:
            change(made)

    return decode


def _another_order(made: Any) -> None:
    made.tile_scheduler_metadata = made.tile_scheduler_metadata.roll(1, dims=1)


def _another_width(made: Any) -> None:
    made.tile_scheduler_metadata = made.tile_scheduler_metadata[:, :5].contiguous()


def _another_split(made: Any) -> None:
    made.num_splits[-1] += 1


def _elsewhere(made: Any) -> None:
    del made.num_splits


@only_interpreted
def test_a_schedule_is_known_if_the_kernel_makes_the_same() -> None:
    for change in (None, _another_order, _another_width, _another_split, _elsewhere):
        known = schedules.is_known(dealing(change), lambda: flashmla.get_mla_metadata()[0], torch.device("cpu"))
        assert known is (change is None), change
    assert not schedules.is_known(
        flashmla.flash_mla_with_kvcache, lambda: flashmla.get_mla_metadata()[0], torch.device("cpu")
    )  # the emulated kernel's are its own


def test_every_pass_but_the_first_begins_with_a_launch_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[torch.Tensor] = []
    monkeypatch.setattr(schedules, "fill", lambda lens, parts, splits: launches.append(lens))
    schedule = RefilledSchedule(Kernels(flashmla))
    lens = torch.tensor([3, 5], dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    schedule.plan(DecodeRows(2, 1, table, lens, lens, lens == 0), 4)
    seen = [(schedule.of(layer)[0], len(launches)) for layer in ("first", "second") * 3]
    assert [count for _, count in seen] == [0, 0, 1, 1, 2, 2]
    assert len({id(held) for held, _ in seen}) == 1
    assert all(given is lens for given in launches)


def test_the_kernel_is_asked_when_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not by who runs eager steps alone."""
    asked: list[torch.device] = []
    monkeypatch.setattr(Kernels, "can_refill", lambda kernels, device: asked.append(device) or True)
    batch = random_batch(EmulatedFlashMLA, MLASpec(4, dtype=torch.bfloat16), [70, 5], [1, 1], page_size=64)
    state = make_layer(EmulatedFlashMLA, batch).state
    seq_lens = torch.tensor([70, 5], dtype=torch.int32)
    rows = DecodeRows(2, 1, torch.zeros(2, 2, dtype=torch.int32), seq_lens, seq_lens, seq_lens == 0)
    assert isinstance(state.plan_decode(batch.spec, rows, None), FilledSchedule)
    assert not asked
    with state.graph_capture(2):
        for _ in range(2):
            assert isinstance(state.plan_decode(batch.spec, rows, None), RefilledSchedule)
    assert len(asked) == 1
    assert isinstance(state.plan_decode(batch.spec, replace(rows, idle=None), None), FilledSchedule)


def test_without_a_gpu_the_kernel_fills_its_own() -> None:
    assert not Kernels(flashmla).can_refill(torch.device("cpu"))


# The real one.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("heads", [1, 16, 128, 512])
def test_flashmla_makes_the_same(heads: int) -> None:
    try:
        kernels = load_kernels()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    if not kernels.fills_schedules:
        pytest.skip("an older FlashMLA")
    assert kernels.can_refill(torch.device("cuda"))
    generator = torch.Generator().manual_seed(heads)
    page = torch.zeros(1, 64, 1, 576, dtype=torch.bfloat16, device="cuda")
    for num_rows, longest in itertools.product((1, 2, 7, 64, 200), (1, 100, 3000, 60000)):
        lens = torch.randint(0, longest + 1, (num_rows,), generator=generator, dtype=torch.int32)
        table = torch.zeros(num_rows, -(-longest // 64), dtype=torch.int32, device="cuda")
        query = torch.zeros(num_rows, 1, heads, 576, dtype=torch.bfloat16, device="cuda")
        made = kernels.new_schedule()
        kernels.flash_mla_with_kvcache(query, page, table, lens.cuda(), 512, made, None, causal=True)
        parts, splits = filled(lens.tolist(), len(made.tile_scheduler_metadata), "cuda")
        assert (parts, splits) == dealt_out(lens.tolist(), len(parts))
        theirs = made.tile_scheduler_metadata[:, :7].tolist()
        busy = [part for part in parts if part[0] < num_rows]
        assert theirs[: len(busy)] == busy
        assert all(part[0] == num_rows for part in theirs[len(busy) :])
        assert made.num_splits.tolist() == splits

"""Work lists of the emulated fa2 in graphs: runs follow what lies in the int workspace, whoever wrote it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.emulated.flashinfer_schedule import fa2_tiles
from tests.emulated.flashinfer_work import PlanInfo, work_list, write_work
from tests.emulated.test_flashinfer import PAGE_SIZE, Pages, assert_as_reference
from tests.emulated.test_flashinfer_graphs import Captured

QUERIES, KEYS = [6, 6, 6, 6], [300, 6, 70, 150]  # 12 packed queries a row, 48 where FlashInfer takes a tile


class Listed:
    """A graph's wrapper, planned, with a list of its own for another tile."""

    def __init__(self, tile: int, pages: Pages | None = None, split: bool = True) -> None:
        self.captured = Captured("fa2")
        self.pages = pages or Pages(KEYS, QUERIES)
        self.captured.plan(self.pages)
        self.captured.fill(self.pages)
        wrapper = self.captured.wrapper
        self.info = PlanInfo(*wrapper._plan_info)._replace(tile_q=tile)
        wrapper._plan_info = list(self.info)
        starts = self.pages.qo_indptr.tolist()
        heads = self.pages.num_qo_heads, self.pages.num_kv_heads
        sizes = (starts[-1], *heads, PAGE_SIZE, self.pages.head_dim, True, -1, -1, not split)
        work = work_list(starts, fa2_tiles(starts, self.pages.indptr.tolist(), *sizes, tile_q=tile))
        if not split:
            self.info = self.info._replace(padded=len(work.requests), split=0)
            wrapper._plan_info = list(self.info)
        write_work(wrapper._int_workspace_buffer, self.info, work, PAGE_SIZE)

    def ints(self, at: int, count: int) -> torch.Tensor:
        whole: torch.Tensor = self.captured.wrapper._int_workspace_buffer
        return whole[at : at + 4 * count].view(torch.int32)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.captured.run(), self.captured.lse


@pytest.mark.parametrize("tile", [16, 64, 128])
@pytest.mark.parametrize("keys", [KEYS, [500, 0, 1, 40]], ids=["split", "idle"])
@pytest.mark.parametrize("split", [True, False])
def test_any_tile_is_followed(tile: int, keys: list[int], split: bool) -> None:
    """Rows of a tile each, and of several."""
    for queries in (QUERIES, [17, 1, 3, 3]):
        listed = Listed(tile, Pages(keys, queries), split)
        assert_as_reference(listed.run(), listed.pages.expected(listed.pages.spec(causal=True)))


@pytest.mark.parametrize("tile", [0, 32, 256])
def test_tiles_that_no_kernel_has(tile: int) -> None:
    listed = Listed(16)
    listed.captured.wrapper._plan_info = list(listed.info._replace(tile_q=tile))
    with pytest.raises(RuntimeError, match=f"Unsupported cta_tile_q: {tile}"):
        listed.run()


@pytest.mark.parametrize("where", ["requests_at", "o_indptr_at", "merge_at", "kv_tiles_at"])
@pytest.mark.parametrize("value", [-1, 1 << 20])
def test_what_leads_out_of_the_workspace_is_refused(where: str, value: int) -> None:
    listed = Listed(16)
    listed.ints(getattr(listed.info, where), 2)[0 if where != "merge_at" else 1] = value
    try:
        broken = listed.run()[0].isnan().any()
    except (IndexError, RuntimeError):
        return
    assert broken  # a part before the first one: nobody has written it


def test_tiles_too_small_for_a_row_leave_the_rest_unwritten() -> None:
    """8 queries are tokens 0 to 7 of a row of 9, two query heads each."""
    listed = Listed(64, Pages([40, 40, 0, 6], [9, 3, 6, 6]))
    listed.captured.wrapper._plan_info = list(listed.info._replace(tile_q=16))
    assert listed.run()[0].isnan().flatten(1).any(1).tolist() == [False] * 8 + [True] + [False] * 15


def test_entries_behind_the_mask_are_not_read_and_others_are() -> None:
    listed = Listed(16)
    count = int(listed.captured.wrapper._int_workspace_buffer[listed.info.valid_at : listed.info.stop].sum())
    for at in (listed.info.requests_at, listed.info.qo_tiles_at, listed.info.kv_tiles_at):
        listed.ints(at, listed.info.padded)[count:] = 1
    assert_as_reference(listed.run(), listed.pages.expected(listed.pages.spec(causal=True)))
    listed.ints(listed.info.qo_tiles_at, listed.info.padded)[count:] = 0
    listed.captured.wrapper._int_workspace_buffer[listed.info.valid_at + count] = 1
    assert listed.run()[0].isnan().any()


def test_parts_that_no_item_has_are_missed() -> None:
    """The first part of the first row: what is merged of it is what no tile has written."""
    listed = Listed(16)
    plain = listed.run()[0].clone()
    listed.captured.wrapper._int_workspace_buffer[listed.info.valid_at] = 0
    got = listed.run()[0]
    assert got[:6].isnan().flatten(1).any(1).all()
    assert got[6:].equal(plain[6:])


# Blocks that write outputs themselves.


def test_whole_rows_are_read_of_no_mask_and_merged_by_nothing() -> None:
    listed = Listed(16, split=False)
    info = listed.info
    for at, count in ((info.merge_at, info.most_tokens + 1), (info.num_tokens_at, 1), (info.kv_tiles_at, info.padded)):
        listed.ints(at, count).fill_(1 << 20)
    listed.captured.wrapper._int_workspace_buffer[info.valid_at :][: info.padded] = 0
    listed.captured.wrapper._float_workspace_buffer.fill_(255)  # NaN
    assert_as_reference(listed.run(), listed.pages.expected(listed.pages.spec(causal=True)))


def test_every_block_follows_what_it_finds() -> None:
    """Four rows of a tile each. An item that stands there twice writes the same again; one behind a row nothing."""
    listed = Listed(16, split=False)
    wrapper, info = listed.captured.wrapper, listed.info
    wrapper._plan_info = list(info._replace(padded=6))
    for (request, tile), broken in {(2, 0): False, (2, 1): False, (0, 99): False, (4, 0): True, (-1, 0): True}.items():
        listed.ints(info.requests_at, 6)[4:], listed.ints(info.qo_tiles_at, 6)[4:] = request, tile
        try:
            assert_as_reference(listed.run(), listed.pages.expected(listed.pages.spec(causal=True)))
            assert not broken
        except IndexError:
            assert broken


@pytest.mark.parametrize(
    ("where", "place", "value", "rows"),
    [("requests_at", 1, 0, [1]), ("qo_tiles_at", 3, 1, [3]), ("o_indptr_at", 1, 12, [1, 2]),
     ("o_indptr_at", 2, 13, [2, 3]), ("o_indptr_at", 1, 0, [0, 1]), ("o_indptr_at", 0, 24, [0])],
)  # fmt: skip
def test_tokens_that_another_block_writes_or_none_are_broken(
    where: str, place: int, value: int, rows: list[int]
) -> None:
    """Rows of 6 tokens; the others are as they were."""
    listed = Listed(16, split=False)
    plain = listed.run()[0].clone()
    listed.ints(getattr(listed.info, where), 5)[place] = value
    try:
        got = listed.run()[0]
    except RuntimeError:
        assert value == 24  # outputs behind the last
        return
    broken = got.isnan().flatten(1).any(1)
    assert [row for row in range(4) if broken[6 * row : 6 * row + 6].any()] == rows
    assert got[~broken].equal(plain[~broken])


def test_a_launch_of_too_few_blocks() -> None:
    listed = Listed(16, split=False)
    listed.captured.wrapper._plan_info = list(listed.info._replace(padded=3))
    assert listed.run()[0].isnan().flatten(1).any(1).tolist() == [False] * 18 + [True] * 6


def test_graphs_that_the_library_is_told_not_to_split_have_no_mask() -> None:
    """Its blocks are more than its items, and follow what stood behind these before."""
    captured, pages = Captured("fa2", disable_split_kv=True), Pages(KEYS, QUERIES)
    captured.plan(pages)
    captured.fill(pages)
    info = PlanInfo(*captured.wrapper._plan_info)
    assert (info.split, info.padded > 4) == (0, True)
    requests, qo_tiles = (
        captured.wrapper._int_workspace_buffer[at:][: 4 * info.padded].view(torch.int32)
        for at in (info.requests_at, info.qo_tiles_at)
    )
    for stale, expected in ((0, None), (77, IndexError)):
        requests[4:], qo_tiles[4:] = stale, 0
        with nullcontext() if expected is None else pytest.raises(expected):
            captured.run()
            assert_as_reference((captured.out, captured.lse), pages.expected(pages.spec(causal=True)))

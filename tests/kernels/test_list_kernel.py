"""The list of a prefill's tiles and splits that the device makes: by the rule, over random rows."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from attn_backends.spec import AttentionSpec
from tests.helpers.interpreted import interpreted, only_interpreted
from tests.helpers.tile_lists import draw, rest_of

splits = pytest.importorskip("attn_backends.kernels.prefill.splits", reason="needs triton")
split_tiles = pytest.importorskip("attn_backends.kernels.prefill.split_tiles")
list_kernel = pytest.importorskip("attn_backends.kernels.prefill.list_kernel")
split_launch = pytest.importorskip("attn_backends.kernels.prefill.split_launch")
launch = pytest.importorskip("attn_backends.kernels.prefill.launch")

BF16 = torch.bfloat16
EXACT = -1  # a target: as many splits as there are


class Listed(NamedTuple):
    """A prefill whose tiles are listed."""

    spec: AttentionSpec
    tile: Any
    query_lens: list[int]
    seq_lens: list[int]
    first_row: int
    target: int
    num_whole: int
    others_tokens: int = 0  # of a graph of mixed batches, if it has tokens
    num_tokens: int = 0
    by_length: bool = False
    split_blocks: int = 0

    def rows(self) -> tuple[list[int], list[int]]:
        """Query tokens and lengths of all rows, and of the tokens behind them; none of rows that are left alone."""
        query_lens = [length if row >= self.first_row and length > self.others_tokens else 0
                      for row, length in enumerate(self.query_lens)]  # fmt: skip
        if not self.num_tokens:
            return query_lens, self.seq_lens
        return [*query_lens, max(0, self.num_tokens - sum(self.query_lens))], [*self.seq_lens, 0]

    def load(self) -> Any:
        query_lens, seq_lens = self.rows()
        return splits.TileLoad.of(self.spec, self.tile, np.array(query_lens), np.array(seq_lens))


def check_list(case: Listed) -> int:
    """As the rule says: whole tiles of the longest rows first, then splits, each in a slot of its own, those of a tile
    side by side, then other whole tiles; no whole tile is in front of one of a longer row, or of a later one of its
    row, and no split in front of one that sees earlier keys of its row.
    Nothing is written behind the list, and counters begin at 0. Returns the number of splits."""
    spec, tile, target, num_whole, num_rows = case.spec, case.tile, case.target, case.num_whole, len(case.query_lens)
    of_tile, of_token = tile.rows, tile.group_size
    heads, load, starts = spec.num_kv_heads, case.load(), np.cumsum([0, *case.query_lens])
    rest = rest_of(load, num_whole)
    counts = splits.num_splits(splits.TileLoad(rest, load.blocks), heads, max(1, target), tile.min_blocks)
    made, listed = list_of(case, int(load.tiles.sum()))
    work_items = [each for each in listed if each[0] >= 0]
    assert [each[0] for each in listed[len(work_items) :]] == [-1] * (len(listed) - len(work_items))
    wanted = {
        (min(row, num_rows - 1), starts[row], query_len, nth * of_tile, seq_len, number, split)
        for row, (query_len, seq_len) in enumerate(zip(*case.rows(), strict=True))
        for nth in range(load.tiles[row])
        for number in [counts[row] if nth < rest[row] else 1]
        for split in range(number)
    }
    assert len(work_items) == len(wanted)
    assert {tuple(each[:7]) for each in work_items} == wanted
    num_split = sum(each[5] > 1 for each in work_items)
    assert num_split * heads <= target
    assert num_split <= made.max_split_items
    for number, (*_, several, split, _) in enumerate(work_items):
        assert (several > 1) == (num_whole <= number < num_whole + num_split)
        assert 0 <= split < several
    parts = [(start, split, -first) for _, start, _, first, _, several, split, _ in work_items if several > 1]
    assert parts == sorted(parts)
    slots = {(start, first): slot for _, start, _, first, _, several, _, slot in work_items if several > 1}
    taken = [slot + split for *_, several, split, slot in work_items if several > 1]
    assert sorted(taken) == list(range(num_split))
    assert all(slot == slots[start, first] for _, start, _, first, _, several, _, slot in work_items if several > 1)
    row_at = {start: row for row, start in enumerate(starts) if row == num_rows or case.query_lens[row]}
    if case.by_length and num_rows - case.first_row <= split_launch.FEW_ROWS:
        whole = [(-min(seq_len * of_token, (seq_len - query_len) * of_token + first + of_tile), row)
                 for row, _, query_len, first, seq_len, *_ in work_items]  # fmt: skip
    else:
        whole = [(-load.blocks[row_at[start]], row_at[start], -first)
                 for _, start, _, first, _, several, *_ in work_items if several < 2]  # fmt: skip
    assert whole == sorted(whole)
    return num_split


def check_split_by_length(case: Listed) -> list[int]:
    """Tiles come in the order of the keys that they see, of rows that see as many in theirs; each that sees more than a
    split is split as often as it must be, its splits side by side, and its first one's number is its slot. Returns the
    numbers of splits."""
    tile, starts = case.tile, np.cumsum([0, *case.query_lens])
    size = case.split_blocks * tile.keys * tile.group_size
    seen = []
    for row, (query_len, seq_len) in enumerate(zip(*case.rows(), strict=True)):
        for first in range(0, query_len * tile.group_size, tile.rows):
            end = (seq_len - query_len) * tile.group_size + first + tile.rows
            seen.append((-min(end, seq_len * tile.group_size), row, starts[row], query_len, first, seq_len))
    counts = [max(1, -(keys // size)) for keys, *_ in sorted(seen)]  # rounded up, of negative ones
    if case.target == EXACT:
        case = case._replace(target=max(1, sum(count for count in counts if count > 1) * case.spec.num_kv_heads))
    if sum(count for count in counts if count > 1) * case.spec.num_kv_heads > case.target:
        counts = [1] * len(counts)  # there is no room for them
    wanted: list[tuple[int, ...]] = []
    for (_, *numbers), count in zip(sorted(seen), counts, strict=True):
        wanted += [(*numbers, count, split, len(wanted)) for split in range(count)]
    made, listed = list_of(case, len(seen))
    assert list(map(without_idle_slot, listed[: len(wanted)])) == list(map(without_idle_slot, wanted))
    assert [each[0] for each in listed[len(wanted) :]] == [-1] * (len(listed) - len(wanted))
    assert sum(each[5] > 1 for each in wanted) <= made.max_split_items
    return counts


def without_idle_slot(work_item: Sequence[int]) -> tuple[int, ...]:
    """Of a tile that is whole no slot is read."""
    return tuple(work_item if work_item[5] > 1 else work_item[:7])


def list_of(case: Listed, num_tiles: int) -> tuple[Any, list[list[int]]]:
    """The list, and what it is after it was filled."""
    target, num_rows = case.target, len(case.query_lens) - case.first_row
    where = torch.empty(target * 128 * 64), torch.empty(2 * target * 128), torch.ones(700, dtype=torch.int32)
    wanted = splits.PrefillSplits(target, case.tile, case.num_whole, 0, case.by_length, case.split_blocks)
    made = split_launch.TileList(
        wanted, case.spec.num_kv_heads, launch.visible_range(case.spec), case.first_row, num_rows, num_tiles, 64, where,
        case.others_tokens, case.num_tokens,
    )  # fmt: skip
    held = torch.full((len(made.work_items) + 3, 8), -7, dtype=torch.int32)
    made.work_items = held[:-3]
    lens, starts = np.array(case.seq_lens), np.cumsum([0, *case.query_lens])
    made.fill(*(torch.from_numpy(each.astype(np.int32)) for each in (lens, starts)))
    assert (held[-3:] == -7).all()
    assert not where[2].any()
    return made, made.work_items.tolist()


test_interpreted, test_more_interpreted = interpreted(__file__, "kernel_")


@only_interpreted
@pytest.mark.parametrize("seed", [*range(40), *range(1000, 1040)])
def test_kernel_lists_every_split_once(seed: int) -> None:
    *case, part = draw(seed)
    listed = Listed(*case, 0)
    check_list(listed._replace(num_whole=int(part * listed.load().tiles.sum())))


@only_interpreted
@pytest.mark.parametrize("seed", range(2000, 2060))
def test_kernel_lists_tiles_by_their_own_lengths(seed: int) -> None:
    """Where none is split, of few rows; of more by their rows' lengths."""
    spec, tile, query_lens, seq_lens, first_row, *_ = draw(seed)
    lists = Random(seed).choice((draw(seed)[2:4], (query_lens[:64], seq_lens[:64])))
    check_list(Listed(spec, tile, *lists, min(first_row, len(lists[0]) - 1), 0, 0, by_length=True))


@only_interpreted
def test_kernel_splits_tiles_by_their_own_lengths() -> None:
    """Where there is room for as many splits, and none where there is not."""
    counts = []
    for seed in range(3000, 3060):
        dice = Random(f"by length {seed}")
        spec, tile, query_lens, seq_lens, first_row, *_ = draw(seed)
        query_lens, seq_lens = query_lens[:64], seq_lens[:64]
        target = dice.choice((1, 9, 132, 264, 5000)) * spec.num_kv_heads if seed % 3 else EXACT
        seq_lens = [length if dice.random() < 0.9 else 0 for length in seq_lens]  # of rows whose queries see no keys
        longest = max(seq_lens) // tile.keys + 1
        size = dice.randint(1, dice.choice((2, longest, longest + 1)))
        first_row = min(first_row, len(query_lens) - 1)
        case = Listed(spec, tile, query_lens, seq_lens, first_row, target, 0, by_length=True, split_blocks=size)
        counts.append(check_split_by_length(case))
    assert sum(max(each, default=0) > 1 for each in counts) > 15
    assert max(max(each, default=0) for each in counts) > 8


@only_interpreted
def test_kernel_lists_no_padding_behind_tiles_that_are_split() -> None:
    """Rows without queries, of which there may be more than are listed by the lengths of tiles."""
    spec, tile, lens = AttentionSpec(1, 1, 64, dtype=BF16), split_tiles.SplitTile(1, 128, 128), [3000] + [1] * 63
    case = Listed(spec, tile, lens, lens, 0, 54, 0, by_length=True, split_blocks=6)
    counts = check_split_by_length(case)
    padded = [*lens, *[0] * 30]
    assert check_split_by_length(case._replace(query_lens=padded, seq_lens=padded)) == counts
    assert max(counts) == 4


@only_interpreted
def test_kernel_lists_very_long_rows() -> None:
    """Of ten million keys and 128 query heads for each KV head, which are most of an int32; whole, and split."""
    spec, tile = AttentionSpec(128, 1, 64, dtype=BF16), split_tiles.SplitTile(128, 128, 128)
    case = Listed(spec, tile, [2, 1], [10_000_000, 8_000_000], 0, 9, 0, by_length=True, split_blocks=62_501)
    assert check_split_by_length(case) == [2, 2, 1]
    assert check_split_by_length(case._replace(target=1)) == [1, 1, 1]
    check_list(case._replace(target=0, split_blocks=0))


def draw_alike(seed: int) -> Listed:
    """Rows of which many are as long, or have no tokens; of mixed batches too. Of a number, or a part, of the tiles
    that are whole, up to all of them."""
    dice = Random(f"list alike {seed}")
    num_rows, group, heads = dice.choice((1, 9, 63, 64, 65, 150, 260)), dice.choice((1, 4, 9)), dice.choice((1, 3))
    lengths = [dice.randint(1, dice.choice((2000, 40000))) for _ in range(dice.choice((1, 2, 5)))]
    most = dice.choice((2, 40, 300))
    query_lens = [dice.choice((0, 1, most, most, dice.randrange(most))) for _ in range(num_rows)]
    seq_lens = [max(dice.choice(lengths), length) for length in query_lens]
    target = dice.choice((heads, 2 * heads, 9 * heads, 132, 132, 264))
    tile = split_tiles.SplitTile(group, 128, dice.choice((64, 128)))
    spec = AttentionSpec(heads * group, heads, 64, dtype=BF16)
    case = Listed(spec, tile, query_lens, seq_lens, dice.choice((0, 0, dice.randrange(num_rows))), target, 0)
    if dice.random() < 0.4:
        return case._replace(others_tokens=dice.choice((0, 1, 16)), num_tokens=sum(query_lens) + dice.choice((1, 700)))
    num_tiles = int(case.load().tiles.sum())
    num_whole = dice.choice((0, 1, num_tiles // 2, dice.randint(0, num_tiles), num_tiles - 1, num_tiles, num_tiles))
    return case._replace(num_whole=max(0, num_whole))


@only_interpreted
@pytest.mark.parametrize("part", range(4))
def test_kernel_lists_rows_that_are_alike(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block of rows and in several, by as many programs as there may be, and by few."""
    cases = [draw_alike(seed) for seed in range(15 * part, 15 * part + 15)]
    num_split = 0
    for nth, case in enumerate(cases):
        monkeypatch.setattr(split_launch, "MANY_ROWS", (64, 128)[nth % 2])
        monkeypatch.setattr(split_launch, "LIST_PROGRAMS", (1, 20, 70)[nth % 3])
        num_split += check_list(case)
    assert num_split > 20


def of_blocks(blocks: list[int], target: int, num_whole: int) -> Listed:
    """Rows of one tile each."""
    spec, tile = AttentionSpec(4, 1, 64, dtype=BF16), split_tiles.SplitTile(4, 128, 128)
    made = Listed(spec, tile, [1] * len(blocks), [each * tile.keys for each in blocks], 0, target, num_whole)
    assert made.load().blocks.tolist() == blocks
    return made


@only_interpreted
@pytest.mark.parametrize("num_whole", [0, 2, 6, 70, 75])
def test_kernel_lists_rows_of_few_digits_and_of_many(num_whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many blocks as begin with another digit; longer rows in a block of rows behind the first; all tiles whole,
    and more than there are; and rows whose splits are of a size that was rounded up."""
    monkeypatch.setattr(split_launch, "MANY_ROWS", 64)
    monkeypatch.setattr(split_launch, "LIST_PROGRAMS", 1)
    for blocks in (1, 15, 16, 17, 255, 256, 257):
        check_list(of_blocks([blocks] * 6, 50, min(num_whole, 6)))
    check_list(of_blocks([2] * 66 + [600, 5, 700, 600], 132, num_whole))
    assert check_list(of_blocks([23, 15, 44], 9, 0)) == 8


def test_rows_that_are_alike_are_of_all_kinds() -> None:
    cases = [draw_alike(seed) for seed in range(60)]
    many = [case for case in cases if len(case.query_lens) - case.first_row > 128]
    assert sum(case.num_whole > 0 for case in many) > 5
    assert sum(case.num_whole == case.load().tiles.sum() for case in many) > 1
    assert sum(case.num_tokens > 0 for case in many) > 4
    assert sum(0 in case.query_lens for case in many) > 10


@only_interpreted
@pytest.mark.parametrize(
    ("num_rows", "num_whole", "mixed", "passes"),
    [(60, 3, (0, 0), 0), (300, 0, (16, 300), 3), (300, 0, (0, 0), 3), (300, 3, (0, 0), 6)],
    ids=str,
)
def test_kernel_looks_at_rows_no_more_than_it_must(
    num_rows: int, num_whole: int, mixed: tuple[int, int], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program loads its own rows once, and all rows once if they are one block: otherwise a few times, whatever
    their number, and some more where tiles come first that are whole."""
    looked, load_of = [], list_kernel._load_of
    monkeypatch.setattr(list_kernel, "_load_of", lambda *given: looked.append(1) or load_of(*given))
    monkeypatch.setattr(split_launch, "MANY_ROWS", 128)
    monkeypatch.setattr(split_launch, "LIST_PROGRAMS", 1)
    spec, tile = AttentionSpec(4, 1, 64, dtype=BF16), split_tiles.SplitTile(4, 128, 128)
    list_of(Listed(spec, tile, [1] * num_rows, [99] * num_rows, 0, 132, num_whole, *mixed), num_rows)
    constants, _ = split_launch.list_form(num_rows, is_mixed=mixed[1] > 0)
    num_programs = -(-(num_rows + constants.MIXED) // constants.OWN_ROWS)
    assert len(looked) == num_programs * (2 + passes * 3)

"""No launch of TRITON or TRITON_MLA writes beyond its workspace: at any number of rows and tokens, on any GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attn_backends.backends.mla.metadata import MLAMetadataBuilder
from attn_backends.kernels import streams
from attn_backends.registry import get_backend
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, MLASpec, plan_groups
from attn_backends.testing.cases.models import published_models
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, make_layer
from tests.helpers.interpreted import interpreted, only_interpreted

triton_split = pytest.importorskip("attn_backends.kernels.split_kv", reason="needs triton")
cut_list = pytest.importorskip("attn_backends.kernels.cut_list")
equal_cuts = pytest.importorskip("attn_backends.kernels.equal_cuts")
schedule = pytest.importorskip("attn_backends.backends.triton.schedule")
state = pytest.importorskip("attn_backends.backends.triton.state")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")
workspace = pytest.importorskip("attn_backends.backends.triton.workspace")
joins = pytest.importorskip("tests.helpers.joins")
triton_mla = pytest.importorskip("attn_backends.backends.mla.triton_mla.state")
triton_tiles = pytest.importorskip("attn_backends.backends.mla.triton_mla.tuning")

MULTIPROCESSORS = (1, 2, 16, 46, 78, 108, 114, 132, 142, 148, 160, 192)
SHARED_MEMORY = 227 << 10
CACHE = KVCacheSpec(64, 16)
LIMITS = Limits(512, 8192, 1 << 17)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def head_shapes() -> list[tuple[int, int, int, int]]:
    """(num_qo_heads, num_kv_heads, head_dim, head_dim_vo) of the published models, whole and split over 2, 4 and 8
    GPUs, where each KV head has one GPU or more of its own."""
    found = set()
    for model, size in product(published_models(), (1, 2, 4, 8)):
        if not model.is_mla and model.num_qo_heads % size == 0 and model.head_dim % 16 == 0:
            kv_heads = max(1, model.num_kv_heads // size)
            if (model.num_qo_heads // size) % kv_heads == 0:
                shape = (model.num_qo_heads // size, kv_heads, model.head_dim, model.head_dim_vo or model.head_dim)
                found.add(shape)
    return sorted(found)


def latent_specs() -> list[MLASpec]:
    """The layers of published models with latent attention, whole and split over 2, 4 and 8 GPUs."""
    found = set()
    for model, size in product(published_models(), (1, 2, 4, 8)):
        if model.kv_lora_rank is not None and model.qk_rope_head_dim is not None and model.num_qo_heads % size == 0:
            heads = model.num_qo_heads // size
            for cache_dtype in (BF16, FP8):
                found.add(MLASpec(heads, dtype=BF16, cache_dtype=cache_dtype, kv_lora_rank=model.kv_lora_rank,
                                  qk_rope_head_dim=model.qk_rope_head_dim))  # fmt: skip
    return sorted(found, key=str)


def parts_of(
    lens: np.ndarray, max_cuts: int, min_blocks: int, block_n: int, few_cuts: int, long_cut: int
) -> np.ndarray:
    """[batches] how many items are parts of rows at most, for [batches, rows] blocks of keys: `_cut` in NumPy, whether
    rows are apart or not."""
    widths = np.maximum(lens + 32 // block_n, 1)
    ends, num_blocks = widths.cumsum(1), widths.sum(1)[:, None]
    are_joined = (num_blocks < max_cuts * long_cut) & ((lens > 0).sum(1)[:, None] < max_cuts)
    most = np.where(are_joined, few_cuts, max_cuts)
    num_cuts = np.maximum(np.minimum(most, num_blocks // min_blocks), 1)
    first, last = (
        ((block + 1) * num_cuts - 1) // num_blocks for block in (np.minimum(ends - lens, ends - 1), ends - 1)
    )
    counts = last - first + 1
    assert (counts > 0).all()
    assert (counts.sum(1) <= lens.shape[1] + max_cuts).all()  # the list has so many items
    found = np.where(counts > 1, counts, 0).sum(1)
    size = num_blocks // num_cuts
    least_sizes = (max(min_blocks, equal_cuts.LEAST_KEYS.value // block_n), 2 * min_blocks - 1)
    for least in (*least_sizes, *(max(16 // block_n, 1) << doubled for doubled in range(equal_cuts.PART_SIZES.value))):
        apart = -(-np.maximum(lens, 1) // np.where(num_cuts < most, least, size + size // 16))
        num_apart, num_split = apart.sum(1), np.where(apart > 1, apart, 0).sum(1)
        has_room = num_apart <= cut_list.num_programs(lens.shape[1], max_cuts)
        has_room &= num_split <= cut_list.max_split_items(max_cuts)
        found = np.maximum(found, np.where(has_room, num_split, 0))
    return found


def hard_batches(num_rows: int, numbers: np.random.Generator) -> np.ndarray:
    """[batches, num_rows] blocks of keys: even, skewed, random, and such that rows are just long enough to be cut."""
    drawn = [
        np.full((1, num_rows), blocks) for blocks in (0, 1, 3, 64, 4096)
    ] + [
        (2 ** numbers.uniform(0, 13, (8, num_rows))).astype(np.int64),
        np.where(numbers.random((8, num_rows)) < 0.1, 4096, 1),
        np.where(numbers.random((8, num_rows)) < numbers.random((8, 1)), numbers.integers(2, 400, (8, 1)), 1),
    ]  # fmt: skip
    return np.concatenate(drawn)


def test_parts_of_any_batch_have_their_slots() -> None:
    """At every number of cuts that a tile comes to, over batches made to be cut into as many parts as can be."""
    numbers = np.random.default_rng(0)
    found = {}
    for (heads, kv_heads, dim, dim_vo), query_len, cached in product(head_shapes(), range(1, 17), (BF16, FP8)):
        spec = AttentionSpec(heads, kv_heads, dim, dim_vo, dtype=BF16, cache_dtype=cached)
        plan = schedule.SplitPlan.of(spec, query_len)
        tiles = {tuning.decode_tile(spec, CACHE, rows, plan.block_m, None, SHARED_MEMORY) for rows in (1, 8, 64, 512)}
        for tile, sms in product(tiles, MULTIPROCESSORS):
            found[plan.num_programs(spec, tile, sms), tile.keys] = plan.num_partial_slots(spec, tile, sms)
    batches = [hard_batches(rows, numbers) for rows in (1, 2, 3, 7, 16, 33, 100, 257, 512)]
    for ((max_cuts, block_n), most), min_blocks in product(sorted(found.items()), (1, 4)):
        for lens, times in product(batches, (1, 3)):
            few_cuts = max(1, max_cuts // times)
            assert parts_of(lens, max_cuts, min_blocks, block_n, few_cuts, 16 * times).max() <= most, (
                max_cuts,
                min_blocks,
            )
    assert len(found) > 200


def items_of(listed: Any) -> list[list[list[int]]]:
    """What each program has, as it finds it in a schedule or a list of cuts."""
    listed = getattr(listed, "work_list", listed)
    items = listed.work_items.tolist()
    return [[items[program], *items[slice(*more)]] if items[program][0] >= 0 else []
            for program, more in enumerate(listed.more_items.tolist())]  # fmt: skip


def checked_halves(found: list[list[list[int]]], most: int) -> int:
    """All items are whole, 1, or each comes twice, 2, as one half and the other, and no program has two."""
    items = [item for cut in found for item in cut]
    of_half = {half: [[*item[:7], item[7] % equal_cuts.HALF.value] for item in items
                      if item[7] // equal_cuts.HALF.value == half] for half in range(4)}  # fmt: skip
    assert of_half[1] == of_half[2]
    assert not of_half[3]
    if not of_half[1]:
        return 1
    assert most == 2
    assert not of_half[0]
    assert max(map(len, found)) == 1
    return 2


def check_pages(cuts: Any, table: torch.Tensor, page_size: int) -> None:
    """Ids of each item's first pages are listed beside it, and the last one's again where it has no more."""
    for item, ids in zip(cuts.work_items.tolist(), cuts.item_pages.tolist(), strict=True):
        row, start, stop = item[:3]
        if row >= 0 and start < stop:  # else there is no item, or no key
            pages = range(start // page_size, (stop - 1) // page_size + 1)
            assert ids == [int(table[row, pages[min(i, len(pages) - 1)]]) for i in range(len(ids))]


@only_interpreted
@pytest.mark.parametrize("seed", range(40))
def test_kernel_cuts_have_every_key_once(seed: int) -> None:
    """Random lengths, windows and numbers of cuts: each row's items follow one another without a gap, whatever cut has
    them, have slots of their own, and nothing is written beyond the lists. Rows of more tokens than the list's, and of
    none, have no items: all of them may be so."""
    drawn = np.random.default_rng(seed)
    num_rows, max_cuts, block_n = int(drawn.integers(1, 40)), int(drawn.integers(1, 70)), int(2 ** drawn.integers(4, 8))
    lens = (2 ** drawn.uniform(0, drawn.choice([3, 8, 14]), num_rows)).astype(np.int32)
    lens = np.where(drawn.random(num_rows) < drawn.choice([0, 0, 0.4]), 0, lens[0] if drawn.random() < 0.3 else lens)
    most = int(drawn.choice([2, 4]))
    tokens = np.where(drawn.random(num_rows) < drawn.choice([0, 0.3, 1]), 0, drawn.integers(1, 5, num_rows))
    is_listed = (tokens > 0) & (tokens <= most)
    window = int(drawn.integers(0, 3000)) if drawn.random() < 0.3 else triton_split.FAR.value
    starts = np.concatenate([[0], tokens.cumsum()])
    sizes = cut_list.SplitSizes(num_rows, max_cuts, window, triton_split.FAR.value, block_n, int(drawn.integers(1, 5)))
    few_cuts, heads, resident = int(drawn.integers(1, max_cuts + 1)), *map(int, drawn.integers(1, 9, 2))
    filling = cut_list.Filling(
        few_cuts, int(drawn.integers(1, 99)), heads, max(1, max_cuts * heads // resident), resident,
        int(drawn.choice([0, 32, 256])), int(drawn.choice([1, 32])), int(drawn.choice([0, 16, 64])),
        int(drawn.choice([0, 48, 128])), int(drawn.choice([1, 2])),
    )  # fmt: skip
    page_size = int(drawn.choice([0, 16, 48, 128]))
    cuts = cut_list.CutList(sizes, filling, torch.ones(num_rows * 3, dtype=torch.int32), most, page_size)
    made = cuts.work_items, cuts.more_items, cuts.item_pages
    held = [torch.full((len(each) + 3, each.shape[1]), -7, dtype=torch.int32) for each in made]
    cuts.work_items, cuts.more_items, cuts.item_pages = (each[:-3] for each in held)
    table = torch.arange(num_rows * 1100, dtype=torch.int32).view(num_rows, 1100)
    given = (*(torch.from_numpy(each.astype(np.int32)) for each in (lens, starts)), table[:, :1090])
    cuts.fill(*given[: 3 if page_size else 2])
    assert all((each[-3:] == -7).all() for each in held)
    if page_size:
        check_pages(cuts, table, page_size)
    assert not cuts.counters.any()
    busy = sum(map(bool, items_of(cuts)))
    joined = [item for cut in items_of(cuts) for item in cut if item[4] // triton_split.MAX_SPLITS.value > 1]
    few_wait = busy <= max_cuts or busy * heads <= 2 * filling.num_sms * resident
    assert few_wait or not joined
    items: dict[int, list[list[int]]] = {row: [] for row in range(num_rows)}
    slots: list[int] = []
    halves = checked_halves(items_of(cuts), filling.halves)
    for row, start, stop, first_slot, info, *of_row in (item for cut in items_of(cuts) for item in cut):
        count, split = divmod(info, triton_split.MAX_SPLITS.value)
        half, num_tokens = divmod(of_row.pop(), equal_cuts.HALF.value)
        assert [*of_row, num_tokens] == [lens[row], starts[row], tokens[row]]
        if half < 2:
            items[row].append([split, count, start, stop])
            slots += [first_slot + split] * (count > 1)
    assert len(set(slots)) == len(slots)
    assert halves * (max(slots, default=-1) + 1) <= cut_list.max_split_items(max_cuts)
    assert not any(found for row, found in items.items() if not is_listed[row])
    for row, found in ((row, found) for row, found in items.items() if is_listed[row]):
        at = first = max(0, lens[row] - tokens[row] - window) // block_n * block_n
        assert [split for split, *_ in found] == list(range(found[0][1]))
        for _, count, start, stop in found:
            assert start == at
            assert stop > start or count == 1
            at = stop
        assert at == lens[row] or lens[row] <= first


@only_interpreted
@pytest.mark.parametrize("seed", range(3))
def test_kernel_cuts_of_very_many_keys(seed: int) -> None:
    """Of rows that share most of their pages, say: blocks times cuts are more than 31 bits can count."""
    lens = (2 ** np.random.default_rng(1300 + seed).uniform(23, 25, 40)).astype(np.int32)
    sizes = cut_list.SplitSizes(40, 132, triton_split.FAR.value, triton_split.FAR.value, 16, 4)
    filling = cut_list.Filling(132, 16, 1, 132, 1, 32, 32)
    cuts = cut_list.CutList(sizes, filling, torch.zeros(40, dtype=torch.int32), 1)
    cuts.fill(torch.from_numpy(lens), torch.arange(41, dtype=torch.int32))
    items = [item for cut in items_of(cuts) for item in cut]
    assert len(items) > 132
    for row, seq_len in enumerate(lens.tolist()):
        ranges = sorted((start, stop) for of, start, stop, *_ in items if of == row)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == seq_len


@only_interpreted
@pytest.mark.parametrize("seed", range(12))
def test_kernel_no_program_has_two_rows_where_there_are_enough(seed: int) -> None:
    """Random short rows, fewer than a GPU has room for: a program each, and of a longer one no part of twice the least
    that is worth joining. Random long rows: where cuts hardly longer than equal ones are enough for all."""
    drawn = np.random.default_rng(900 + seed)
    num_rows, block_n, min_blocks = int(drawn.integers(1, 60)), 16, int(drawn.integers(1, 9))
    longest = 16 * min_blocks * (2 if seed % 2 else 40)
    lens = np.exp(drawn.uniform(0, np.log(longest), num_rows)).astype(np.int64)
    blocks = -(-lens // block_n)
    max_cuts = int(np.ceil(blocks / (2 * min_blocks - 1)).sum()) + int(drawn.integers(0, 20))
    sizes = cut_list.SplitSizes(num_rows, max_cuts, triton_split.FAR.value, triton_split.FAR.value, block_n, min_blocks)
    filling = cut_list.Filling(max_cuts, 96, 1, max_cuts, int(drawn.integers(1, 5)), 32, 32)
    cuts = cut_list.CutList(sizes, filling, torch.zeros(num_rows, dtype=torch.int32), 1)
    cuts.fill(torch.from_numpy(lens.astype(np.int32)), torch.arange(num_rows + 1, dtype=torch.int32))
    spare = (blocks + 32 // block_n).sum() // min_blocks < max_cuts
    found = [cut for cut in items_of(cuts) if cut]
    assert sum(map(len, found)) >= num_rows
    if spare:
        assert all(len(cut) == 1 for cut in found)
        assert all(stop - start < 2 * min_blocks * block_n for cut in found for _, start, stop, *_ in cut)


def lens_in_parts(share: float, slots: int, part: int, whole: int, has_nine: bool, drawn: Any) -> Any:
    """Lengths of rows that are in as many parts of `part` keys as are that share of `slots`: one is in eight of them,
    or in nine, and the others in fewer."""
    left, lens = int(share * slots + 1e-9), []
    counts = [8 + has_nine]
    while sum(counts) < left:
        counts.append(min(int(drawn.integers(1, 9)), left - sum(counts)))
    for count in counts:  # one part is a row that is whole
        most = min(whole, part) if count == 1 else count * part
        lens.append(int(drawn.integers(max((count - 1) * part, whole) + 1, most + 1)) if most > whole else most)
    return np.array(lens, np.int32)


@only_interpreted
@pytest.mark.parametrize("seed", range(28))
def test_kernel_parts_are_short_where_programs_are_to_spare(seed: int) -> None:
    """Random rows: parts of one size, as many keys as is asked for, or twice or four times as many, the shortest of
    which no more than half of the programs that the GPU holds have one, or two thirds of them where no row is in more
    than eight; and no row is in many. Rows of few keys are whole. Else, and where none is asked for, as without. Parts
    of as many keys as is asked for, and rows beside them, come in halves, if these are asked for and cuts have room for
    all."""
    drawn = np.random.default_rng(1100 + seed)
    num_rows, heads, resident = int(drawn.integers(1, 12)), int(drawn.integers(1, 5)), int(drawn.choice([4, 8]))
    block_n, num_sms = int(drawn.choice([16, 32])), int(drawn.choice([20, 132]))
    lens = np.exp(drawn.uniform(0, np.log(drawn.choice([300, 3000])), num_rows)).astype(np.int32)
    if seed % 4 == 0:  # one that is in many parts of the shortest size
        lens, heads, num_sms = np.append(lens[:2], drawn.integers(2100, 8100)).astype(np.int32), 1, 132
        num_rows = len(lens)
    least, whole = int(drawn.choice([16, 32, 64])), int(drawn.choice([48, 64]))
    if seed >= 16:  # whose parts have about as many of the programs as may have one, or just as many
        num_sms, share = 21, (0.48, 0.53, 0.6, 2 / 3, 0.68)[seed % 5]
        lens, heads = lens_in_parts(share, num_sms * resident, max(least, block_n), whole, seed % 4 == 0, drawn), 1
        num_rows = len(lens)
    max_cuts = num_sms * resident // heads
    sizes = cut_list.SplitSizes(num_rows, max_cuts, triton_split.FAR.value, triton_split.FAR.value, block_n, 4)
    filling = cut_list.Filling(max_cuts // 2, 96, heads, num_sms, resident, 32, 32)
    found = []
    for part_keys, halves in ((least, 1), (0, 2), (least, 2)):
        counters = torch.zeros(num_rows, dtype=torch.int32)
        given = filling._replace(part_keys=part_keys, whole_keys=whole, halves=halves)
        cuts = cut_list.CutList(sizes, given, counters, 1)
        cuts.fill(torch.from_numpy(lens), torch.arange(num_rows + 1, dtype=torch.int32))
        found.append([cut for cut in items_of(cuts) if cut])
    blocks = -(-lens // block_n)
    sizes_of_parts = [max(least // block_n, 1) << doubled for doubled in range(equal_cuts.PART_SIZES.value)]
    for part in (part for part in sizes_of_parts if part * block_n <= equal_cuts.MOST_PART_KEYS.value):
        wanted = np.where(blocks > whole // block_n, -(-blocks // part), 1)
        room = num_sms * resident * (2 / 3 if wanted.max() <= equal_cuts.FEW_PARTS.value else 1 / 2)
        if wanted.sum() * heads <= room and wanted.max() <= equal_cuts.MANY_PARTS.value:
            break
    else:
        assert found[0] == found[1] == found[2]
        return
    counts = [[item[0] for cut in found[0] for item in cut].count(row) for row in range(num_rows)]
    assert counts == wanted.tolist()
    assert all(len(cut) == 1 for cut in found[0])
    assert all(stop - start <= max(part * block_n, whole) for cut in found[0] for _, start, stop, *_ in cut)
    has_halves = part * block_n <= least and 2 * wanted.sum() <= max_cuts
    assert checked_halves(found[2], 2) == 1 + has_halves
    assert [item[:7] for cut in found[2] for item in cut][:: 1 + has_halves] == [cut[0][:7] for cut in found[0]]


@only_interpreted
@pytest.mark.parametrize("seed", range(24))
def test_kernel_rows_that_are_no_longer_than_a_cut_are_whole(seed: int) -> None:
    """Random rows, some of nothing, that are nearly alike and more than a GPU holds at once: a program each, if the
    last round has half of the programs that there is room for, or rows are short. Else cuts are even."""
    drawn = np.random.default_rng(700 + seed)
    max_cuts, block_n = int(drawn.integers(4, 20)), int(2 ** drawn.integers(4, 8))
    in_last = int(drawn.integers(1, max_cuts + 1))
    num_rows, mean = max_cuts * int(drawn.integers(1, 5)) + in_last, int(drawn.choice([2, *drawn.integers(60, 200, 2)]))
    has_nothing = drawn.random(num_rows) < drawn.choice([0, 0.1])
    lens = np.where(has_nothing, 0, mean * block_n - drawn.integers(0, block_n // 2, num_rows))
    sizes = cut_list.SplitSizes(num_rows, max_cuts, triton_split.FAR.value, triton_split.FAR.value, block_n, 1)
    filling = cut_list.Filling(max_cuts, 1, 8, max_cuts, 8, 32, 32)
    cuts = cut_list.CutList(sizes, filling, torch.zeros(num_rows, dtype=torch.int32), 1)
    cuts.fill(torch.from_numpy(lens.astype(np.int32)), torch.arange(num_rows + 1, dtype=torch.int32))
    found = [cut for cut in items_of(cuts) if cut]
    if mean > 2 and 1 - in_last / max_cuts - 0.5 > 2 / mean:
        assert len(found) == max_cuts
        return
    assert [[item[0] for item in cut] for cut in found] == [[row] for row in range(num_rows)]
    assert [item[2] for cut in found for item in cut] == lens.tolist()


def written(spec: AttentionSpec, tile: Any, query_len: int, sms: int) -> tuple[int, int, int]:
    """How far a launch writes into `partial_acc`, `partial_ml` and `counters`, by the addresses in `decode_kernel`."""
    plan = schedule.SplitPlan.of(spec, query_len)
    place, head, tile_index, lane = (
        plan.num_partial_slots(spec, tile, sms) - 1,
        spec.num_kv_heads - 1,
        plan.tiles - 1,
        plan.used_m - 1,
    )
    mine = ((place * spec.num_kv_heads + head) * plan.tiles + tile_index) * plan.used_m + lane
    words = (place * spec.num_kv_heads + head) * plan.tiles + tile_index
    block = tuning.block_dims(spec)[1]
    return mine * block + block, mine * 2 + 2, (words + 1) * int(schedule.JOIN_WORDS.value)


def overruns(sized: Callable[..., tuple[int, int, int]], specs: list[AttentionSpec]) -> Iterator[str]:
    """Launches that write beyond a workspace of the given size, over all rows, tokens and multiprocessors."""
    for spec in specs:
        tiles: dict[int, dict[Any, int]] = {}  # by queries of a tile: each tile, and the most rows that take it
        for rows in {schedule.SplitPlan.of(spec, query_len).block_m for query_len in range(1, 17)}:
            nearest = [tuning.decode_tile(spec, CACHE, n, rows, None, SHARED_MEMORY) for n in range(1, 513)]
            tiles[rows] = {tile: n for n, tile in enumerate(nearest, 1)}
        for sms in MULTIPROCESSORS:
            has = sized([spec], CACHE, LIMITS, None, sms, SHARED_MEMORY)
            for query_len in range(1, 17):
                for tile, num_rows in tiles[schedule.SplitPlan.of(spec, query_len).block_m].items():
                    needs = written(spec, tile, query_len, sms)
                    if any(need > size for need, size in zip(needs, has, strict=True)):
                        yield f"{spec} rows {num_rows} tokens {query_len} multiprocessors {sms}: {needs} of {has}"


def specs_of(shapes: list[tuple[int, int, int, int]]) -> list[AttentionSpec]:
    return [AttentionSpec(*shape, dtype=BF16, cache_dtype=cached) for shape in shapes for cached in (BF16, FP8)]


def test_the_workspace_holds_every_launch() -> None:
    """1 to 512 rows of 1 to 16 tokens of every published model, on GPUs of 1 to 192 multiprocessors."""
    specs = specs_of(head_shapes())
    assert len(specs) > 150
    assert next(overruns(workspace.largest_need, specs), None) is None


def test_one_workspace_holds_layers_of_every_kind() -> None:
    """In whatever order they come, with values wider than keys among them."""
    kinds = [AttentionSpec(8, 8, 128, dtype=BF16), AttentionSpec(64, 8, 64, 256, dtype=BF16)]
    for specs in (kinds, kinds[::-1]):
        shared = lambda _, *how, specs=specs: workspace.largest_need(specs, *how)  # noqa: E731
        assert next(overruns(shared, kinds), None) is None


def _sized_for(spec_tokens: Callable[[int], list[int]]) -> Callable[..., Any]:
    """`largest_need` over some query lengths alone."""

    def sized(specs: Any, cache: Any, limits: Limits, options: Any, sms: int, shared: int) -> Any:
        need = workspace.NOTHING
        for spec, query_len in product(specs, spec_tokens(min(16, limits.max_num_tokens))):
            rows = schedule.SplitPlan.of(spec, query_len).block_m
            for tile in tuning.decode_tiles(spec, cache, limits.max_num_requests, rows, options, shared):
                need = need.or_more(workspace.decode_need(spec, tile, query_len, sms))
        return need

    return sized


def _scaled(partial_acc: float = 1.0, partial_ml: float = 1.0, counters: float = 1.0) -> Callable[..., Any]:
    """`largest_need`, of which something is a little too small."""

    def sized(*args: Any) -> Any:
        need = workspace.largest_need(*args)
        return tuple(int(size * by) for size, by in zip(need, (partial_acc, partial_ml, counters), strict=True))

    return sized


@pytest.mark.parametrize(
    "mutant",
    [
        _sized_for(lambda longest: [1, longest]),
        _sized_for(lambda longest: [longest]),
        _sized_for(lambda longest: [1 << bits for bits in range(longest.bit_length())]),
        _scaled(partial_acc=0.99),
        _scaled(partial_ml=0.99),
        _scaled(counters=0.99),
        _scaled(partial_acc=0.75, partial_ml=0.75),  # as many slots as items that fill the GPU, and not 4 / 3 of them
    ],
    ids=["ends", "longest", "powers_of_two", "partial_acc", "partial_ml", "counters", "no_third"],
)
def test_a_workspace_that_is_too_small_is_found(mutant: Callable[..., Any]) -> None:
    assert next(overruns(mutant, specs_of(head_shapes())[::-1]), None) is not None


def test_the_latent_workspace_holds_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON_MLA: 1 to 512 rows of 1 to 8 tokens, with the kernel for Hopper and without."""
    specs = latent_specs()
    for hopper, spec in product((False, True), specs):
        monkeypatch.setattr(triton_mla, "suits_hopper_kernel", lambda *_, hopper=hopper: hopper)
        lens = range(1, MLAMetadataBuilder.decode_threshold + 1)
        tiles = [(query_len, rows, _latent_tile(spec, rows, query_len, hopper)) for query_len in lens
                 for rows in (*range(1, 512, 5), 512)]  # fmt: skip
        taken = {(query_len, tile): rows for query_len, rows, tile in tiles}
        for sms in MULTIPROCESSORS:
            monkeypatch.setattr(triton_mla, "num_multiprocessors", lambda _, sms=sms: sms)
            made = triton_mla.TritonMLAState(plan_groups({0: spec}), CACHE, Limits(512, 4096, 4096), "meta")
            has = tuple(map(torch.Tensor.numel, made.split_workspace))
            for (query_len, tile), rows in taken.items():
                plan = triton_tiles.SplitPlan(tile, rows, query_len * spec.num_qo_heads, sms)
                needs = latent_needs(plan, spec)
                assert all(need <= size for need, size in zip(needs, has, strict=True)), (spec, tile, rows, sms)


def test_one_latent_workspace_holds_layers_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order they come, with ranks that are no power of two; and each on its own."""
    monkeypatch.setattr(triton_mla, "num_multiprocessors", lambda _: 132)
    wide, narrow = MLASpec(16, dtype=BF16), MLASpec(128, dtype=BF16, kv_lora_rank=48, qk_rope_head_dim=8)
    for specs in ([wide, narrow], [narrow, wide], [narrow]):
        groups = plan_groups(dict(enumerate(specs)))
        made = triton_mla.TritonMLAState(groups, CACHE, Limits(8, 64, 4096), "meta")
        has = tuple(map(torch.Tensor.numel, made.split_workspace))
        for spec, rows, query_len in product(specs, range(1, 9), range(1, MLAMetadataBuilder.decode_threshold + 1)):
            plan = made._make_plan(spec, rows, query_len)
            needs = latent_needs(plan, spec)
            assert all(need <= size for need, size in zip(needs, has, strict=True)), (spec, rows, query_len)


def test_a_latent_workspace_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mla, "num_multiprocessors", lambda _: 132)
    spec = MLASpec(16, dtype=BF16)
    made = triton_mla.TritonMLAState(plan_groups({0: spec}), CACHE, Limits(1, 1, 4096), "meta")
    made.split_workspace.check(made._make_plan(spec, 1, 1), spec)


def latent_needs(plan: Any, spec: MLASpec) -> tuple[int, int]:
    """What a launch writes, by the addresses in the kernels."""
    queries = cut_list.max_split_items(plan.target) * plan.tiles * plan.tile_rows  # of all slots
    return queries * triton_tiles.block_dims(spec)[0], queries * 2


def _latent_tile(spec: MLASpec, rows: int, query_len: int, hopper: bool) -> Any:
    return triton_tiles.decode_tile(spec, CACHE, rows, query_len * spec.num_qo_heads, None, SHARED_MEMORY, hopper)


def make_state(spec: AttentionSpec, limits: Limits, cache: KVCacheSpec = CACHE) -> Any:
    return state.TritonState(plan_groups({0: spec}), cache, limits, "cpu")


def test_the_state_is_sized_by_the_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "num_multiprocessors", lambda _: 132)
    spec, limits = AttentionSpec(32, 8, 128, dtype=BF16), Limits(40, 300, 4096)
    need = workspace.largest_need([spec], CACHE, limits, None, 132, SHARED_MEMORY)
    room = make_state(spec, limits).workspace
    assert (room.partial_acc.numel(), room.partial_ml.numel(), room.counters.numel()) == need


def test_room_for_keys_made_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys within the limits of the layer that has most of them, or as many bytes as are allowed: whole lines, as
    they are read as another dtype. Graphs' prefills read 8 bits."""
    monkeypatch.setattr(state, "can_upcast", lambda *_: True)
    layers = {i: AttentionSpec(8, heads, 128, dtype=BF16, cache_dtype=FP8) for i, heads in enumerate((2, 8, 4))}
    for allowed, expected in ((1 << 20, 2 * 24 * 8 * 256 * 2), (1003, 992)):
        options = tuning.TritonOptions(upcast_bytes=allowed)
        made = state.TritonState(plan_groups(layers), CACHE, Limits(2, 16, 24), "cpu", options=options)
        assert made.workspace.upcast_kv.numel() == expected
        made.hold_inputs(2, None)
        assert made.graph_workspace.upcast_kv.numel() == 0


def test_a_batch_above_the_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more tokens a row than the state was sized for; more rows take no more room."""
    for of_backend in (state, triton_mla):
        monkeypatch.setattr(of_backend, "num_multiprocessors", lambda _: 132)
    spec = AttentionSpec(8, 8, 128, dtype=BF16)
    made = make_state(spec, Limits(4, 4, 4096))
    for rows in (4, 5, 500):
        made.make_schedule(0, rows, 1, made.workspace)
    with pytest.raises(ValueError, match=r"a step of 4 rows of up to 16 tokens needs .* Limits"):
        made.make_schedule(0, 4, 16, made.workspace)
    mla = triton_mla.TritonMLAState(plan_groups({0: MLASpec(16, dtype=BF16)}), CACHE, Limits(4, 1, 4096), "cpu")
    with pytest.raises(ValueError, match=r"needs .* Limits"):
        mla.split_workspace.check(mla._make_plan(mla.specs[0], 4, 8), mla.specs[0])


test_interpreted, test_more_interpreted = interpreted(__file__, "kernel_")


@only_interpreted
@pytest.mark.parametrize("seed", [*range(24), 31, 79, 118])  # the last ones have halves
def test_kernel_schedules_stay_inside(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random rows of a random model on a random GPU: slots and counters of the list lie in the workspace, its keys are
    each row's keys once, and no counter keeps what an earlier launch left."""
    numbers = Random(seed)
    shape, sms = numbers.choice(head_shapes()), numbers.choice(MULTIPROCESSORS)
    monkeypatch.setattr(state, "num_multiprocessors", lambda _: sms)
    spec = AttentionSpec(*shape, dtype=BF16)
    num_rows, longest = int(2 ** numbers.uniform(0, 6)), numbers.randint(1, 16)
    made = make_state(spec, Limits(num_rows, num_rows * longest, 1 << 17))
    made.workspace.counters.fill_(7)
    query_lens = [numbers.randint(1, longest) for _ in range(num_rows - 1)] + [longest]
    seq_lens = [query_len + int(2 ** numbers.uniform(0, 15)) for query_len in query_lens]
    schedule = made.make_schedule(0, num_rows, longest, made.workspace)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    schedule.work_list.fill(torch.tensor(seq_lens, dtype=torch.int32), starts)

    plan = schedule.plan
    count = plan.num_counters(spec, schedule.tile, sms)
    assert not made.workspace.counters[:count].any()
    end_of_slots = made.workspace.partial_acc.numel() // (
        spec.num_kv_heads * plan.tiles * plan.used_m * tuning.block_dims(spec)[1]
    )
    halves = checked_halves(items_of(schedule), schedule.work_list._numbers.halves)
    items = [item for cut in items_of(schedule) for item in cut if item[7] < 2 * equal_cuts.HALF.value]
    slots = [place + parts % (1 << 15) for _, _, _, place, parts, *_ in items if parts >> 15 > 1]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < end_of_slots for slot in slots)
    assert halves * (max(slots, default=-1) + 1) <= plan.num_partial_slots(spec, schedule.tile, sms)
    assert halves == 2 or seed < 24
    for row, seq_len in enumerate(seq_lens):
        ranges = sorted((start, stop) for at, start, stop, *_ in items if at == row)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == seq_len


@only_interpreted
def test_kernel_is_right_behind_an_aborted_launch() -> None:
    """Whatever a launch that was cut short has left where programs count, the next step starts from zeros."""
    backend = get_backend("TRITON")
    spec = AttentionSpec(4, 2, 16)
    for query_lens in ((1, 1, 1), (1, 3, 30)):
        batch = random_batch(backend, spec, [400, 300, 40], list(query_lens), page_size=16)
        layer = make_layer(backend, batch)
        room = layer.state.workspace
        for left in (0, 1, 2, 1 << 30):
            room.counters.fill_(left)
            room.tiles.fill_(left)
            assert_matches(layer.forward(batch, layer.begin(batch)), batch, f"counters left at {left}")
            if max(query_lens) > workspace.DECODE_TOKENS:  # the kernel for Hopper counts there
                assert not room.tiles.any()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs of interpreted kernels run in the order that it has: "forward", "reverse", or by a seed."""
    from triton.runtime.interpreter import interpreter_builder as builder

    chosen, places = ["forward"], [[0]]
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx

    def dim(x: int, y: int, z: int) -> None:
        places[0] = list(range(x)) if chosen[0] != "reverse" else list(range(x))[::-1]
        if chosen[0] not in ("forward", "reverse"):
            Random(chosen[0]).shuffle(places[0])
        set_dim(x, y, z)

    monkeypatch.setattr(builder, "set_grid_dim", dim)
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_idx(places[0][x], y, z))
    return chosen


@only_interpreted
@pytest.mark.parametrize(("joined", "num_sms"), [(2, 4), (2, 17), (4, 34), (8, 40)])
def test_kernel_joins_in_any_order(
    joined: int, num_sms: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows in few splits and in many, whichever program ends last."""
    monkeypatch.setattr(state, "num_multiprocessors", lambda device: num_sms)
    backend, options = (
        get_backend("TRITON"),
        tuning.TritonOptions(decode_tile=tuning.DecodeTile(16, 4, 2, 2, 16, joined)),
    )
    batch = random_batch(backend, AttentionSpec(2, 1, 16), [32 * num_sms, 500], [1, 1], page_size=16)
    layer, expected = make_layer(backend, batch, options=options), batch.expected()
    for order[0] in ("forward", "reverse", "first", "second", "third"):
        step = layer.begin(batch)
        assert_matches(layer.forward(batch, step), batch, f"{joined} at a time, {order[0]}", expected)
        assert joins.are_at_rest(step.workspace.counters)


@only_interpreted
def test_kernel_joins_splits_that_some_queries_do_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's first tokens end a chunk and its last ones begin the next: these see no key of most splits, which are
    combined one at a time."""
    monkeypatch.setattr(state, "num_multiprocessors", lambda device: 1)
    backend, options = get_backend("TRITON"), tuning.TritonOptions(decode_tile=tuning.DecodeTile(16, 1, 2, 4, 16, 4))
    spec = AttentionSpec(4, 1, 16, 512, chunk_size=488, dtype=torch.float16)
    batch = random_batch(backend, spec, [490], [4], page_size=16)
    layer = make_layer(backend, batch, options=options)
    step = layer.begin(batch)
    assert_matches(layer.forward(batch, step, want_lse=True), batch)
    assert 2 < int(step.schedule.work_list.work_items[0, 4]) >> 15 <= 4


@pytest.mark.parametrize("joined", [0, 1, 3, 12])
def test_one_program_combines_powers_of_two(joined: int) -> None:
    with pytest.raises(ValueError, match=f"joined is {joined}.*power of two"):
        tuning.DecodeTile(16, 1, 6, 4, 64, joined)


@pytest.mark.parametrize("rows", [0, 8, 48, 100])
def test_a_tile_of_prefill_has_a_power_of_two_of_queries(rows: int) -> None:
    for kind in ("prefill_tile", "prompt_tile"):
        with pytest.raises(ValueError, match=f"rows is {rows}.*power of two from 16 on"):
            tuning.TritonOptions(**{kind: {"rows": rows, "keys": 32, "warps": 4, "stages": 2}})


@only_interpreted
def test_kernel_workspaces_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that began on different streams share no workspace, no two steps a list, and graphs have their own."""
    backend = get_backend("TRITON")
    batch = random_batch(backend, AttentionSpec(4, 2, 16), [40, 9], [1, 1], page_size=16)
    layer, steps = make_layer(backend, batch), []
    for stream in (5, 6, 5):
        monkeypatch.setattr(streams, "_stream_id", lambda _, stream=stream: stream)
        steps.append(layer.begin(batch))
    held = [{id(tensor) for tensor in _written(step)} for step in steps]
    assert held[0] == held[2]
    assert not held[0] & held[1]
    assert len({id(step.schedule.work_list.work_items) for step in steps}) == len(steps)
    for step in steps[1:]:
        assert_matches(layer.forward(batch, step), batch)
    with layer.state.graph_capture(2):
        clone = layer.state.graph_clone(2)
        step = clone.begin_forward(layer.builder.build(0, replace(batch.common(0), for_graph=True)))
    assert not {id(tensor) for tensor in _written(step)} & (held[0] | held[1])


def _written(step: Any) -> list[torch.Tensor]:
    """What launches of a decode step write, and later steps too."""
    return [step.workspace.partial_acc, step.workspace.partial_ml, step.workspace.counters]

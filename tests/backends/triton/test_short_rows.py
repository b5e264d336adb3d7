"""Rows, and parts of rows, so short that a program attends to all of their keys at once: interpreted, and on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.testing.cases.random_batch import random_batch, with_freed_pages
from tests.helpers.interpreted import INTERPRETED, interpreted, only_interpreted
from tests.helpers.mutate import copied_module
from tests.helpers.placed_caches import PLACES, check_placed

pytest.importorskip("triton", reason="needs triton")
decode = pytest.importorskip("attn_backends.backends.triton.kernels.decode")
launch = pytest.importorskip("attn_backends.backends.triton.launch")
schedule = pytest.importorskip("attn_backends.backends.triton.schedule")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")

HEADS = ((1, 1), (4, 1), (6, 2), (7, 7), (16, 2), (15, 1))
DIMS = ((64, 64), (128, 128), (80, 80), (192, 128), (256, 256), (32, 48))
SEEN: tuple[dict[str, Any], ...] = (
    {}, {}, {"window_left": 5}, {"window_left": 30}, {"chunk_size": 24}, {"logits_soft_cap": 20.0}, {"sinks": True},
    {"scale": -0.1}, {"causal": False},
)  # fmt: skip
SEEDS = 60
LONG_BLOCKS = tuning.DecodeTile(32, 1, 6, 4, 128)  # which may begin in a page that no query sees
FAULTS = {
    "keys behind the last are read": ("there = tl.minimum(keys, stop - 1)", "there = keys"),
    "the last key counts once more": ("positions + window_right, stop - 1)", "positions + window_right, stop)"),
    "the last key is not seen": ("positions + window_right, stop - 1)", "positions + window_right, stop - 2)"),
    "keys before a window are seen": ("keys[:, None] >= low[None]", "keys[:, None] >= 0 * low[None]"),
    "a chunk is not one's own": ("tl.maximum(positions, 0) // chunk * chunk + (chunk - 1))\n        low = first_key(pos"
                                 "itions, window_left, chunk)", "high)\n        low = positions - window_left"),
    "later queries are seen": ("high = tl.minimum(positions + window_right, stop - 1)\n    logits",
                               "high = stop - 1 + positions * 0\n    logits"),
    "all keys are of the first page": ("tl.load(pages + at // PAGE_SIZE)", "tl.load(pages + at * 0)"),
    "keys before a window are read": ("tl.maximum(there, first_key(", "tl.maximum(there, 0 * first_key("),
    "keys before a window are of listed pages": ("tl.maximum(there, keys) - start if LOCAL", "keys - start if LOCAL"),
    "listed pages are the first one": ("page = tl.where(nth >= i, page_ids[i], page)", "page = page + 0"),
    "a window begins with its page": ("first = start % PAGE_SIZE if ANYWHERE else 0", "first = 0"),
    "values lie as keys do": ("    if ALIKE:\n        value_page, value_slot = key_page",
                              "    if True:\n        value_page, value_slot = key_page"),
    "queries of the first KV head": ("q_rows = _query_rows(query, lane, head,", "q_rows = _query_rows(query, lane, 0,"),
    "the last token's queries": ("_load_pieces(q_rows, token < query_len, 0", "_load_pieces(q_rows, token < 1, 0"),
    "columns of the first piece": ("at = rows + columns + i * COLUMNS", "at = rows + columns"),
    "columns behind a head": ("piece = tl.load(at, mask=columns < NUM_COLS - i * COLUMNS, other=0.0)",
                              "piece = tl.load(at)"),
    "late values are early ones": ("v = v + _load_pieces(v_rows, None, FIRST_VO, DIM_VO,",
                                   "v = v + _load_pieces(v_rows, None, 0, DIM_VO - FIRST_VO,"),
    "pieces in another order": ("upper, lower = pieces[2 * i], pieces[2 * i + 1]",
                               "lower, upper = pieces[2 * i], pieces[2 * i + 1]"),
    "it is not capped": ("logits = scale_logits(logits, scale, soft_cap, SOFT_CAP,",
                         "logits = scale_logits(logits, scale, soft_cap, 0,"),
    "weights are not scaled": ("logits *= logit_scale(scale, SCALE_FIRST)\n    m_i", "m_i"),
    "splits are whole rows": ("is_whole = split_info == MAX_SPLITS", "is_whole = split_info >= 0"),
    "rows of several items": ("(has_others == 0) & (num_keys > 0)", "(num_keys > 0)"),
    "the largest of some columns": ("for i in tl.static_range(1, len(queries)):", "for i in tl.static_range(1, 1):"),
    "queries that keep their scale": ("logits *= q_scale[None]", "logits *= 1.0"),
    "values are read two by two": ("            given = (\n",
                                   "            value = as_pairs(value) if PAIRS else value\n            given = (\n"),
    "longer rows": ("tl.where(is_whole, most_short, of_part)", "tl.where(is_whole, 4 * most_short, of_part)"),
    "longer parts": ("tl.where(is_whole, most_short, of_part)", "tl.where(is_whole, most_short, 4 * of_part)"),
    "parts begin with a page": ("SCALE_FIRST, ALIKE, LOCAL, 1, PAGE_SIZE",
                                "SCALE_FIRST, ALIKE, LOCAL, LOCAL, PAGE_SIZE"),
    "heads count together": ("(first_slot * KV_HEADS + head) * TILES + tile) * JOIN_WORDS",
                             "(first_slot * KV_HEADS) * TILES + tile) * JOIN_WORDS"),
    "halves count together": ("(first_slot * KV_HEADS + head) * TILES + tile) * JOIN_WORDS",
                              "(first_slot * KV_HEADS + head) * TILES) * JOIN_WORDS"),
    "halves are the first one": ("lane = tile * BLOCK_M + tl.arange(0, QUERIES)", "lane = tl.arange(0, QUERIES)"),
    "halves lie in one place": ("                 head, tile, first_token,", "                 head, 0, first_token,"),
    "halves are whole": ("if USED_M > HALF_ROWS and half > 0:", "if USED_M > HALF_ROWS and half > 2:"),
    "nobody does what halves do not": ("if (half > 1) & ((is_short == 0)", "if (half > 0) & ((is_short == 0)"),
    "nobody has the second half": ("(query_len * GROUP <= HALF_ROWS)", "(query_len * GROUP <= 2 * HALF_ROWS)"),
    "parts lie where the first one does": ("_store_split(acc, m_i, l_i, True, words, num_splits, split,",
                                           "_store_split(acc, m_i, l_i, True, words, num_splits, 0,"),
}  # fmt: skip

test_interpreted, test_more_interpreted = interpreted(__file__)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys the blocks have of rows that were attended for at once, where kernels are interpreted."""
    return noted_blocks("_attend_short", -7, monkeypatch)


@pytest.fixture
def part_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The same of parts of rows."""
    return noted_blocks("_attend_part", -12, monkeypatch)


def noted_blocks(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a function of the kernel is given as an argument, each time."""
    seen: list[int] = []
    if INTERPRETED:
        attend = getattr(decode, name)

        def noting(*given: Any) -> None:
            seen.append(int(getattr(given[at], "value", given[at])))
            attend(*given)

        monkeypatch.setattr(decode, name, noting)
    return seen


def check(
    spec: AttentionSpec, seq_lens: list[int], query_lens: list[int], place: str = PLACES[0], unlike: bool = False,
    tile: Any = None, **more: Any,
) -> None:  # fmt: skip
    """Pages that no query sees are freed.

    Args:
        unlike: all but the last columns of queries are a million times as small, and rows of unlike sizes.
        tile: None: that of the rule.
    """
    device = "cpu" if INTERPRETED else "cuda"
    batch = random_batch(get_backend("TRITON"), spec, seq_lens, query_lens, poison=float("nan"), device=device, **more)
    batch = with_freed_pages(batch)
    for i, row in enumerate(batch.rows if unlike else ()):
        row.query.mul_((1e-3, 8.0, 1e-25)[i % 3])
        row.query[..., :-8] *= 1e-6
    options = None if tile is None else tuning.TritonOptions(decode_tile=tile)
    check_placed(batch, place, options)


def random_case(
    seed: int, dtypes: tuple[torch.dtype, ...] = (torch.float16,)
) -> tuple[AttentionSpec, list[int], list[int], dict[str, Any]]:
    """A layer and rows about as long as the blocks are."""
    dice = Random(f"short rows {seed}")
    (heads, kv_heads), (dim, dim_vo) = dice.choice(HEADS), dice.choice(DIMS)
    cache_dtype = dice.choice((None, None, torch.float8_e4m3fn, torch.float8_e5m2))
    spec = AttentionSpec(heads, kv_heads, dim, head_dim_vo=dim_vo, dtype=dice.choice(dtypes), cache_dtype=cache_dtype,
                         **dice.choice(SEEN))  # fmt: skip
    query_len = dice.choice((1, 1, 1, min(4, max(1, 16 * kv_heads // heads))))
    query_lens = [dice.randint(1, query_len) for _ in range(dice.choice((1, 2, 3, 5)))]
    seq_lens = [max(tokens, dice.choice((1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 128, 129, dice.randint(1, 90))))
                for tokens in query_lens]  # fmt: skip
    more = {"page_size": dice.choice((3, 16, 32, 48)), "layout": dice.choice(("NHD", "HND")), "seed": seed,
            "place": dice.choice(PLACES), "tile": dice.choice((None, None, LONG_BLOCKS))}  # fmt: skip
    return spec, seq_lens, query_lens, more


@only_interpreted
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_rows(seed: int) -> None:
    spec, seq_lens, query_lens, more = random_case(seed)
    check(spec, seq_lens, query_lens, **more)


OVER_8_BITS = [
    (dims, cached) for dims in ((128, 128), (192, 128), (80, 80)) for cached in (torch.float8_e4m3fn, torch.float8_e5m2)
]


@pytest.mark.parametrize(("dims", "cached"), OVER_8_BITS, ids=str)
@pytest.mark.parametrize("where", [pytest.param("interpreted", marks=only_interpreted),
                                   pytest.param("gpu", marks=pytest.mark.gpu)])  # fmt: skip
def test_queries_of_unlike_columns(dims: tuple[int, int], cached: torch.dtype, where: str) -> None:
    """Queries of bfloat16 are divided by the largest of all of their columns for products of float16."""
    spec = AttentionSpec(4, 2, dims[0], head_dim_vo=dims[1], dtype=torch.bfloat16, cache_dtype=cached)
    check(spec, [20, 33, 64], [1, 2, 3], unlike=True, k_scale=0.5)


def random_parts(
    seed: int, dtypes: tuple[torch.dtype, ...] = (torch.float16,), most_keys: int = 190
) -> tuple[AttentionSpec, list[int], list[int], dict[str, Any]]:
    """The same with one or two KV heads and rows: so few that longer ones are in parts, though the interpreter counts
    two multiprocessors."""
    spec, _seq_lens, query_lens, more = random_case(seed, dtypes)
    dice, kv_heads = Random(f"parts {seed}"), min(2, spec.num_kv_heads)
    spec = replace(spec, num_qo_heads=spec.group_size * kv_heads, num_kv_heads=kv_heads)
    query_lens = query_lens[: 3 - kv_heads]
    return spec, [dice.choice((65, 96, 97, 129, dice.randint(65, most_keys))) for _ in query_lens], query_lens, more


@only_interpreted
def test_random_parts(part_blocks: list[int]) -> None:
    counts = []
    for seed in range(SEEDS // 2):
        part_blocks.clear()
        spec, seq_lens, query_lens, more = random_parts(seed)
        check(spec, seq_lens, query_lens, **more)
        counts.append(len(part_blocks))
    assert sum(count > 0 for count in counts) > SEEDS // 4


@only_interpreted
@pytest.mark.parametrize(
    ("dim", "cached", "expected"),
    [(128, torch.float16, {64: [], 65: [32] * 3, 128: [32] * 4, 300: []}),
     (64, torch.float16, {64: [], 128: [], 129: [64] * 3}), (256, torch.float16, {65: [32] * 3}),
     (128, torch.float8_e4m3fn, {64: [], 65: [64] * 2, 300: [64] * 5})],
)  # fmt: skip
def test_which_parts_are_short(
    dim: int, cached: torch.dtype, expected: dict[int, list[int]], part_blocks: list[int]
) -> None:
    """No more than half of the programs that the GPU holds have one, which are 16 of one warp."""
    spec = AttentionSpec(1, 1, dim, dtype=torch.float16, cache_dtype=cached)
    for seq_len, blocks in expected.items():
        part_blocks.clear()
        check(spec, [seq_len], [1])
        assert part_blocks == 2 * blocks, seq_len  # with LSEs, and without


@only_interpreted
def test_which_rows_are_in_halves(blocks: list[int], part_blocks: list[int]) -> None:
    """Of more than 8 queries, where no more than half of the programs have a part."""
    for group, rows, in_halves in ((8, 2, False), (9, 1, True), (16, 8, True), (16, 9, False)):
        spec = AttentionSpec(group, 1, 64, dtype=torch.float16)
        blocks.clear()
        check(spec, [20] * rows, [1] * rows)
        assert blocks == 2 * [64] * rows * (1 + in_halves), (group, rows)  # with LSEs, and without
    check(AttentionSpec(12, 1, 128, dtype=torch.float16), [65], [1])
    assert part_blocks == 2 * [32] * 3 * 2
    blocks.clear()
    part_blocks.clear()
    check(AttentionSpec(12, 1, 256, dtype=torch.float16), [16], [1])
    check(AttentionSpec(12, 1, 256, dtype=torch.float16), [300], [1])
    assert (blocks, part_blocks) == (2 * [32] * 2, [])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(SEEDS, 2 * SEEDS))
def test_random_parts_on_a_gpu(seed: int) -> None:
    spec, seq_lens, query_lens, more = random_parts(seed, (torch.float16, torch.bfloat16), 8000)
    times = Random(seed).choice((1, 1, 7, 40))
    check(spec, seq_lens * times, query_lens * times, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(SEEDS, 2 * SEEDS))
def test_random_rows_on_a_gpu(seed: int) -> None:
    spec, seq_lens, query_lens, more = random_case(seed, (torch.float16, torch.bfloat16))
    times = Random(seed).choice((1, 1, 300 // len(seq_lens)))  # so many pairs that they are not few
    check(spec, seq_lens * times, query_lens * times, **more)


@only_interpreted
@pytest.mark.parametrize(
    ("dims", "kv_heads", "expected"),
    [((128, 128), 1, {1: 32, 32: 32, 33: 64, 64: 64, 65: None}), ((128, 128), 13, {32: 32, 33: None}),
     ((64, 64), 1, {33: 64, 64: 64, 65: 128, 128: 128, 129: None}), ((256, 256), 2, {32: 32, 64: 64, 65: None}),
     ((256, 256), 13, {32: 32, 33: None})],
)  # fmt: skip
def test_which_rows_are_short(
    dims: tuple[int, int], kv_heads: int, expected: dict[int, int | None], blocks: list[int]
) -> None:
    """The interpreter counts two multiprocessors, of which twelve pairs of a row and a KV head are few."""
    spec = AttentionSpec(kv_heads, kv_heads, dims[0], head_dim_vo=dims[1], dtype=torch.float16)
    for seq_len, block in expected.items():
        blocks.clear()
        check(spec, [seq_len], [1])
        assert set(blocks) == ({block} if block else set()), seq_len


@only_interpreted
@pytest.mark.parametrize("changes", [
    {"dtype": torch.float32}, {"cache_dtype": torch.float32}, {"alibi_slopes": (0.5, 0.25)},
], ids=str)  # fmt: skip
def test_layers_without_short_rows(changes: dict[str, Any], blocks: list[int]) -> None:
    check(AttentionSpec(2, 1, 64, **{"dtype": torch.float16, **changes}), [5, 20], [1, 1])
    assert blocks == []


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e5m2], ids=str)
def test_programs_of_four_warps_have_none(cached: torch.dtype) -> None:
    """On an H200 rows of 64 keys came out wrong, of 16 queries of 256 dims over 8 bits: seed 77 of the random rows."""
    spec = AttentionSpec(16, 2, 256, dtype=torch.bfloat16, cache_dtype=cached)
    plan = schedule.SplitPlan.of(spec, 2)
    for warps, has_some in ((1, True), (2, True), (4, False), (8, False)):
        assert (max(schedule.short_blocks(spec, tuning.DecodeTile(32, warps, 6, 1, 128), plan)) > 0) == has_some


def test_heads_that_are_too_wide_have_none() -> None:
    """A thread has no room for 16 keys of them, nor for a part of so many."""
    for head_dim, has_some in ((256, True), (512, True), (1024, False)):
        spec = AttentionSpec(8, 8, head_dim, dtype=torch.bfloat16)
        blocks = schedule.short_blocks(spec, tuning.DecodeTile(16, 2, 6, 4, 128), schedule.SplitPlan.of(spec, 1))
        assert min(blocks) >= 16 if has_some else blocks == (0, 0, 0)


@only_interpreted
@pytest.mark.rest
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = [FAULTS[fault]] if fault in FAULTS else []
    monkeypatch.setattr(launch, "decode_kernel", copied_module(decode, tmp_path, *edits).decode_kernel)
    with nullcontext() if fault == "none" else pytest.raises((AssertionError, IndexError, RuntimeError)):
        check(AttentionSpec(1, 1, 64, dtype=torch.float16), [20, 700] * 8, [1] * 16)  # several rows of each program
        check(AttentionSpec(1, 1, 64, dtype=torch.float16, window_left=30), [70, 90], [1, 1], page_size=48)
        in_a_block = AttentionSpec(1, 1, 64, dtype=torch.float16, window_left=5)  # whose first page is freed
        check(in_a_block, [60], [1], page_size=16, tile=LONG_BLOCKS)
        of_one_warp = tuning.DecodeTile(16, 1, 6, 4, 128)
        check(AttentionSpec(16, 1, 256, dtype=torch.float16), [40], [1], tile=of_one_warp)  # halves, but not at once
        for seq_len in (130, 400):  # in parts of 32 keys, and of 64
            check(AttentionSpec(1, 1, 128, dtype=torch.float16), [seq_len], [1], page_size=48)
        of_8_bits = AttentionSpec(4, 2, 128, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
        check(of_8_bits, [20, 33, 64], [1, 2, 3], unlike=True)
        for seed in range(30):
            for spec, seq_lens, query_lens, more in [random_case(seed), random_parts(seed)][: 1 + (seed < 8)]:
                check(spec, seq_lens, query_lens, **more)

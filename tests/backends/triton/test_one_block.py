"""Prefills of rows that see no more keys than a block: all of them are asked for at once. Interpreted, and on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.spec import AttentionType
from attn_backends.testing.cases.random_batch import random_batch, with_freed_pages
from tests.helpers.checked_reads import check_reads
from tests.helpers.interpreted import INTERPRETED, interpreted, only_interpreted
from tests.helpers.mutate import copied_module
from tests.helpers.placed_caches import PLACES, check_placed

pytest.importorskip("triton", reason="needs triton")
InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError
launch = pytest.importorskip("attn_backends.kernels.prefill.launch")
layers = pytest.importorskip("attn_backends.backends.triton.layer")
metadata = pytest.importorskip("attn_backends.backends.triton.metadata")
portable_kernel = pytest.importorskip("attn_backends.kernels.prefill.portable_kernel")
rules = pytest.importorskip("attn_backends.backends.triton.rules")
short_tiles = pytest.importorskip("attn_backends.backends.triton.short_tiles")

TILES = tuple(dict.fromkeys(one.tile for one in short_tiles._ONE_BLOCK))
HEADS = ((1, 1), (4, 1), (6, 2), (7, 7), (16, 2), (15, 1), (3, 3), (17, 1), (71, 1))
DIMS = ((64, 64), (128, 128), (80, 80), (192, 128), (256, 256), (96, 64))
SEEN: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"window_left": 5}, {"window_left": 30}, {"chunk_size": 24}, {"sinks": True}, {"causal": False},
    {"causal": False, "window_left": 7}, {"causal": False, "chunk_size": 24},
)  # fmt: skip
SEEDS = 32
FAULTS = {
    "keys behind the last are read": ("there = (keys < stop)[:, None]", "there = (keys >= start)[:, None]"),
    "the last key counts once more": ("positions + window_right, stop - 1)", "positions + window_right, stop)"),
    "the last key is not seen": ("positions + window_right, stop - 1)", "positions + window_right, stop - 2)"),
    "keys before a window are seen": ("keys[None] >= low[:, None]", "keys[None] >= 0 * low[:, None]"),
    "keys before a window are read": ("first_key(oldest, window_left, chunk) if LOCAL else 0", "0"),
    "a chunk is not one's own": ("tl.maximum(positions, 0) // chunk * chunk + (chunk - 1))", "high)"),
    "later queries are seen": ("high = tl.minimum(positions + window_right, stop - 1)\n        if LOCAL",
                               "high = stop - 1 + positions * 0\n        if LOCAL"),
    "the last keys of a tile that ends within a token": (
        "(first + (BLOCK_M - 1)) // GROUP  # positions\n    start =",
        "first // GROUP + BLOCK_M // GROUP - 1\n    start ="),
    "all keys are of the first page": ("nth, slot = (at // PAGE_SIZE)", "nth, slot = (at * 0)"),
    "the last page of a table is not read": ("nth < table_width", "nth < table_width - 1"),
    "ids behind the last of a table are read": ("nth < table_width", "nth <= table_width"),
    "a table is taken to be as wide as its rows are apart": ("nth < table_width", "nth < table_row"),
    "all rows have the first one's pages": ("page_table + row.to(tl.int64) * table_row + nth", "page_table + nth"),
    "keys of the first row": ("tl.load(key_start_loc + row).to(tl.int64) + keys", "keys.to(tl.int64)"),
    "values lie as keys do": ("        if not ALIKE:\n", "        if False:\n"),
    "queries of the first KV head": ("(head * GROUP + lane % GROUP)[:, None] * query_head + dims",
                                     "(lane % GROUP)[:, None] * query_head + dims"),
    "queries of the first tile": ("lane = first + tl.arange(0, BLOCK_M)\n    acc",
                                  "lane = tl.arange(0, BLOCK_M)\n    acc"),
    "columns behind a head": ("k_rows + dims, mask=there & (dims < DIM),", "k_rows + dims, mask=there & (dims >= 0),"),
    "weights are not scaled": ("logits *= logit_scale(scale, SCALE_FIRST)\n        m_i", "m_i"),
    "queries of a row that keep their scale": ("logits *= q_scale[:, None]", "logits *= 1.0"),
    "values are not scaled": ("m_i, l_i, lane, head, first_token, query_len, value_scale, out_token, out_head,\n"
                              "               lse_token, has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip\n",
                              "m_i, l_i, lane, head, first_token, query_len, 1.0, out_token, out_head,\n"
                              "               lse_token, has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip\n"),
}  # fmt: skip

OF_16_BITS: dict[str, Any] = {"dtype": torch.float16}
FEW = (  # layers, rows and tiles in which each fault is seen
    (AttentionSpec(4, 2, 64, **OF_16_BITS), [20, 32, 9], [9, 25, 1], TILES[0]),
    (AttentionSpec(3, 1, 80, 64, **OF_16_BITS), [40, 64], [3, 30], TILES[2]),
    (AttentionSpec(2, 2, 64, window_left=5, **OF_16_BITS), [60, 64], [3, 20], TILES[2]),
    (AttentionSpec(2, 1, 64, causal=False, chunk_size=24, **OF_16_BITS), [60, 30], [30, 30], TILES[2]),
    (AttentionSpec(4, 2, 64, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn), [20, 31], [9, 31], TILES[0]),
)

test_interpreted, test_more_interpreted = interpreted(__file__)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The constants of each launch of the portable kernel, where the kernel for Hopper would serve else. It gets a page
    table as wide as the longest row has pages, in a wider one, and interpreted reads nothing but its tensors."""
    seen: list[Any] = []
    if INTERPRETED:
        for where in (rules, layers):
            monkeypatch.setattr(where, "suits_hopper_kernel", lambda *_: True)
        check_reads(monkeypatch, launch)
    prefill = launch._prefill

    def noting(*given: Any) -> None:
        constants, table, seq_lens = given[-3], given[5], given[6]
        seen.append(constants)
        if table is not None:
            width = -(-int(seq_lens.max()) // constants.PAGE_SIZE)
            table = torch.nn.functional.pad(table[:, :width], (0, 3), value=1 << 20)[:, :width]
        prefill(*given[:5], table, *given[6:])

    monkeypatch.setattr(launch, "_prefill", noting)
    return seen


def check(
    spec: AttentionSpec, seq_lens: list[int], query_lens: list[int], tile: Any, place: str = PLACES[0], **more: Any
) -> None:  # fmt: skip
    """Pages that no query sees are freed, and each row is prefilled by one tile."""
    device = "cpu" if INTERPRETED else "cuda"
    batch = random_batch(get_backend("TRITON"), spec, seq_lens, query_lens, poison=float("nan"), device=device, **more)
    batch = with_freed_pages(batch) if min(seq_lens) else batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "short_tile", lambda *_, **__: tile)
        patch.setattr(metadata, "decode_tokens", lambda *_: 0)
        check_placed(batch, place)


def random_case(
    seed: int, dtypes: tuple[torch.dtype, ...] = (torch.float16,)
) -> tuple[AttentionSpec, list[int], list[int], Any, dict[str, Any]]:
    """A layer, rows of as many keys as a block holds or fewer, and the tile."""
    dice = Random(f"one block {seed}")
    (heads, kv_heads), (dim, dim_vo) = dice.choice(HEADS), dice.choice(DIMS)
    cache_dtype = dice.choice((None, None, torch.float8_e4m3fn, torch.float8_e5m2))
    spec = AttentionSpec(heads, kv_heads, dim, head_dim_vo=dim_vo, dtype=dice.choice(dtypes), cache_dtype=cache_dtype,
                         **dice.choice(SEEN))  # fmt: skip
    tile = dice.choice(TILES)
    seq_lens = [dice.choice((1, tile.keys, dice.randint(1, tile.keys))) for _ in range(dice.choice((1, 2, 3, 5)))]
    most_tokens = 256 // heads  # which an interpreter is slow at
    if dice.random() < 0.4:
        query_lens = seq_lens = [min(keys, most_tokens) for keys in seq_lens]
    else:
        query_lens = [min(dice.randint(1, keys), most_tokens) for keys in seq_lens]
    more = {"page_size": dice.choice((16, 32, 48)), "layout": dice.choice(("NHD", "HND")), "seed": seed,
            "place": dice.choice(PLACES)}  # fmt: skip
    if cache_dtype is not None:
        more |= {"k_scale": 0.5, "v_scale": 2.0}
    return spec, seq_lens, query_lens, tile, more


@only_interpreted
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_rows(seed: int, launched: list[Any]) -> None:
    spec, seq_lens, query_lens, tile, more = random_case(seed)
    check(spec, seq_lens, query_lens, tile, **more)
    assert {constants.ONE_BLOCK for constants in launched} == {1}


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(SEEDS, 3 * SEEDS))
def test_random_rows_on_a_gpu(seed: int, launched: list[Any]) -> None:
    spec, seq_lens, query_lens, tile, more = random_case(seed, (torch.float16, torch.bfloat16))
    times = Random(seed).choice((1, 1, 100))
    check(spec, seq_lens * times, query_lens * times, tile, **more)


@only_interpreted
@pytest.mark.rest
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_faults_are_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[Any]
) -> None:  # fmt: skip
    edits = [FAULTS[fault]] if fault in FAULTS else []
    monkeypatch.setattr(launch, "prefill_kernel", copied_module(portable_kernel, tmp_path, *edits).prefill_kernel)
    with (
        nullcontext()
        if fault == "none"
        else pytest.raises((AssertionError, IndexError, RuntimeError, InterpreterError))
    ):
        for spec, seq_lens, query_lens, tile in FEW:
            check(spec, seq_lens, query_lens, tile, v_scale=2.0)
            check(spec, query_lens, query_lens, tile)


@only_interpreted
def test_rows_that_see_no_key_give_zeros(launched: list[Any]) -> None:
    """Of cross attention, whose encoder had nothing: no page is read, as there may be none."""
    spec = AttentionSpec(4, 2, 64, dtype=torch.float16, causal=False, attention_type=AttentionType.CROSS)
    check(spec, [0, 5, 32], [3, 4, 20], TILES[0])
    assert {constants.ONE_BLOCK for constants in launched} == {1}


@only_interpreted
@pytest.mark.parametrize(
    ("seen", "is_local"),
    [
        ({"window_left": 62}, 1), ({"window_left": 63}, 0), ({"window_left": 1 << 20}, 0), ({"chunk_size": 63}, 1),
        ({"chunk_size": 64}, 0), ({"chunk_size": 64, "causal": False}, 0), ({"window_left": 30, "causal": False}, 1),
    ],
    ids=str,
)  # fmt: skip
def test_windows_as_long_as_a_block_hide_nothing(
    seen: dict[str, Any], is_local: int, launched: list[Any]
) -> None:  # fmt: skip
    (tile,) = {tile for tile in TILES if (tile.rows, tile.keys) == (64, 64)}
    check(AttentionSpec(4, 2, 64, dtype=torch.float16, **seen), [64, 63, 5], [20, 3, 5], tile)
    assert {(constants.ONE_BLOCK, constants.LOCAL) for constants in launched} == {(1, is_local)}

"""TRITON's portable prefill where keys are split, interpreted: random layers against the reference, and faults.

Seeds of SHOWN were there when the splits were written; those of UNSEEN judge them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.graphs.harness import CapturedStep, make_recorder
from attn_backends.testing.harness import Layer, assert_matches, make_layer
from tests.helpers.interpreted import interpreted, only_interpreted
from tests.helpers.mutate import copied_module

launch = pytest.importorskip("attn_backends.kernels.prefill.launch", reason="needs triton")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")

SHOWN, UNSEEN = range(10), range(1000, 1012)
WHOLE, UNSEEN_WHOLE = range(30, 33), range(1030, 1034)
GUARD = 77.0
TILE = tuning.PrefillTile(rows=32, keys=32, warps=4, stages=2)

test_interpreted, test_more_interpreted = interpreted(__file__)


def splitting(*given: Any, **more: Any) -> Any:
    from tests.helpers.split_prefills import splitting

    return splitting(*given, **more)


def a_layer(batch: Batch, tile: Any = TILE) -> Layer:
    """With partial results that are NaN until they are written, and with guards behind them."""
    options = tuning.TritonOptions(prefill_tile=tile, prompt_tile=tile)
    layer = make_layer(get_backend("TRITON"), batch, options=options, num_padded_reqs=2)
    workspace = layer.state.workspace
    for name in ("partial_acc", "partial_ml"):
        size = getattr(workspace, name).numel()
        wide = torch.full((size + 4096,), GUARD)
        wide[:size] = float("nan")
        object.__setattr__(workspace, name, wide[:size])
        object.__setattr__(workspace, f"{name}_guard", wide[size:])
    return layer


def check(batch: Batch, tile: Any = TILE) -> Any:
    layer, expected = a_layer(batch, tile), batch.expected()
    step = layer.begin(batch, num_padded_reqs=2)
    for want_lse in (False, True):
        result = layer.forward(batch, step, num_padded_reqs=2, want_lse=want_lse)
        assert_matches(result, batch, f"splits {step.metadata.prefill_splits}", expected)
    assert (layer.state.workspace.partial_acc_guard == GUARD).all()
    assert (layer.state.workspace.partial_ml_guard == GUARD).all()
    return step


def draw(seed: int) -> tuple[Batch, int]:
    """A layer and chunks behind prefixes, with decodes or without; and multiprocessors."""
    dice = Random(f"portable splits {seed}")
    group, num_kv_heads = dice.choice((1, 2, 3, 5)), dice.choice((1, 1, 2, 3))
    seen: dict[str, Any] = dice.choice(
        [{}, {}, {"window_left": dice.randrange(400)}, {"chunk_size": dice.randrange(100, 500)}, {"causal": False},
         {"causal": False, "window_left": dice.randrange(300)}, {"logits_soft_cap": 20.0}, {"scale": -0.3},
         {"alibi_slopes": tuple(dice.random() for _ in range(group * num_kv_heads))}]
    )  # fmt: skip
    dtype = dice.choice((torch.float16, torch.float32))
    cached = dice.choice((dtype, dtype, torch.float8_e4m3fn, torch.float8_e5m2))
    spec = AttentionSpec(
        group * num_kv_heads, num_kv_heads, dice.choice((32, 48, 64)), head_dim_vo=dice.choice((32, 64)), dtype=dtype,
        cache_dtype=cached, sinks=dice.random() < 0.3, **seen,
    )  # fmt: skip
    query_lens = [1] * dice.randrange(2) + [dice.randint(17, 40) for _ in range(dice.randint(1, 2))]
    seq_lens = [length + int(2 ** dice.uniform(6, 9.3)) for length in query_lens]
    more: dict[str, Any] = {"page_size": dice.choice((5, 16, 32, 64)), "layout": dice.choice(("NHD", "HND"))}
    scales = {"k_scale": 0.5, "v_scale": 2.0} if cached is not dtype else {}
    batch = random_batch(
        get_backend("TRITON"), spec, seq_lens, query_lens, seed=seed, poison=float("nan"), **more, **scales
    )
    return batch, dice.choice((2, 5, 12, 40))


@only_interpreted
@pytest.mark.parametrize("seed", [*SHOWN, *UNSEEN])
def test_random_layers(seed: int) -> None:
    batch, num_sms = draw(seed)
    with splitting(num_sms):
        step = check(batch)
    assert step.splits is not None


@only_interpreted
@pytest.mark.parametrize("seed", [*WHOLE, *UNSEEN_WHOLE])
def test_random_layers_with_whole_tiles(seed: int) -> None:
    """The longest rows' are, or all: none is split, and nothing joined."""
    batch, num_sms = draw(seed)
    part = Random(f"whole {seed}").choice((1.0, 0.3, 0.5, 0.7))
    with splitting(num_sms, whole=part):
        step = check(batch)
    several = (step.splits.work_items[:, 5] > 1) & (step.splits.work_items[:, 0] >= 0)
    assert not several[: step.splits.num_whole].any()
    assert part < 1 or not several.any()


@only_interpreted
@pytest.mark.parametrize("seed", range(2000, 2012))
def test_random_layers_whose_tiles_are_split_by_their_own_lengths(seed: int) -> None:
    """Those that see the most keys as often as they must be, and some not at all."""
    batch, num_sms = draw(seed)
    layer = replace(batch.spec, causal=True, window_left=-1, chunk_size=None)
    rows = [row.data for row in batch.rows]
    lens = [row.seq_len for row in rows], [row.query_len for row in rows]
    batch = random_batch(get_backend("TRITON"), layer, *lens, seed=seed, poison=float("nan"))
    longest = max(seq_len for seq_len, query_len in zip(*lens, strict=True) if query_len > 1)
    with splitting(max(24, num_sms), split_blocks=max(1, longest // TILE.keys // (2 + seed % 3))):
        step = check(batch)
    counts = [int(each[5]) for each in step.splits.work_items if each[0] >= 0]
    assert counts == sorted(counts, reverse=True)
    assert 1 < counts[0] > counts[-1]


@only_interpreted
@pytest.mark.parametrize("seed", range(18))
def test_tiles_that_end_within_a_token(seed: int) -> None:
    """Of groups that are no power of two, some of more queries than a tile: counted, listed as they are, or split."""
    dice = Random(f"within a token {seed}")
    group, heads = dice.choice((3, 5, 6, 7, 9, 11, 12, 13, 15, 24, 71)), dice.choice((1, 2))
    seen: dict[str, Any] = dice.choice(
        [{}, {}, {"window_left": dice.randrange(60)}, {"chunk_size": dice.randint(1, 60)}, {"causal": False},
         {"logits_soft_cap": 20.0}, {"sinks": True}, {"alibi_slopes": tuple(map(float, range(group * heads)))}]
    )  # fmt: skip
    spec = AttentionSpec(group * heads, heads, 32, dtype=torch.float16, **seen)
    query_lens = [dice.randint(17, 30), *(dice.randint(1, 30) for _ in range(dice.randrange(3)))]
    seq_lens = [length + dice.choice((0, dice.randrange(200))) for length in query_lens]
    batch = random_batch(get_backend("TRITON"), spec, seq_lens, query_lens, seed=seed, poison=float("nan"))
    tile = replace(TILE, rows=(16, 32, 64)[seed % 3])
    with (nullcontext(), splitting(4, whole=1.0), splitting(6))[seed // 3 % 3]:
        check(batch, tile)


@only_interpreted
def test_most_layers_above_are_split() -> None:
    counts = []
    for seed in (*SHOWN, *UNSEEN):
        batch, num_sms = draw(seed)
        with splitting(num_sms):
            counts.append(int(a_layer(batch).begin(batch).splits.work_items[0, 5]))
    assert sum(count > 1 for count in counts) > len(counts) // 2
    assert max(counts) >= 5


@only_interpreted
def test_splits_that_some_queries_do_not_see() -> None:
    """A tile's first tokens end a chunk and its last ones begin the next: these see no key of most splits, two of
    which are joined at a time."""
    spec = AttentionSpec(2, 1, 32, head_dim_vo=256, chunk_size=640)
    batch = random_batch(get_backend("TRITON"), spec, [650], [20], page_size=16, poison=float("nan"))
    with splitting(12, least_keys=128):
        step = check(batch)
    assert int(step.splits.work_items[0, 5]) == 5


@only_interpreted
@pytest.mark.parametrize("target", [None, 0], ids=["split", "whole"])
@pytest.mark.parametrize("seen", [{}, {"window_left": 100}, {"sinks": True}], ids=str)
def test_graphs_of_prefilled_rows(seen: dict[str, Any], target: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not decoded, as they have more tokens than that serves: one capture, and replays of other lengths,
    also behind a launch that was cut short."""
    from attn_backends.backends.triton import metadata, state

    for module in (metadata, state):
        monkeypatch.setattr(module, "decode_tokens", lambda *_: 4)
    spec, backend, lens = AttentionSpec(4, 2, 32, **seen), get_backend("TRITON"), ((400, 17, 330, 90), (30,), (5, 640))
    batches = [
        random_batch(backend, spec, each, [5] * len(each), num_pages=64, seed=seed, poison=float("nan"))
        for seed, each in enumerate(lens)
    ]
    batches = [replace(batch, sinks=batches[0].sinks) for batch in batches]
    with splitting(9, least_keys=32, target=target):
        layer = make_layer(backend, *batches, num_padded_reqs=20)
        with layer.state.graph_capture(4):
            clone = layer.state.graph_clone(4, 5)
            captured = CapturedStep([layer], clone, batches[:1], 4, 5, make_recorder("cpu"))
        (step,) = clone.steps.values()
        assert step.schedule is None
        most_splits = []
        for batch in (*batches, batches[0]):
            step.workspace.tiles.fill_(3)
            captured.fill([batch])
            (result,) = captured.replay()
            assert_matches(result, batch, f"replay of {[row.data.seq_len for row in batch.rows]}")
            most_splits.append(0 if step.splits is None else int(step.splits.work_items[0, 5]))
    assert len(set(most_splits)) > 1  # as the lengths are
    assert max(most_splits) > 2  # of a long row, though rows that are all as long would not be split by a target of 0


KERNEL, SPLITS = "portable_kernel", "split_kernels"
FAULTS = {
    "a block that is lost": (
        KERNEL,
        "num_blocks * split // num_splits * BLOCK_N",
        "(num_blocks * split // num_splits + (split == 1)) * BLOCK_N",
    ),
    "a block that is in two splits": (
        KERNEL,
        "num_blocks * (split + 1) // num_splits * BLOCK_N",
        "(num_blocks * (split + 1) // num_splits + (split == 0)) * BLOCK_N",
    ),
    "keys in front of a window twice": (KERNEL, "            local = begin\n", "            local = start\n"),
    "one slot for all splits": (KERNEL, "(first_slot + split) * KV_HEADS + head", "first_slot * KV_HEADS + head"),
    "queries that are not stored": (KERNEL, "m_i, l_i, used, BLOCK_M", "m_i, l_i, used - 1, BLOCK_M"),
    "the last keys of a tile that ends within a token": (
        KERNEL,
        "(first + (BLOCK_M - 1)) // GROUP  # positions\n        start = ",
        "first // GROUP + BLOCK_M // GROUP - 1\n        start = ",
    ),
    "a split that is not joined": (SPLITS, "num_splits, used - query", "num_splits - 1, used - query"),
    "a join of what has not come": (SPLITS, "num_splits, used - query", "num_splits + 1, used - query"),
}
JOIN_FAULTS = {  # by which of the two ways
    "queries that nobody joins, of few splits": ("part * QUERIES, used,", "part * QUERIES, used - QUERIES,"),
    "queries of another tile, of few splits": (
        "first + query + tl.arange(0, QUERIES)",
        "query + tl.arange(0, QUERIES)",
    ),
    "queries that nobody joins, of many splits": ("range(part, used * PARTS,", "range(part, used * PARTS - 1,"),
    "splits of another head": ("slot = first_slot.to(tl.int64) * KV_HEADS + head", "slot = first_slot.to(tl.int64)"),
}


@only_interpreted
@pytest.mark.rest
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of several splits and whole ones, where there is a window and where there is none; and where the last key
    that a tile's last token sees is a block's first."""
    from attn_backends.kernels.prefill import portable_kernel, split_kernels, split_launch

    wrong = {module: changed(module, FAULTS.get(fault), tmp_path) for module in (portable_kernel, split_kernels)}
    monkeypatch.setattr(launch, "prefill_kernel", wrong[portable_kernel].prefill_kernel)
    monkeypatch.setattr(split_launch, "join_kernel", wrong[split_kernels].join_kernel)
    found = nullcontext() if fault == "none" else pytest.raises((AssertionError, RuntimeError, IndexError))
    with splitting(6), found:
        for heads, longest, seen in ((4, 500, {}), (4, 500, {"window_left": 300}), (6, 362, {})):
            spec = AttentionSpec(heads, 2, 32, **seen)
            batch = random_batch(get_backend("TRITON"), spec, [longest, 60, 350], [20, 17, 30], page_size=16)
            step = check(batch)
            assert 1 in step.splits.work_items[:, 5]
            assert int(step.splits.work_items[0, 5]) > 1


@only_interpreted
@pytest.mark.rest
@pytest.mark.parametrize("fault", ["none", *JOIN_FAULTS])
def test_faults_in_joins_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few splits and of many, of tiles whose queries are no multiple of those that are joined at a time."""
    from attn_backends.kernels.prefill import split_kernels, split_launch

    wrong = copied_module(split_kernels, tmp_path, *([JOIN_FAULTS[fault]] if fault in JOIN_FAULTS else []))
    monkeypatch.setattr(split_launch, "join_kernel", wrong.join_kernel)
    found = nullcontext() if fault == "none" else pytest.raises((AssertionError, RuntimeError, IndexError))
    batch = random_batch(get_backend("TRITON"), AttentionSpec(6, 2, 32), [670], [25], page_size=16)
    with found:
        for least_keys, fewest, most in ((128, 2, 8), (32, 9, 99)):
            with splitting(40, least_keys=least_keys):
                step = check(batch)
            assert fewest <= int(step.splits.work_items[0, 5]) <= most


def changed(module: Any, fault: tuple[str, str, str] | None, folder: Path) -> Any:
    """A module as its source is; with the fault, if it is one of this module's."""
    name = module.__name__.rpartition(".")[2]
    return copied_module(module, folder, *([fault[1:]] if fault is not None and fault[0] == name else []))

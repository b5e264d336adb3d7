"""TRITON's prefill for Hopper on a CPU where keys are split: random layers against the reference, and faults.

Seeds of SHOWN were there when the splits were written; those of UNSEEN judge them.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Layer, Result, assert_matches, make_layer
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted
from tests.helpers.mutate import copied_module

launch = pytest.importorskip("attn_backends.kernels.prefill.launch", reason="needs triton")
most_tile_splits = pytest.importorskip("attn_backends.kernels.prefill.splits").most_tile_splits

SHOWN, UNSEEN = range(8), range(1000, 1010)
WHOLE, UNSEEN_WHOLE = range(30, 33), range(1030, 1034)
HALF = (1, 2, 6, *UNSEEN[4:])  # two tests share them, so that two workers do
THEIRS = f"random_layers and ({' or '.join(f'[{seed}]' for seed in HALF)})"
GUARD = 77.0


@pytest.mark.rest
@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__, f"not ({THEIRS})")


@pytest.mark.rest
@in_own_process
def test_more_interpreted() -> None:
    run_interpreted(__file__, THEIRS)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the emulated kernel: so many programs each."""
    from attn_backends.kernels.prefill import hopper_kernel
    from tests.helpers.gluon_emulator import Emulated

    made: list[int] = []
    monkeypatch.setattr(launch, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr("attn_backends.backends.triton.metadata.short_tile", lambda *_: None)
    emulated = Emulated(hopper_kernel.prefill_hopper_kernel, made.append)
    monkeypatch.setattr(hopper_kernel, "prefill_hopper_kernel", emulated)
    return made


def splitting(*given: Any, **more: Any) -> Any:
    from tests.helpers.split_prefills import splitting

    return splitting(*given, **more)


def a_batch(spec: AttentionSpec, seq_lens: list[int], query_lens: list[int], **more: Any) -> Batch:
    given: dict[str, Any] = {"page_size": 16, "poison": float("nan"), **more}
    return random_batch(get_backend("TRITON"), spec, seq_lens, query_lens, **given)


def draw(seed: int) -> tuple[Batch, int]:
    """A layer and chunks behind prefixes, with decodes or without; and multiprocessors."""
    dice = Random(f"splits {seed}")
    dims = dice.choice(((64, 64), (64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (192, 192)))
    seen: dict[str, Any] = dice.choice(
        [{}, {}, {}, {"window_left": dice.randrange(700)}, {"chunk_size": dice.randrange(200, 900)}, {"causal": False},
         {"causal": False, "window_left": dice.randrange(400)}]
    )  # fmt: skip
    group, num_kv_heads, num_rows = dice.choice((1, 2, 3, 5, 8)), dice.choice((1, 1, 2, 3)), dice.randint(1, 2)
    decodes = dice.randrange(2)
    dtype = torch.float16 if decodes else dice.choice((torch.float16, torch.bfloat16))  # the interpreter has no other
    spec = AttentionSpec(
        group * num_kv_heads, num_kv_heads, dims[0], head_dim_vo=dims[1], sinks=dice.random() < 0.3, dtype=dtype, **seen
    )
    query_lens = [1] * decodes + [dice.randint(17, dice.choice((30, 30, 30, 150))) for _ in range(num_rows)]
    seq_lens = [length + int(2 ** dice.uniform(7, 10.3)) for length in query_lens]
    page_size = dice.choice((16, 48, 64, 128))
    return a_batch(spec, seq_lens, query_lens, page_size=page_size, seed=seed), dice.choice((4, 9, 24, 70))


def guarded(layer: Layer) -> list[torch.Tensor]:
    """What lies behind the partial results of a layer's state, where nothing may be written."""
    workspace, bands = layer.state.workspace, []
    for name in ("partial_acc", "partial_ml"):
        size = getattr(workspace, name).numel()
        wide = torch.full((size + 4096,), GUARD)
        wide[:size] = float("nan")  # what no split has written gives NaN
        object.__setattr__(workspace, name, wide[:size])
        bands.append(wide[size:])
    return bands


def check(batch: Batch, launches: list[int]) -> Any:
    """Two layers of a step, one with NaN behind its last row; a launch leaves behind what the next one wants."""
    layer, expected = make_layer(get_backend("TRITON"), batch, num_padded_reqs=2), batch.expected()
    bands = guarded(layer)
    step = layer.begin(batch, num_padded_reqs=2)
    for want_lse in (False, True):
        result = layer.forward(batch, step, num_padded_reqs=2, want_lse=want_lse)
        assert_matches(result, batch, f"splits {step.metadata.prefill_splits}", expected)
    assert len(launches) == 2
    assert all((band == GUARD).all() for band in bands)
    assert not step.workspace.tiles.any()
    return step


@only_interpreted
@pytest.mark.parametrize("seed", [*SHOWN, *UNSEEN])
def test_random_layers(seed: int, launches: list[int]) -> None:
    batch, num_sms = draw(seed)
    by_half = seed % 2 > 0
    with splitting(num_sms, by_half=by_half):
        step = check(batch, launches)
    assert step.splits is not None
    if not by_half or batch.spec.head_dim != batch.spec.head_dim_vo:  # MLA's heads have no such tile
        assert step.metadata.hopper_tile is None
    else:
        assert step.metadata.hopper_tile.groups == 1
        assert step.splits.tile.rows == 64


@only_interpreted
@pytest.mark.parametrize("seed", [*WHOLE, *UNSEEN_WHOLE])
def test_random_layers_with_whole_tiles(seed: int, launches: list[int]) -> None:
    """The longest rows' are, or all: none is split, and nothing joined."""
    batch, num_sms = draw(seed)
    part = Random(f"whole {seed}").choice((1.0, 0.3, 0.5, 0.7))
    with splitting(num_sms, whole=part, by_half=seed % 2 > 0):
        step = check(batch, launches)
    several = (step.splits.work_items[:, 5] > 1) & (step.splits.work_items[:, 0] >= 0)
    assert not several[: step.splits.num_whole].any()
    assert part < 1 or not several.any()


@only_interpreted
def test_most_layers_above_are_split(launches: list[int]) -> None:
    counts = []
    for seed in (*SHOWN, *UNSEEN):
        batch, num_sms = draw(seed)
        with splitting(num_sms):
            step = make_layer(get_backend("TRITON"), batch).begin(batch)
        counts.append(int(step.splits.work_items[0, 5]))
    assert sum(count > 1 for count in counts) > len(counts) // 2
    assert max(counts) >= 5


@only_interpreted
@pytest.mark.parametrize("num_sms", [1, 5, 40])
def test_lengths_on_the_device_may_be_shorter(num_sms: int, launches: list[int]) -> None:
    """The host's are upper bounds: rows that end within the first of the splits that it expects, or have no keys."""
    spec = AttentionSpec(4, 2, 64, dtype=torch.float16)
    batch = a_batch(spec, [700, 90, 35], [33, 20, 18])
    longer = a_batch(spec, [1500, 1300, 1100], [33, 20, 18])
    with splitting(num_sms):
        layer = make_layer(get_backend("TRITON"), longer)
        planned = layer.begin(longer).metadata.prefill_splits
        step = make_layer(get_backend("TRITON"), batch).begin(batch)
        assert planned == step.metadata.prefill_splits
        check(batch, launches)


@only_interpreted
def test_keys_made_16_bits(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By one head and by two at a time, behind a decode."""
    from attn_backends.backends.triton import metadata
    from attn_backends.backends.triton.tuning import TritonOptions

    monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: True)
    spec = AttentionSpec(4, 2, 64, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn)
    batch = a_batch(spec, [70, 650, 300], [1, 20, 33], page_size=5, k_scale=0.5, v_scale=2.0)
    for heads in (1, 2):
        launches.clear()
        with splitting(7):
            layer = make_layer(get_backend("TRITON"), batch, options=TritonOptions(upcast_bytes=951 * heads * 256 + 1))
            step = layer.begin(batch)
            assert_matches(layer.forward(batch, step, want_lse=True), batch)
        assert step.splits.work_items[0, 5] > 1
        assert len(launches) == 2 // heads


def draw_in_turn(seed: int) -> tuple[Batch, Any, int]:
    """A layer over 8 bits, chunks behind a decode or not, room for some rows at a time, and multiprocessors."""
    from attn_backends.backends.triton.tuning import TritonOptions

    dice = Random(f"in turn {seed}")
    group, num_kv_heads = dice.choice((1, 2, 3, 5)), dice.choice((1, 2, 3))
    seen: dict[str, Any] = dice.choice([{}, {}, {"window_left": dice.randrange(50, 700)}, {"sinks": True}])
    spec = AttentionSpec(
        group * num_kv_heads, num_kv_heads, 64, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn, **seen
    )
    query_lens = [1] * dice.randrange(2) + [dice.randint(17, 50) for _ in range(dice.randint(2, 4))]
    seq_lens = [length + int(2 ** dice.uniform(7, 9.6)) for length in query_lens]
    longest, most = max(seq_lens), sum(seq_lens[query_lens[0] == 1 :])
    room = TritonOptions(upcast_bytes=dice.randint(longest, most - 1) * 2 * 64 * 2)
    more = {"page_size": dice.choice((5, 16)), "k_scale": 0.5, "v_scale": 2.0, "seed": seed}
    return a_batch(spec, seq_lens, query_lens, **more), room, dice.choice((4, 9, 24))


@only_interpreted
@pytest.mark.parametrize("part", range(2))
def test_rows_in_turn_are_split(part: int, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Random layers, each of whose sections has a list of tiles of its own; two layers of a step, with padding."""
    from attn_backends.backends.triton import metadata

    monkeypatch.setattr(metadata, "is_faster_upcast", lambda *_: True)
    counts = []
    for seed in range(4 * part, 4 * part + 4):
        batch, room, num_sms = draw_in_turn(seed)
        with splitting(num_sms):
            layer = make_layer(get_backend("TRITON"), batch, num_padded_reqs=2, options=room)
            bands, expected = guarded(layer), batch.expected()
            step = layer.begin(batch, num_padded_reqs=2)
            for want_lse in (False, True):
                result = layer.forward(batch, step, num_padded_reqs=2, want_lse=want_lse)
                assert_matches(result, batch, f"seed {seed}", expected)
        assert all((band == GUARD).all() for band in bands)
        assert not step.workspace.tiles.any()
        assert len(step.section_splits) == len(step.metadata.upcast_rows) > 1
        assert len(launches) >= 2 * len(step.section_splits)
        launches.clear()
        counts += [int(each.work_items[0, 5]) for each in step.section_splits if each is not None]
    assert sum(count > 1 for count in counts) >= 4


@only_interpreted
@pytest.mark.parametrize("query_lens", [[14, 14, 9], [1, 3, 14], [10, 14, 40]], ids=str)
def test_verified_tokens_of_many_queries(
    query_lens: list[int], launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More queries for a KV head than a small tile of the decode kernel takes: of 5 heads those of 4 tokens or more,
    and what comes behind them."""
    from attn_backends.backends.triton import metadata

    monkeypatch.setattr(metadata, "are_faster_together", lambda *_: False)
    batch = a_batch(AttentionSpec(10, 2, 64, dtype=torch.float16), [400, 90, 230], query_lens)
    with splitting(7):
        step = check(batch, launches)
    assert step.metadata.num_decode_rows == (2 if query_lens[0] == 1 else 0)
    assert step.metadata.max_decode_len == (3 if query_lens[0] == 1 else 0)
    views = step.metadata.decode_metadata, step.metadata.prefill_metadata
    assert sum(view.num_rows for view in views if view is not None) == 3


@only_interpreted
@pytest.mark.parametrize("along", [True, False])
def test_decodes_beside_prefills_that_are_split(
    along: bool, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken along by the same launch, or behind it."""
    from attn_backends.backends.triton import metadata

    monkeypatch.setattr(metadata, "are_faster_together", lambda *_: along)
    batch = a_batch(AttentionSpec(4, 2, 64, dtype=torch.float16), [70, 200, 650, 300], [1, 2, 20, 33])
    with splitting(7):
        step = check(batch, launches)
    assert step.splits.work_items[0, 5] > 1
    assert step.metadata.num_decodes == 2
    assert step.metadata.num_decode_rows == (0 if along else 2)


@only_interpreted
def test_queries_that_the_kernel_cannot_take(launches: list[int]) -> None:
    """Another kernel serves them than the one that the tiles were listed for: it splits nothing."""
    batch = a_batch(AttentionSpec(4, 2, 64, dtype=torch.float16), [700, 300], [33, 20])
    query = batch.query
    apart = query.new_empty(*query.shape[:2], query.shape[2] + 8)[..., : query.shape[2]].copy_(query)
    with splitting(7):
        layer, pool = make_layer(get_backend("TRITON"), batch), batch.fresh_pool()
        step = layer.begin(batch)
        assert step.splits is not None
        output = layer.impl.forward(apart, batch.key, batch.value, pool, step)
    assert_matches(Result(output, None, pool), batch)
    assert not launches


LIST, JOIN, KERNEL = "list_kernel", "split_kernels", "hopper_kernel"
FAULTS = {
    "a block that is lost": (
        KERNEL,
        "begin, end = num_blocks * split // num_splits,",
        "begin, end = num_blocks * split // num_splits + (split == 1),",
    ),
    "a block that is in two splits": (
        KERNEL,
        "num_blocks * (split + 1) // num_splits\n",
        "num_blocks * (split + 1) // num_splits + (split == 0)\n",
    ),
    "splits that begin elsewhere": (KERNEL, "return start + begin * BLOCK_N", "return start + split * BLOCK_N"),
    "one slot for all splits": (KERNEL, "first_slot + split + 1, 0)", "first_slot + 1, 0)"),
    "slots of another head": (KERNEL, "    head = program % KV_HEADS + gl.where(", "    head = 0 + gl.where("),
    "a whole tile in a slot": (KERNEL, "gl.where(num_splits > 1, first_slot", "gl.where(num_splits > 0, first_slot"),
    "rows that are not there": (KERNEL, "    row = gl.maximum(row, 0)", "    row = row + 0"),
    "a split that is not joined": (
        JOIN,
        "num_splits, used - query,",
        "num_splits - 1, used - query,",
    ),
    "a split that is joined twice": (
        JOIN,
        "at, KV_HEADS * (BLOCK_M // QUERIES), num_splits,",
        "at, KV_HEADS * (BLOCK_M // QUERIES) * (num_splits > 2), num_splits,",
    ),
    "queries that nobody joins": (JOIN, "QUERIES, used, num_parts", "QUERIES, used - QUERIES, num_parts"),
    "joins of whole tiles": (JOIN, "(row >= 0) & (num_splits > 1)", "(row >= 0) & (num_splits > 0)"),
    "values times the splits": (JOIN, "query_len, value_scale,", "query_len, value_scale * num_splits,"),
    "whole tiles among the splits": (LIST, "tl.where(whole > 0, 0, num_more)", "0"),
    "splits among whole tiles": (LIST, "split_begins = num_whole + ", "split_begins = "),
    "tiles that are whole and split": (LIST, "whole[:, None] + split_tile", "split_tile"),
    "counters that stay": (LIST, "mask=counter < num_counters", "mask=counter < 0"),
}  # fmt: skip


@only_interpreted
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_faults_are_found(fault: str, launches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends.kernels.prefill import hopper_kernel, list_kernel, split_kernels, split_launch
    from tests.helpers.gluon_emulator import Emulated

    wrong = {
        module: changed(module, FAULTS.get(fault), tmp_path) for module in (hopper_kernel, list_kernel, split_kernels)
    }
    emulated = Emulated(wrong[hopper_kernel].prefill_hopper_kernel, launches.append)
    monkeypatch.setattr(hopper_kernel, "prefill_hopper_kernel", emulated)
    monkeypatch.setattr(split_launch, "list_kernel", wrong[list_kernel].list_kernel)
    monkeypatch.setattr(split_launch, "join_kernel", wrong[split_kernels].join_kernel)
    found = nullcontext() if fault == "none" else pytest.raises((AssertionError, RuntimeError, IndexError))
    with found:
        with splitting(11):
            check_all_splits()
        with splitting(11, whole=0.3):
            check_whole_tiles()


def changed(module: Any, fault: tuple[str, str, str] | None, folder: Path) -> Any:
    """A module as its source is; with the fault, if it is one of this module's."""
    name = module.__name__.rpartition(".")[2]
    return copied_module(module, folder, *([fault[1:]] if fault is not None and fault[0] == name else []))


def check_all_splits() -> None:
    """Rows in four splits, in two and whole, behind a launch that was cut short; no more splits than have slots."""
    batch = a_batch(AttentionSpec(6, 2, 64, dtype=torch.float16), [1300, 300, 700], [50, 33, 20])
    layer = make_layer(get_backend("TRITON"), batch)
    guarded(layer)
    layer.state.workspace.tiles.copy_(torch.tensor([4, 1000]))
    step = layer.begin(batch)
    work_items = step.splits.work_items
    assert work_items[:, 5].unique().tolist() == [1, 2, 4]
    split_items = work_items[work_items[:, 5] > 1]
    assert len(split_items) * batch.spec.num_kv_heads <= most_tile_splits(11)
    assert_matches(layer.forward(batch, step, want_lse=True), batch)


def check_whole_tiles() -> None:
    """One of the longest row's tiles is whole, and the other, as those of another row, in splits."""
    batch = a_batch(AttentionSpec(6, 2, 64, dtype=torch.float16), [1300, 300, 700], [50, 33, 20])
    layer = make_layer(get_backend("TRITON"), batch)
    guarded(layer)
    step = layer.begin(batch)
    work_items = step.splits.work_items
    assert (work_items[: step.splits.num_whole, 5] == 1).all()
    assert (work_items[step.splits.num_whole :, 5] > 1).any()
    assert_matches(layer.forward(batch, step, want_lse=True), batch)

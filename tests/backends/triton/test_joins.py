"""How programs that have splits of a row combine them, interpreted by processes at the same time, and faults.

The interpreter alone runs one program after the other, so that only the last one ever finds all others begun.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, make_layer
from tests.helpers.interpreted import interpreted, only_interpreted
from tests.helpers.mutate import copied_module

triton = pytest.importorskip("triton", reason="needs triton")
tl = pytest.importorskip("triton.language")
decode = pytest.importorskip("attn_backends.backends.triton.kernels.decode")
launch = pytest.importorskip("attn_backends.backends.triton.launch")
state = pytest.importorskip("attn_backends.backends.triton.state")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")
joins = pytest.importorskip("tests.helpers.joins")
side_by_side = pytest.importorskip("tests.helpers.side_by_side")
split_joins = pytest.importorskip("attn_backends.backends.triton.kernels.split_joins")

LAUNCHES = 5  # one behind the other, over the same words
SLOTS = 6  # programs that run at a time
WAITING_FAULTS = {
    "one of the words is not cleared": (
        "tl.store(words + ARRIVED + (launches + 1) % 2, 0)",
        "tl.store(words + ARRIVED + (launches + 1) % 2, 0, mask=launches % 2 == 0)"),
    "every launch arrives at the same word": ("arrived = words + ARRIVED + launches % 2", "arrived = words + ARRIVED"),
    "who has begun is not forgotten": ("        tl.store(words + HAVE_BEGUN, 0)\n", ""),
    "launches are not counted": ("        tl.store(words + LAUNCHES, launches + 1)\n", ""),
    "nobody combines where nobody stays": ("tl.where(is_last & (now < _STAYING), 1, num_parts)", "num_parts"),
    "the last one always combines": ("is_last & (now < _STAYING)", "is_last"),
    "who stays does not wait": ("while (stays > 0) & (now % _STAYING < num_splits)", "while now < 0"),
}  # fmt: skip
COMBINING_FAULTS = {
    "a part is not combined": ("for run in range(part, ", "for run in range(part + 1, "),
    "the first part alone is combined": ("* RUNS, num_parts):", "* RUNS, num_parts * 64):"),
    "columns of a query's first run": ("run % RUNS * COLUMNS", "0"),
    "queries of runs": ("run // RUNS, run % RUNS", "run % RUNS, run % RUNS"),
    "a split is left out": ("step * USED_M, num_splits, 1, 1,", "step * USED_M, num_splits - 1, 1, 1,"),
    "splits of another head": ("at = first.to(tl.int64) * USED_M + query", "at = first.to(tl.int64) + query"),
    "the LSE is not written": ("lse_token, has_sinks, want_lse, GROUP,\n                   DIM_VO - column)",
                               "lse_token, has_sinks, 0, GROUP,\n                   DIM_VO - column)"),
}  # fmt: skip
KERNEL_FAULTS = {
    "tiles share words": ("(first_slot * KV_HEADS + head) * TILES + tile) * JOIN_WORDS",
                          "(first_slot * KV_HEADS + head) * TILES) * JOIN_WORDS"),
    "heads share words": ("((first_slot * KV_HEADS + head) * TILES + tile) * JOIN_WORDS",
                          "(first_slot * KV_HEADS * TILES + tile) * JOIN_WORDS"),
    "a launch arrives where the last one did": ("launches = tl.load(words + LAUNCHES, volatile=True)", "launches = 0"),
    "who has not begun is waited for": ("(have_begun == num_splits)", "(have_begun > 0)"),
    "few splits are counted for good": ("        tl.store(words, 0)  # for the next launch\n", ""),
}  # fmt: skip

test_interpreted, test_more_interpreted = interpreted(__file__)


@triton.jit
def begin_kernel(words):  # type: ignore[no-untyped-def]
    tl.atomic_add(words + split_joins.HAVE_BEGUN, 1, sem="relaxed")


@triton.jit
def arrive_kernel(words, parts, num_splits, may_stay):  # type: ignore[no-untyped-def]
    """What a program of `decode_kernel` does when it has a partial result."""
    have_begun = decode._same_for_all(words + split_joins.HAVE_BEGUN, num_splits > 0, 32)
    stays = ((have_begun == num_splits) & (may_stay != 0)).to(tl.int32)
    part, num_parts = split_joins.arrive(words, num_splits, tl.load(words + split_joins.LAUNCHES), stays)
    tl.store(parts, part)
    tl.store(parts + 1, num_parts)
    tl.store(parts + 2, stays)


def meet(
    may_stay: list[bool], begin_s: list[float], attend_s: list[float], patience_s: float = 20.0, *,
    together: bool = False, last_behind: bool = False,
) -> torch.Tensor:  # fmt: skip
    """[launches, programs, 3]: each program's part, their number, and whether it stayed.

    Args:
        begin_s, attend_s: of each program, from a launch's beginning to its own, and from there to its arrival.
        together: none arrives before all have begun, however busy the machine is.
        last_behind: the last one begins when the others have ended.
    """
    num_splits, forked = len(may_stay), multiprocessing.get_context("fork")
    all_begun, ended = forked.Barrier(num_splits), forked.Semaphore(0)
    words = torch.zeros(int(split_joins.JOIN_WORDS.value), dtype=torch.int32).share_memory_()
    parts = torch.full((LAUNCHES, num_splits, 3), -1, dtype=torch.int32).share_memory_()

    def program(launch: int, split: int) -> None:
        if last_behind and split == num_splits - 1:
            assert all(ended.acquire(timeout=patience_s) for _ in range(split))
        time.sleep(begin_s[split])
        begin_kernel[(1,)](words)
        if together:
            all_begun.wait(patience_s)
        time.sleep(attend_s[split])
        arrive_kernel[(1,)](words, parts[launch, split], num_splits, int(may_stay[split]))
        if split < num_splits - 1:
            ended.release()

    for nth in range(LAUNCHES):
        side_by_side.run_side_by_side([partial(program, nth, split) for split in range(num_splits)], patience_s)
        assert joins.are_at_rest(words), f"launch {nth} leaves {words.tolist()}"
    return parts


def check_parts(parts: torch.Tensor) -> None:
    """Who stays has a part, every part is one program's, and one has all where nobody stays."""
    for of_launch in parts.tolist():
        having = [(part, count) for part, count, _ in of_launch if count > 0]
        assert sorted(having) == [(part, len(having)) for part in range(len(having))], of_launch
        assert len(having) == max(1, sum(stays for *_, stays in of_launch)), of_launch


@only_interpreted
@pytest.mark.parametrize("seed", range(6))
def test_every_part_is_one_programs(seed: int) -> None:
    dice = Random(f"joins {seed}")
    num_splits, share = dice.randint(2, 7), dice.choice((0.0, 0.5, 1.0, 1.0))
    begin_s, attend_s = ([dice.uniform(0, most) for _ in range(num_splits)] for most in (0.03, 0.06))
    check_parts(meet([dice.random() < share for _ in range(num_splits)], begin_s, attend_s))


@only_interpreted
def test_all_stay_where_all_have_begun() -> None:
    parts = meet([True] * 5, [0.0] * 5, [0.0, 0.03, 0.0, 0.01, 0.05], together=True)
    check_parts(parts)
    assert parts[..., 2].all()


@only_interpreted
def test_nobody_waits_for_one_that_has_not_begun() -> None:
    """As where the GPU has no room for it before others have ended."""
    parts = meet([True] * 4, [0.0] * 4, [0.0, 0.02, 0.05, 0.0], last_behind=True)
    check_parts(parts)
    assert parts[:, 3, 2].all()
    assert not parts[:, :3, 2].any()


@only_interpreted
@pytest.mark.rest
@pytest.mark.parametrize("fault", WAITING_FAULTS)
def test_faults_in_waiting_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = copied_module(split_joins, tmp_path, WAITING_FAULTS[fault])
    monkeypatch.setattr(sys.modules[__name__], "split_joins", wrong)
    with pytest.raises(AssertionError):
        _meet_and_check()


def _meet_and_check() -> None:
    for may_stay in ([True] * 4, [False] * 4, [True, False, False, False]):
        check_parts(meet(may_stay, [0.0] * 4, [0.08, 0.05, 0.02, 0.1], 3.0, together=True))


def attend(
    spec: AttentionSpec, seq_lens: list[int], num_sms: int, seed: int, kernel: Any = None, wide: int = 128,
    registers: int = 64, query_len: int = 1, patience_s: float = side_by_side.PATIENCE_S, warps: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """Three launches over one plan, compared with the reference. Returns the most splits of a row, and the most
    programs that combined one.

    Args:
        wide, registers: columns and numbers of a thread that a program combines at a time.
    """
    query_lens, placed = [query_len] * len(seq_lens), side_by_side.SideBySide
    batch = random_batch(get_backend("TRITON"), spec, seq_lens, query_lens, seed=seed, poison=float("nan"))
    options = tuning.TritonOptions(decode_tile=tuning.DecodeTile(16, warps, 2, 2, 16, 2))
    launch._decode_constants.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "num_multiprocessors", lambda _: num_sms)
        patch.setattr(launch, "decode_kernel", placed(kernel or decode.decode_kernel, SLOTS, seed, patience_s))
        patch.setattr(launch, "_WIDE", wide)
        patch.setattr(launch, "_NARROW", 16)
        patch.setattr(launch, "_JOIN_REGISTERS", registers)
        layer = make_layer(get_backend("TRITON"), batch, options=options)
        step, expected = layer.begin(batch), batch.expected()
        step.workspace.partial_acc.fill_(float("nan"))
        for want_lse in (False, True, True):
            assert_matches(layer.forward(batch, step, want_lse=want_lse), batch, f"seed {seed}", expected)
            assert joins.are_at_rest(step.workspace.counters), "words are not at rest"
    launch._decode_constants.cache_clear()
    words = step.workspace.counters.view(-1, int(split_joins.JOIN_WORDS.value))
    num_parts = int((words[:, split_joins.ARRIVED.value :] // split_joins._STAYING.value).max())
    return int((step.schedule.work_list.work_items[:, 4] >> 15).max()), num_parts


@only_interpreted
@pytest.mark.rest
def test_programs_at_the_same_time() -> None:
    """Random rows of few splits, of which a GPU of six slots has all at once or not; parts are of all columns of a
    query or of some, and splits are loaded at once or some at a time."""
    found: list[tuple[int, int]] = []
    for seed in range(20):  # five, or more on a machine whose cores are busy: there fewer run side by side
        if seed >= 5 and sum(num_parts > 2 for _, num_parts in found) >= 3:
            break
        dice = Random(f"side by side {seed}")
        group, num_kv_heads = dice.choice((1, 2, 3, 5)), dice.choice((1, 1, 2))
        seen: dict[str, Any] = dice.choice([{}, {"window_left": 300}, {"sinks": True}])
        spec = AttentionSpec(group * num_kv_heads, num_kv_heads, dice.choice((32, 48)),
                             head_dim_vo=dice.choice((32, 64)), dtype=torch.float16, **seen)  # fmt: skip
        seq_lens = [dice.randint(200, 700) for _ in range(dice.randint(1, 2))]
        sizes = {"wide": dice.choice((32, 128)), "registers": dice.choice((1, 2, 64)), "query_len": dice.choice((1, 4))}
        found.append(attend(spec, seq_lens, dice.choice((4, 6, 9)), seed, **sizes))
    assert sum(num_parts > 2 for _, num_parts in found) >= 3, found
    assert all(num_parts <= num_splits for num_splits, num_parts in found)


ITEMS = "    while row >= 0:\n"
LATE = (ITEMS, f"{ITEMS}        for _ in range(tl.where(next_item < end_item, 240000, 0)):\n            row += 0\n")
UNSEEN = ("if last_info // MAX_SPLITS > JOINED:", "if last_info < 0:"), ("| (has_others == 0)", "| (num_splits > 0)")


@only_interpreted
@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.rest
def test_who_has_other_rows_first_is_waited_for(is_seen: bool, tmp_path: Path) -> None:
    """The first of a long row's splits begins when the others have ended: it waits for nobody, so that they may wait
    for it, and need not leave all to it."""
    kernel = copied_module(decode, tmp_path, LATE, *(() if is_seen else UNSEEN)).decode_kernel
    spec = AttentionSpec(2, 1, 32, dtype=torch.float16)
    assert attend(spec, [40, 40, 40, 900], 3, 0, kernel, warps=4) == (5, 5 if is_seen else 1)


@only_interpreted
@pytest.mark.rest
@pytest.mark.parametrize("registers", [1, 64], ids=["many", "few"])
@pytest.mark.parametrize("fault", ["none", *COMBINING_FAULTS])
def test_faults_in_combining_are_found(fault: str, registers: int, tmp_path: Path) -> None:
    """Two heads with three queries each, whose columns are two runs or four."""
    edits = [COMBINING_FAULTS[fault]] if fault in COMBINING_FAULTS else []
    kernel = copied_module(decode, tmp_path, *edits).decode_kernel
    spec = AttentionSpec(6, 2, 32, head_dim_vo=64, dtype=torch.float16)
    with nullcontext() if fault == "none" else pytest.raises(AssertionError, match="seed"):
        attend(spec, [490], 8, 0, kernel, wide=32, registers=registers)


@only_interpreted
@pytest.mark.rest
@pytest.mark.parametrize("fault", ["none", *KERNEL_FAULTS])
def test_faults_in_meeting_are_found(fault: str, tmp_path: Path) -> None:
    """Two heads with 20 queries each, which lie in two tiles: of a row with more splits than run at a time, and of one
    with few."""
    edits = [KERNEL_FAULTS[fault]] if fault in KERNEL_FAULTS else []
    kernel = copied_module(decode, tmp_path, *edits).decode_kernel
    spec = AttentionSpec(10, 2, 32, dtype=torch.float16)
    with nullcontext() if fault == "none" else pytest.raises(AssertionError, match=r"seed|rest|wait for ever"):
        for seq_lens, num_sms in (([900], 14), ([100], 2)):
            num_splits, _ = attend(spec, seq_lens, num_sms, 0, kernel, query_len=4, patience_s=12.0)
            assert num_splits > SLOTS if num_sms > 8 else num_splits == 2

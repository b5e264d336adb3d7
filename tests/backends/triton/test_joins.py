"""How the programs that have splits of a row meet: `_arrive` as it is, interpreted by processes at the same time."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch

from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted
from tests.helpers.mutate import copied_module

triton = pytest.importorskip("triton", reason="needs triton")
tl = pytest.importorskip("triton.language")
decode = pytest.importorskip("attn_backends.backends.triton.kernels.decode")
joins = pytest.importorskip("tests.helpers.joins")

LAUNCHES = 5  # one behind the other, over the same words
PATIENCE_S = 20.0  # after which programs wait for ever
FAULTS = {
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


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


@triton.jit
def begin_kernel(words):  # type: ignore[no-untyped-def]
    tl.atomic_add(words + decode.HAVE_BEGUN, 1, sem="relaxed")


@triton.jit
def arrive_kernel(words, parts, num_splits, may_stay):  # type: ignore[no-untyped-def]
    """What a program of `decode_kernel` does when it has a partial result."""
    have_begun = decode._same_for_all(words + decode.HAVE_BEGUN, 32)
    stays = ((have_begun == num_splits) & (may_stay != 0)).to(tl.int32)
    part, num_parts = decode._arrive(words, num_splits, tl.load(words + decode.LAUNCHES), stays)
    tl.store(parts, part)
    tl.store(parts + 1, num_parts)
    tl.store(parts + 2, stays)


def run(may_stay: list[bool], begin_s: list[float], attend_s: list[float]) -> torch.Tensor:
    """[launches, programs, 3]: each program's part, their number, and whether it stayed.

    Args:
        begin_s, attend_s: of each program, from a launch's beginning to its own, and from there to its arrival.
    """
    num_splits = len(may_stay)
    words = torch.zeros(int(decode.JOIN_WORDS.value), dtype=torch.int32).share_memory_()
    parts = torch.full((LAUNCHES, num_splits, 3), -1, dtype=torch.int32).share_memory_()
    for launch in range(LAUNCHES):
        children = []
        for split in range(num_splits):
            child = os.fork()
            if not child:
                time.sleep(begin_s[split])
                begin_kernel[(1,)](words)
                time.sleep(attend_s[split])
                arrive_kernel[(1,)](words, parts[launch, split], num_splits, int(may_stay[split]))
                os._exit(0)
            children.append(child)
        ends = time.monotonic() + PATIENCE_S
        while children and time.monotonic() < ends:
            children = [child for child in children if not os.waitpid(child, os.WNOHANG)[0]]
            time.sleep(0.001)
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert not children, f"launch {launch}: {len(children)} of {num_splits} programs wait for ever"
        assert joins.are_at_rest(words), f"launch {launch} leaves {words.tolist()}"
    return parts


def check(parts: torch.Tensor) -> None:
    """Who stays has a part, every part is one program's, and one has all where nobody stays."""
    for launch in parts.tolist():
        having = [(part, count) for part, count, _ in launch if count > 0]
        assert sorted(having) == [(part, len(having)) for part in range(len(having))], launch
        assert len(having) == max(1, sum(stays for *_, stays in launch)), launch


@only_interpreted
@pytest.mark.parametrize("seed", range(8))
def test_every_part_is_one_programs(seed: int) -> None:
    dice = Random(f"joins {seed}")
    num_splits, share = dice.randint(2, 7), dice.choice((0.0, 0.5, 1.0, 1.0))
    begin_s, attend_s = ([dice.uniform(0, most) for _ in range(num_splits)] for most in (0.03, 0.06))
    check(run([dice.random() < share for _ in range(num_splits)], begin_s, attend_s))


@only_interpreted
def test_all_stay_where_all_have_begun() -> None:
    parts = run([True] * 5, [0.0] * 5, [0.2, 0.25, 0.2, 0.22, 0.3])
    check(parts)
    assert parts[..., 2].all()


@only_interpreted
def test_nobody_waits_for_one_that_has_not_begun() -> None:
    """As where the GPU has no room for it before others have ended."""
    parts = run([True] * 4, [0.0, 0.0, 0.0, 0.5], [0.0, 0.05, 0.1, 0.0])
    check(parts)
    assert parts[:, 3, 2].all()
    assert not parts[:, :3, 2].any()


@only_interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "decode", copied_module(decode, tmp_path, FAULTS[fault]))
    monkeypatch.setattr(here, "PATIENCE_S", 3.0)
    with pytest.raises(AssertionError):
        _check_who_may_stay()


def _check_who_may_stay() -> None:
    for may_stay in ([True] * 4, [False] * 4, [True, False, False, False]):
        check(run(may_stay, [0.0] * 4, [0.2, 0.15, 0.1, 0.25]))

"""`verify` over TRITON's kernels, interpreted: broken workspaces are found within a bounded number of cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends.machine import pretend_multiprocessors
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.guards.guard import GuardError
from attn_backends.testing.harness import assert_matches, make_layers
from attn_backends.testing.verify.campaign import Tally
from attn_backends.testing.verify.cases import Case, draw_case
from attn_backends.testing.verify.covering import CoveringArray, served_by
from attn_backends.testing.verify.pairs import Pairs
from attn_backends.testing.verify.run import run_case
from attn_backends.testing.verify.sizes import SIZES
from attn_backends.testing.verify.worker import Asked, run_seed
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted

MOST_CASES = 6


@pytest.mark.rest
@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


def backend() -> Any:
    from attn_backends.backends.triton.backend import TritonBackend

    return TritonBackend


def state_of(change: Any) -> Any:
    """TRITON with another state: `change(state)` once it is made."""
    from attn_backends.backends.triton.state import TritonState

    class State(TritonState):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            change(self)

    return type("Mutant", (backend(),), {"state_cls": State})


def split_cases() -> Iterator[Case]:
    """Eager cases of one long row and few KV heads, whose keys are split over several programs."""
    for seed in range(4000):
        case = draw_case(backend(), seed, SIZES["small"], "cpu", multiprocessors=2)
        spec = case.form.specs[0]
        local = spec.window_left >= 0 or spec.chunk_size is not None
        first = case.episodes[0]
        long = first.cached and max(first.contexts) >= 1024 and max(first.steps[0]) <= 16
        if spec.num_kv_heads == 1 and long and not local and len(case.form.specs) == 1 and not case.graph_rows:
            yield case


def first_finding(broken: Any) -> str:
    for _, case in zip(range(MOST_CASES), split_cases(), strict=False):
        try:
            run_case(broken, case, "cpu")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def halved(name: str) -> Any:
    """The state with half of one of its workspaces, and nobody who compares sizes."""

    def change(state: Any) -> None:
        half = getattr(state.workspace, name)
        state.workspace = replace(state.workspace, **{name: half.new_empty(len(half) // 2)})
        object.__setattr__(state.workspace, "check", lambda *_: None)

    return change


def counters_left(state: Any) -> None:
    """As an aborted launch leaves them, and no schedule clears them."""
    begin = state.begin_forward

    def begin_forward(metadata: Any) -> Any:
        step = begin(metadata)
        state.workspace.counters.fill_(1)
        return step

    state.begin_forward = begin_forward


@only_interpreted
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (halved("partial_acc"), "behind it were written"),
        (halved("partial_ml"), "behind it were written"),
        (counters_left, "Mismatch"),
    ],
    ids=["half of partial", "half of sums", "counters not cleared"],
)
def test_verify_finds(change: Any, told: str) -> None:
    found = first_finding(state_of(change))
    assert found, f"{MOST_CASES} cases find nothing"
    assert told in found


@only_interpreted
def test_verify_finds_nothing_else() -> None:
    assert first_finding(backend()) == ""


@only_interpreted
def test_declared_values_run() -> None:
    """Of a covering array's rows the first ones with small heads."""
    served = served_by(backend(), "cpu")
    rows = [row for block in CoveringArray(served, 0).blocks for row in block]
    few = [row for row in rows if row["head_dim"] <= 48 and row["group"] <= 4][:3]
    tally = Tally(Pairs(served.factors))
    for number, row in enumerate(few):
        tally.add(run_seed(Asked("TRITON", "cpu", "small", None, (), declared=True), backend(), number, row))
    assert (tally.num_cases, tally.findings) == (3, [])
    assert all(tally.values[name, str(value)] for row in few for name, value in row.items())
    assert "bfloat16" not in {row["dtype"] for row in rows}
    assert "bfloat16" in {row["cache_dtype"] for row in rows}


@only_interpreted
@pytest.mark.parametrize("sized", ["at the ends", "whole"])
def test_a_need_that_peaks_between_the_ends(sized: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 heads of one KV head and 3 multiprocessors: rows of 2 tokens need more than those of 1 and of 16.
    Of rows of one length each would have a program, and nothing to join."""
    from attn_backends.backends.triton import state, workspace

    if sized == "at the ends":
        monkeypatch.setattr(state, "largest_need", sized_at_the_ends)
        monkeypatch.setattr(workspace.Workspace, "check", lambda *_: None)
    spec = AttentionSpec(8, 1, 64, dtype=torch.float16)
    batch = random_batch(backend(), spec, [60, 300] * 15, [2] * 30, poison=float("nan"))
    with pretend_multiprocessors(3):
        (layer,) = make_layers(backend(), [batch], roomy=4)
        step = layer.begin(batch)
        if sized == "whole":
            assert_matches(layer.forward(batch, step), batch)
        else:
            with pytest.raises(GuardError, match=r"workspace.py.* bytes behind it were written"):
                layer.forward(batch, step)


def sized_at_the_ends(specs: Any, cache: Any, limits: Any, options: Any, num_sms: int, shared_memory: int) -> Any:
    """The need of the shortest and of the longest queries alone."""
    from attn_backends.backends.triton.schedule import SplitPlan
    from attn_backends.backends.triton.tuning import decode_tile
    from attn_backends.backends.triton.workspace import LaunchNeed, decode_need

    rows, needs = limits.max_num_requests, []
    for spec in specs:
        for query_len in (1, 16):
            tile = decode_tile(spec, cache, rows, SplitPlan.of(spec, query_len).block_m, options, shared_memory)
            needs.append(decode_need(spec, tile, query_len, num_sms))
    return LaunchNeed(*map(max, zip(*needs, strict=True)))


def mixed_cases() -> Iterator[Case]:
    """Graphs of mixed batches with rows of several tokens, and a step of fewer behind it: what that one left stands
    where the next has tokens of no row."""
    for seed in range(4000):
        case = draw_case(backend(), seed, SIZES["small"], "cpu", multiprocessors=2)
        first, *later = case.episodes[0].steps
        if case.mixed_tokens and len(case.form.specs) == 1 and max(first) > 16 and later and sum(later[0]) < sum(first):
            yield case


@only_interpreted
@pytest.mark.parametrize("num_tokens", [None, 0], ids=["right", "wrong"])
def test_what_a_mixed_graph_leaves_unwritten_is_found(num_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of no row, if nobody lists them."""
    from attn_backends.kernels.prefill import split_launch

    real = split_launch.ListNumbers
    if num_tokens is not None:

        def without(*given: Any) -> Any:
            return real(*given)._replace(num_tokens=1)  # a mixed list all the same

        monkeypatch.setattr(split_launch, "ListNumbers", without)
    found = []
    for _, case in zip(range(3), mixed_cases(), strict=False):
        try:
            run_case(backend(), case, "cpu")
        except AssertionError as error:
            found.append(str(error))
    assert bool(found) == (num_tokens is not None), found

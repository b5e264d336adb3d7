"""`verify` over TRITON's kernels, interpreted: broken workspaces are found within a bounded number of cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends.testing.verify.cases import Case, draw_case
from attn_backends.testing.verify.run import run_case
from attn_backends.testing.verify.sizes import SIZES
from tests.interpreted import in_own_process, only_interpreted, run_interpreted

MOST_CASES = 6


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

    return type("Mutant", (backend(),), {"get_state_cls": staticmethod(lambda: State)})


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
    """The state with half of one of its workspaces."""

    def change(state: Any) -> None:
        whole = getattr(state.room, name)
        state.room = replace(state.room, **{name: whole.new_empty(len(whole) // 2)})

    return change


def counters_left(state: Any) -> None:
    """As an aborted launch leaves them."""
    begin = state.begin_forward

    def begin_forward(metadata: Any) -> Any:
        state.room.counters.fill_(1)
        return begin(metadata)

    state.begin_forward = begin_forward


def uninitialised_counters(state: Any) -> None:
    state.room = replace(state.room, counters=torch.empty_like(state.room.counters))


@only_interpreted
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (halved("partial"), "behind it were written"),
        (halved("sums"), "behind it were written"),
        (counters_left, "Mismatch"),
        (uninitialised_counters, "Mismatch"),
    ],
    ids=["half of partial", "half of sums", "counters not reset", "counters never set"],
)
def test_verify_finds(change: Any, told: str) -> None:
    found = first_finding(state_of(change))
    assert found, f"{MOST_CASES} cases find nothing"
    assert told in found


@only_interpreted
def test_verify_finds_nothing_else() -> None:
    assert first_finding(backend()) == ""

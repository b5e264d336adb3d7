"""The emulated FlashInfer in captured graphs: planned once for the capture, and again before each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_backends.testing.graphs.host_reads import GraphViolation
from attn_backends.testing.graphs.simulator import GraphSimulator, SimulatedGraph
from tests.emulated import flashinfer
from tests.emulated.test_flashinfer import HEAD_DIM, VARIANTS, Pages, assert_as_reference, spec_of, workspace

NUM_ROWS, NUM_PAGES, MAX_TOKENS = 4, 40, 24
KINDS = ["cuda_cores", "tensor_cores", "fa2", "fa3"]


class Captured:
    """A wrapper with its buffers and static inputs; a plan for a batch; a graph of its run."""

    def __init__(self, kind: str, **variant: Any) -> None:
        self.kind = kind
        self.variant = variant
        self.is_decode = kind in KINDS[:2]
        num_tokens = NUM_ROWS if self.is_decode else MAX_TOKENS
        indptr, indices, last = (
            torch.zeros(NUM_ROWS + 1).int(),
            torch.zeros(NUM_PAGES).int(),
            torch.zeros(NUM_ROWS).int(),
        )
        self.wrapper: Any
        if self.is_decode:
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace(), "NHD", True, kind == "tensor_cores", indptr, indices, last
            )
        else:
            rows = torch.zeros(NUM_ROWS + 1).int()
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace(), "NHD", True, rows, indptr, indices, last, backend=kind
            )
        self.query = torch.zeros(num_tokens, 4, HEAD_DIM, dtype=torch.bfloat16)
        self.cache = Pages([], []).cache
        self.out = torch.zeros_like(self.query)
        self.lse = torch.zeros(num_tokens, 4)

    def plan(self, pages: Pages) -> None:
        rows = () if self.is_decode else (pages.qo_indptr,)
        more = {} if self.is_decode else {"causal": True}
        self.wrapper.plan(*rows, *pages.table, *pages.sizes, **pages.dtypes(), **self.variant, **more)

    def fill(self, pages: Pages) -> None:
        self.query.fill_(torch.nan)
        self.query[: len(pages.query)].copy_(pages.query)
        for static, pool in zip(self.cache, pages.cache, strict=True):
            static.copy_(pool)

    def run(self) -> torch.Tensor:
        self.wrapper.run(self.query, self.cache, out=self.out, lse=self.lse, return_lse=True)
        return self.out

    def capture(self, pages: Pages) -> SimulatedGraph:
        self.plan(pages)
        self.fill(pages)
        held = [self.wrapper, self.query, self.cache, self.out, self.lse]
        return GraphSimulator(refuse_unreachable=True).capture(self.run, held)

    def batch(self, kv_lens: list[int], qo_lens: list[int], seed: int = 0) -> Pages:
        """Padded: rows without keys, and for prefill without queries."""
        missing = NUM_ROWS - len(kv_lens)
        qo_lens = [1] * NUM_ROWS if self.is_decode else [*qo_lens, *[0] * missing]
        return Pages([*kv_lens, *[0] * missing], qo_lens, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["plain", "all"])
def test_replays_follow_their_plans(kind: str, variant: str) -> None:
    captured = Captured(kind, **VARIANTS[variant])
    graph = captured.capture(captured.batch([20, 6, 6, 7], [6, 6, 6, 6]))
    for seed, (kv_lens, qo_lens) in enumerate((([100, 9], [3, 9]), ([1, 200, 40, 33], [1, 1, 20, 2]), ([7], [5])), 1):
        pages = captured.batch(kv_lens, qo_lens, seed)
        captured.plan(pages)
        captured.fill(pages)
        got = graph.replay()[: len(pages.query)], captured.lse[: len(pages.query)]
        assert_as_reference(got, pages.expected(spec_of(pages, VARIANTS[variant], True)))
        assert not captured.out[: len(pages.query)].isnan().any()


@pytest.mark.parametrize("kind", KINDS[2:])  # every row of a decode graph has its token
def test_tokens_beyond_the_plan_keep_their_outputs(kind: str) -> None:
    captured = Captured(kind)
    graph = captured.capture(captured.batch([20, 6, 6, 7], [6, 6, 6, 6]))
    pages = captured.batch([20], [3])
    captured.plan(pages)
    captured.fill(pages)
    captured.out.fill_(7.0)
    graph.replay()
    assert (captured.out == 7.0).all(-1).all(-1).tolist() == [False] * 3 + [True] * (MAX_TOKENS - 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_without_a_plan_does_not_see_new_keys(kind: str) -> None:
    """The buffers say four pages a row, filled in place; the plan knows of one."""
    captured = Captured(kind)
    lens = [6, 6, 6, 6]
    graph = captured.capture(captured.batch([16] * 4, lens))
    pages = captured.batch([64] * 4, lens, seed=1)
    captured.fill(pages)
    wrapper = captured.wrapper
    for buffer, values in zip(
        (wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf),
        pages.table,
        strict=True,
    ):
        buffer[: len(values)].copy_(values)
    stale = graph.replay().clone()
    captured.plan(pages)
    fresh = graph.replay()
    assert_as_reference((fresh, captured.lse), pages.expected(pages.spec()))
    assert not torch.allclose(stale, fresh, atol=0.1)


@pytest.mark.parametrize(
    ("name", "move"),
    [
        ("_float_workspace_buffer", lambda tensor: torch.empty_like(tensor)),
        ("_int_workspace_buffer", lambda tensor: tensor.clone()),
        ("_paged_kv_indptr_buf", lambda tensor: tensor.clone()),
        ("_paged_kv_indices_buf", lambda tensor: tensor.clone()),
        ("_paged_kv_last_page_len_buf", lambda tensor: tensor.clone()),
    ],
)
def test_a_tensor_that_moved_is_noticed(name: str, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    captured = Captured("tensor_cores")
    graph = captured.capture(captured.batch([20, 6, 6, 7], [1] * 4))
    kept = getattr(captured.wrapper, name)  # so that its address is not used again
    setattr(captured.wrapper, name, move(kept))
    with pytest.raises(GraphViolation, match=name):
        graph.replay()


def test_fa3_does_not_touch_the_float_workspace() -> None:
    captured = Captured("fa3")
    graph = captured.capture(captured.batch([20, 6, 6, 7], [6] * 4))
    kept = captured.wrapper._float_workspace_buffer
    captured.wrapper._float_workspace_buffer = kept[:0]
    del kept
    graph.replay()


def test_a_workspace_that_nothing_holds_is_refused() -> None:
    captured = Captured("cuda_cores")
    captured.plan(captured.batch([20, 6, 6, 7], [1] * 4))
    held = [captured.query, captured.cache, captured.out, captured.lse]
    with pytest.raises(GraphViolation, match="held by nothing"):
        GraphSimulator().capture(captured.run, held)


def test_merging_is_captured_too() -> None:
    out, lse = torch.zeros(2, 2, 64).half(), torch.zeros(2, 2)
    other, other_lse = torch.full_like(out, 4.0), torch.zeros_like(lse)

    def run() -> torch.Tensor:
        return flashinfer.merge_state(out, lse, other, other_lse)[0]

    graph = GraphSimulator(refuse_unreachable=True).capture(run, [out, lse, other, other_lse])
    out.fill_(2.0)
    assert graph.replay().unique().tolist() == [3.0]


def test_a_plan_is_not_captured() -> None:
    captured = Captured("fa2")
    pages = captured.batch([20, 6, 6, 7], [6] * 4)
    captured.fill(pages)

    def run() -> torch.Tensor:
        captured.plan(pages)
        return captured.run()

    with pytest.raises(GraphViolation, match="on the host while a graph is captured"):
        GraphSimulator().capture(run, [captured.wrapper, captured.query, captured.cache, captured.out, captured.lse])

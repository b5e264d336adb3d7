"""The req_to_token convention, eager: every answer and the whole pool, against the reference."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.adapters.req_to_token.attention import ReqToTokenAttention
from attn_backends.adapters.req_to_token.batch import ForwardBatch, ForwardMode, step_rows
from attn_backends.adapters.req_to_token.kv_pool import TokenKVPool
from attn_backends.adapters.req_to_token.layers import LayerKind
from attn_backends.interface.capabilities import Unsupported
from attn_backends.testing.graphs.host_reads import forbid_host_reads
from tests.helpers.req_to_token_engine import (
    BACKENDS,
    CROSS,
    DECODE,
    EXTEND,
    FULL,
    MIXED,
    SCALARS,
    VERIFY,
    Engine,
    filled,
    layer,
)

pytestmark = pytest.mark.parametrize("name", BACKENDS)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_requests_from_prompt_to_decode(name: str, dtype: torch.dtype | None) -> None:
    """Plain, windowed and capped layers: whole prompts, a chunk behind a prefix, decodes among them, decodes."""
    engine = filled(name, 7, 1, 12, dtype=dtype)
    engine.run(DECODE, [(1, 1), (0, 1)])
    engine.run(EXTEND, [(2, 5), (0, 3)])
    engine.run(ForwardMode.MIXED, [(2, 4), (1, 1), (0, 1)])
    for _ in range(3):
        engine.run(DECODE, [(0, 1), (2, 1), (1, 1)])


def test_a_window_and_a_prefix_count_every_key_once(name: str) -> None:
    """Queries of 0 weigh all that they see alike, and values are one-hot by position: the output says which keys."""
    layers = (layer(0, sliding_window_size=3), layer(1))
    engine = Engine(name, layers)
    engine.enter(0)
    for mode, first, new in ((EXTEND, 0, 6), (EXTEND, 6, 4), (DECODE, 10, 1)):
        step = engine.make(mode, [(0, new)])
        engine.adapter.init_forward_metadata(step.batch)
        for each in layers:
            step.queries[each.layer_id].zero_()
            step.values[each.layer_id] = torch.eye(64, dtype=engine.dtype)[first : first + new, None].repeat(1, 2, 1)
            output = engine.attend(step, each).view(new, 4, 64).float()
            for query, position in enumerate(range(first, first + new)):
                seen = range(max(0, position - 3) if each.layer_id == 0 else 0, position + 1)
                expected = torch.zeros(64)
                expected[list(seen)] = 1 / len(seen)
                torch.testing.assert_close(output[query], expected.expand(4, 64), atol=1e-3, rtol=0)
        engine.requests[0].num_tokens += new


def test_cross_attention(name: str) -> None:
    """The encoder's tokens stand in front of the decoder's; a row may have none."""
    engine = Engine(name, CROSS)
    for request, encoder_len in enumerate((5, 0, 9)):
        engine.enter(request, encoder_len)
    engine.run(EXTEND, [(0, 4), (1, 6)])
    engine.run(EXTEND, [(2, 3), (0, 2)])
    for _ in range(2):
        engine.run(DECODE, [(2, 1), (1, 1), (0, 1)])
    engine.run(VERIFY, [(0, 3), (2, 3)])


def test_drafts_are_verified_as_a_chain(name: str) -> None:
    engine = filled(name, 6, 9)
    engine.run(VERIFY, [(0, 3), (1, 3)])
    engine.forget(0, 2)
    engine.run(VERIFY, [(1, 4), (0, 4)])
    engine.run(DECODE, [(0, 1), (1, 1)])


def test_an_idle_step_is_zeros(name: str) -> None:
    engine = filled(name, 3)
    none = torch.zeros(0, dtype=torch.int64)
    for mode in (ForwardMode.IDLE, DECODE):
        batch = ForwardBatch(mode, none, none, none)
        engine.adapter.init_forward_metadata(batch)
        for num_tokens in (0, 4):
            query = torch.full((num_tokens, 256), torch.nan, dtype=engine.dtype)
            output = engine.adapter.forward(query, None, None, FULL, batch)
            assert output.shape == (num_tokens, 256)
            assert not output.any()
            assert output.equal(engine.adapter.forward_decode(query, None, None, FULL, batch))
    engine.check_pool()


def test_layers_that_share_keys(name: str) -> None:
    """A layer without keys of its own reads another's; one whose keys are in the pool already writes nothing."""
    engine = filled(name, 5, 8, layers=(FULL,))
    step = engine.make(DECODE, [(0, 1), (1, 1)])
    engine.adapter.init_forward_metadata(step.batch)
    output = engine.attend(step, FULL)
    again = engine.adapter.forward_decode(step.queries[0], None, None, FULL, step.batch)
    noise = torch.full((2, 2, 64), 3.0, dtype=engine.dtype)
    unsaved = engine.adapter.forward_decode(step.queries[0], noise, noise, FULL, step.batch, save_kv_cache=False)
    assert output.equal(again)
    assert output.equal(unsaved)
    engine.check(step, [output])


def test_an_engine_brings_its_own_classes(name: str) -> None:
    """Modes by name, layers by attribute, indices of either width, lists for lengths, and the default layers."""
    engine = filled(name, 6, 4, layers=(FULL, layer(1, sliding_window_size=5)))

    class Mode(enum.IntEnum):
        EXTEND = 7
        DECODE = 8

    class Theirs:
        layer_id, scaling, sliding_window_size, logit_cap, is_cross_attention = 1, 0.125, 5, 0.0, False
        tp_q_head_num, tp_k_head_num, qk_head_dim, v_head_dim = 4, 2, 64, 64

    class Batch:
        forward_mode = Mode.DECODE
        req_pool_indices = torch.tensor([1, 0], dtype=torch.int32)
        seq_lens = torch.tensor([4, 6])
        seq_lens_cpu = (4, 6)
        out_cache_loc = torch.tensor([0, 0], dtype=torch.int32)

    defaults = ReqToTokenAttention(
        name, **SCALARS, kv_cache_dtype=engine.dtype, q_dtype=engine.dtype, max_context_len=40, device="cpu",
        req_to_token=engine.req_to_token, max_req_pool_size=2, kv_pool=engine.pool, sliding_window_size=5,
    )  # fmt: skip
    assert [spec.window_left for spec in defaults.kinds.specs] == [5, -1]
    query, outputs = engine.numbers(2, 256), []
    for adapter in (engine.adapter, defaults):
        adapter.init_forward_metadata(Batch())
        outputs.append(adapter.forward(query, None, None, Theirs(), Batch()))
    assert outputs[0].equal(outputs[1])


def test_a_scale_that_differs_in_its_last_bits_is_the_same(name: str) -> None:
    usual = LayerKind.of(layer(0)).spec(torch.float32, torch.float32)
    near = LayerKind.of(layer(0, scaling=0.125 * (1 + 2**-50))).spec(torch.float32, torch.float32)
    assert near == usual


def test_adapters_share_buffers_and_no_workspace(name: str) -> None:
    """Two over one pool and one CSR: both are planned before either runs, as draft steps are."""
    indptr, last = torch.full((6,), -1, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    shared: dict[str, Any] = {"kv_indptr_buf": indptr, "kv_last_page_len_buf": last}
    engine = filled(name, 6, 9, 4, layers=(FULL,), **shared)
    other = ReqToTokenAttention(
        name, **SCALARS, kv_cache_dtype=engine.dtype, q_dtype=engine.dtype, max_context_len=40, device="cpu",
        req_to_token=engine.req_to_token, max_req_pool_size=5, kv_pool=engine.pool, skip_prefill=True,
        init_new_workspace=True, **shared,
    )  # fmt: skip
    assert indptr.tolist() == [0, 6, 15, 19, -1, -1]
    assert last.tolist() == [1, 1, 1, -1, -1]
    assert other.plans.plans.state is not engine.adapter.plans.plans.state
    step = engine.make(DECODE, [(0, 1), (2, 1)])
    engine.adapter.init_forward_metadata(step.batch)
    other.init_forward_metadata(step.batch)
    assert indptr.tolist() == [0, 7, 12, 19, -1, -1]
    output = engine.attend(step, FULL)
    assert other.forward_decode(step.queries[0], None, None, FULL, step.batch).equal(output)
    engine.check(step, [output])
    with pytest.raises(ValueError, match="skip_prefill"):
        other.init_forward_metadata(engine.make(EXTEND, [(1, 2)]).batch)


@pytest.mark.parametrize("mode", [EXTEND, DECODE, VERIFY])
def test_planning_reads_nothing_from_the_device(name: str, mode: ForwardMode) -> None:
    engine = filled(name, 6, 9)
    batch = engine.make(mode, [(0, 1), (1, 1)]).batch
    with forbid_host_reads("cpu", [batch, engine.req_to_token]):
        engine.adapter.init_forward_metadata(batch)


def test_the_pool(name: str) -> None:
    pool = TokenKVPool(6, [FULL, layer(4, v_head_dim=32)], torch.float8_e4m3fn, "cpu")
    key, value = pool.get_kv_buffer(4)
    assert (key.shape, value.shape, key.dtype) == ((7, 2, 64), (7, 2, 32), torch.float8_e4m3fn)
    pool.set_kv_buffer(
        4, torch.tensor([6, 0, 0], dtype=torch.int32), torch.ones(3, 2, 64), torch.full((3, 2, 32), 900.0)
    )
    assert key.float().sum((1, 2)).nonzero().flatten().tolist() == [0, 6]
    assert value[6].float().eq(448).all()
    assert not pool.get_kv_buffer(0)[0].float().any()
    with pytest.raises(ValueError, match=r"layer 2 is not in the pool, which has 0, 4"):
        pool.get_kv_buffer(2)


REQUESTS = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
LENS = st.lists(st.integers(1, 5), min_size=4, max_size=4)
STEPS = st.lists(st.tuples(st.sampled_from([EXTEND, DECODE, VERIFY]), REQUESTS, LENS), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.integers(0, 99))
def test_any_steps(name: str, steps: list[tuple[ForwardMode, list[int], list[int]]], seed: int) -> None:
    engine = Engine(name, MIXED[:3], seed=seed)
    for mode, requests, lens in steps:
        for request in requests:
            if request not in engine.requests:
                engine.enter(request)
        new = {EXTEND: lens, DECODE: [1] * 4, VERIFY: [lens[0]] * 4}[mode]
        engine.run(mode, list(zip(requests, new, strict=False)))


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_of_several_tokens(name: str, page_size: int) -> None:
    """As the pool has them."""
    engine = filled(name, 7, 1, 12, page_size=page_size, num_slots=256, max_context_len=48)
    engine.run(DECODE, [(1, 1), (0, 1)])
    engine.run(EXTEND, [(2, 5), (0, 3)])
    for _ in range(page_size):
        engine.run(DECODE, [(0, 1), (2, 1), (1, 1)])
    engine.run(VERIFY, [(0, 3), (1, 3)])
    engine.forget(0, 2)
    assert engine.adapter.plans.plans.cache.page_size == page_size


@pytest.mark.parametrize("page_size", [1, 4])
def test_neighbours_are_read_in_place(name: str, page_size: int) -> None:
    """Where the host knows that rows follow one another, with pages of one token, nothing is copied."""
    engine = filled(name, 7, 2, 12, 3, layers=(FULL,), page_size=page_size, num_slots=256)
    engine.says_rows = True
    engine.run(DECODE, [(1, 1), (2, 1), (3, 1)])
    engine.run(EXTEND, [(0, 3), (1, 6)])
    engine.run(DECODE, [(2, 1), (1, 1)])
    engine.run(DECODE, [(3, 1), (1, 1)])
    table = engine.adapter.plans.table
    for requests, in_place in (([1, 2], True), ([2, 1], False), ([0, 2], False), ([3], True)):
        batch = engine.make(DECODE, [(request, 1) for request in requests]).batch
        pages = table.self_attention(step_rows(batch, 40)).page_table
        shared = pages.untyped_storage().data_ptr() == engine.req_to_token.untyped_storage().data_ptr()
        assert shared is (in_place and page_size == 1)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_table_that_is_a_view_of_another(name: str, page_size: int) -> None:
    """Its columns lie apart: rows are copied, where they are neighbours too."""
    engine = filled(name, 7, 2, 12, layers=(FULL,), page_size=page_size, num_slots=256)
    engine.says_rows = True
    batch = engine.make(DECODE, [(0, 1), (1, 1)]).batch
    table = engine.adapter.plans.table
    wanted = table.self_attention(step_rows(batch, 40)).page_table
    table.req_to_token = engine.req_to_token.t().contiguous().t()
    assert table.req_to_token.stride(1) > 1
    pages = table.self_attention(step_rows(batch, 40)).page_table
    assert torch.equal(pages, wanted)
    assert pages.stride(1) == 1


class Made(TorchDispatchMode):
    """Keeps the tensors that operations make, in memory of their own."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known, self.tensors = {each.untyped_storage().data_ptr() for each in known}, list[torch.Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in self.known:
                self.known.add(each.untyped_storage().data_ptr())
                self.tensors.append(each)
        return made


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_copied_of_the_table(name: str, page_size: int) -> None:
    """A column for each page of the longest row, once: one tensor of that size, and none that is larger."""
    engine = filled(name, 7, 37, 12, layers=(FULL,), page_size=page_size, num_slots=256)
    batch = engine.make(DECODE, [(2, 1), (1, 1), (0, 1)]).batch
    rows, before = step_rows(batch, 40), engine.req_to_token.clone()
    with Made(engine.req_to_token) as made:
        pages = engine.adapter.plans.table.self_attention(rows).page_table
    assert pages.shape == (3, -(-38 // page_size))
    made_bytes = [each.untyped_storage().nbytes() for each in made.tensors]
    assert [count for count in made_bytes if count >= pages.numel() * 4] == [pages.numel() * 4]
    assert pages[1].tolist() == (before[1, :38:page_size] // page_size).tolist()
    assert torch.equal(engine.req_to_token, before)


def test_batches_that_bring_a_pool_of_pages(name: str) -> None:
    """Without a pool the adapter is told of pages, and refuses a pool whose pages they do not divide."""
    engine = filled(name, 17, 2, layers=(FULL,), page_size=16, num_slots=256)
    how = SCALARS | {"kv_cache_dtype": engine.dtype, "q_dtype": engine.dtype, "max_context_len": 40, "device": "cpu"}
    adapters = [
        ReqToTokenAttention(name, **how, req_to_token=engine.req_to_token, max_req_pool_size=5, kv_pool=None,
                            page_size=size)
        for size in (16, 4, 32)
    ]  # fmt: skip
    step = engine.make(DECODE, [(0, 1), (1, 1)])
    engine.adapter.init_forward_metadata(step.batch)
    expected, brought = engine.attend(step, FULL), replace(step.batch, token_to_kv_pool=engine.pool)
    for adapter, size in zip(adapters, (16, 4, 32), strict=True):
        assert adapter.plans.plans.cache.page_size == size
        adapter.init_forward_metadata(brought)
        if size == 32:
            with pytest.raises(ValueError, match="pool has pages of 16 slots, and the step is planned for pages of 32"):
                adapter.forward_decode(step.queries[0], None, None, FULL, brought)
        else:
            output = adapter.forward_decode(step.queries[0], None, None, FULL, brought)
            torch.testing.assert_close(output, expected, atol=2e-3, rtol=2e-3)


def test_an_encoder_in_front_needs_pages_of_one_token(name: str) -> None:
    engine = Engine(name, CROSS, page_size=4, num_slots=240)
    engine.enter(0)
    with pytest.raises(Unsupported, match="encoder_lens: got an encoder's tokens in front"):
        engine.run(EXTEND, [(0, 4)])


def test_its_state_is_warmed_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = filled(name, 7)
    asked: list[object] = []
    monkeypatch.setattr(
        type(engine.adapter.plans.plans.state), "warm_up", lambda state, progress: asked.append(progress)
    )
    engine.adapter.warm_up(print)
    assert asked == [print]

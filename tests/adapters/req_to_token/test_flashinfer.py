"""pymllm's `FlashInferAttnBackend`, called as its documentation does, over FlashInfer as it is emulated."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from attn_backends.adapters.req_to_token import plans
from attn_backends.adapters.req_to_token.attention import ReqToTokenAttention
from attn_backends.adapters.req_to_token.batch import ForwardMode
from attn_backends.adapters.req_to_token.flashinfer import (
    DecodeMetadata,
    FlashInferAttnBackend,
    PrefillMetadata,
    WrapperDispatch,
    should_use_tensor_core,
)
from attn_backends.adapters.req_to_token.layers import Layer
from attn_backends.interface.capabilities import Unsupported
from attn_backends.testing.graphs.harness import make_recorder
from tests.emulated import flashinfer
from tests.helpers.pymllm_engine import Emulated, PymllmEngine, serve
from tests.helpers.req_to_token_engine import CROSS, DECODE, EXTEND, GraphRunner, layer

HALF = torch.float16
FULL, WINDOW = layer(0), layer(1, sliding_window_size=3)


def filled(*lens: int, layers: tuple[Layer, ...] = (FULL,), **how: Any) -> PymllmEngine:
    engine = PymllmEngine(layers, **how)
    for request in range(len(lens)):
        engine.enter(request)
    engine.run(EXTEND, list(enumerate(lens)))
    return engine


def test_arguments_are_the_documents() -> None:
    """In its order, with its defaults."""
    parameters = inspect.signature(FlashInferAttnBackend).parameters
    assert list(parameters) == [
        "num_heads", "num_kv_heads", "head_dim", "kv_cache_dtype", "q_dtype", "max_context_len", "req_to_token",
        "device", "max_req_pool_size", "sliding_window_size", "skip_prefill", "kv_indptr_buf", "kv_last_page_len_buf",
        "init_new_workspace",
    ]  # fmt: skip
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {
        "sliding_window_size": None, "skip_prefill": False, "kv_indptr_buf": None, "kv_last_page_len_buf": None,
        "init_new_workspace": False,
    }  # fmt: skip


def test_attributes_are_the_documents() -> None:
    engine = PymllmEngine((FULL,))
    made = engine.adapter
    assert (made.num_heads, made.num_kv_heads, made.head_dim) == (4, 2, 64)
    assert (made.kv_cache_dtype, made.q_dtype, made.max_context_len) == (HALF, HALF, 40)
    assert made.req_to_token is engine.req_to_token
    assert made.device == torch.device("cpu")
    assert (made.skip_prefill, made.decode_use_tensor_cores) == (False, False)
    assert (made.prefill_wrapper_ragged, made.prefill_wrappers_paged, made.decode_wrappers) == (None, [], [])
    assert made.forward_metadata is None
    assert (made.decode_cuda_graph_metadata, made.prefill_cuda_graph_metadata) == ({}, {})
    assert made.get_cuda_graph_seq_len_fill_value() == 1


def test_a_prefill_and_its_decode() -> None:
    """Metadata names the wrappers that serve the step: a decode's and a prefill's, planned for these rows."""
    engine = filled(7, 2)
    metadata = engine.adapter.forward_metadata
    assert isinstance(metadata, PrefillMetadata)
    assert (metadata.use_ragged, metadata.extend_no_prefix) == (False, True)
    assert [type(w) for w in metadata.prefill_wrappers] == [flashinfer.BatchPrefillWithPagedKVCacheWrapper]
    engine.run(EXTEND, [(0, 3)])
    assert not engine.adapter.forward_metadata.extend_no_prefix
    engine.run(DECODE, [(0, 1), (1, 1)])
    metadata = engine.adapter.forward_metadata
    assert isinstance(metadata, DecodeMetadata)
    (wrapper,) = metadata.decode_wrappers
    assert isinstance(wrapper, flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    assert wrapper._paged_kv_indptr_buf.tolist() == [0, 11, 14]
    assert engine.adapter.decode_wrappers == [wrapper]
    engine.run(ForwardMode.MIXED, [(0, 1), (1, 4)])
    assert len(engine.adapter.forward_metadata.prefill_wrappers) == 2  # rows of one token have their own


def test_a_sliding_window_has_a_wrapper_of_its_own() -> None:
    engine = filled(9, 6, layers=(FULL, WINDOW), sliding_window_size=3)
    assert engine.adapter.dispatch_reason is WrapperDispatch.SLIDING_WINDOW
    engine.run(DECODE, [(0, 1), (1, 1)])
    windowed, full = engine.adapter.forward_metadata.decode_wrappers
    assert (windowed._window_left, full._window_left) == (3, -1)


def test_layers_come_unannounced() -> None:
    """A soft cap is in FlashInfer's plan: it is planned for when its layer first calls."""
    capped = (FULL, layer(1, logit_cap=2.0), layer(2, scaling=0.5), layer(3, sliding_window_size=5))
    engine = filled(7, 2, layers=capped)
    engine.run(DECODE, [(0, 1), (1, 1)])
    assert len(engine.adapter.forward_metadata.decode_wrappers) == 4


def test_larger_steps_than_before() -> None:
    engine = filled(30, 30)
    engine.run(DECODE, [(0, 1)])


@pytest.mark.parametrize("window", [None, 3])
def test_graphs(window: int | None) -> None:
    layers = (FULL,) if window is None else (FULL, WINDOW)
    engine = filled(7, 2, 12, layers=layers, sliding_window_size=window)
    indices = torch.full((60,), -1, dtype=torch.int32)
    engine.adapter.init_cuda_graph_state(4, 12, indices)
    recorder = make_recorder("cpu")
    decode, verify = GraphRunner(engine, 4, 1, recorder), GraphRunner(engine, 4, 3, recorder)
    assert set(engine.adapter.decode_cuda_graph_metadata) == set(engine.adapter.prefill_cuda_graph_metadata) == {4}
    decode.run([(0, 1), (2, 1)])
    assert indices[:8].tolist() == engine.req_to_token[0, :8].tolist()
    assert engine.adapter.forward_metadata.decode_wrappers == engine.adapter.decode_cuda_graph_metadata[4]
    verify.run([(1, 3), (0, 3)])
    assert engine.adapter.forward_metadata.prefill_wrappers == engine.adapter.prefill_cuda_graph_metadata[4]
    step = engine.make(DECODE, [(0, 1)])
    engine.adapter.init_forward_metadata(step.batch)
    with pytest.raises(RuntimeError, match="layer 7 is of a kind that no step had; graphs were captured"):
        engine.adapter.forward_decode(step.queries[0], None, None, layer(7, logit_cap=9.0), step.batch)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("num_heads", [4, 8])
@pytest.mark.parametrize("page_size", [1, 16])
def test_as_on_a_gpu(page_size: int, num_heads: int, window: int | None) -> None:
    """What test_flashinfer_gpu.py runs over FlashInfer itself."""
    engine = serve(Emulated, "cpu", page_size, num_heads, window)
    assert engine.adapter.decode_use_tensor_cores is (num_heads == 8)


def test_pages_are_the_pools() -> None:
    """The first batch brings a pool, and the plan has its pages, not a page a token."""
    engine = filled(17, 2, page_size=16)
    assert engine.adapter.plans.plans.cache.page_size == 16
    engine.run(DECODE, [(1, 1), (0, 1)])
    (wrapper,) = engine.adapter.forward_metadata.decode_wrappers
    assert wrapper._paged_kv_indptr_buf.tolist() == [0, 1, 3]
    assert wrapper._paged_kv_last_page_len_buf.tolist() == [3, 2]
    first_slots = engine.req_to_token[[1, 0, 0], [0, 0, 16]]
    assert wrapper._paged_kv_indices_buf[:3].tolist() == (first_slots // 16).tolist()
    lens = torch.tensor([18, 3])
    engine.adapter.indices_updater_decode.update(torch.tensor([0, 1]), lens, lens, 21)  # its batch has no pool
    assert engine.adapter.decode_wrappers[0]._paged_kv_indptr_buf.tolist() == [0, 2, 3]


def test_another_pool_of_other_pages() -> None:
    """The plan follows the batch's pool, to smaller pages too. What was said of graphs before any stays said."""
    paged, plain = filled(17, 2, page_size=16), PymllmEngine((FULL,))
    plain.req_to_token, plain.adapter = paged.req_to_token, paged.adapter  # rows of their own in one table
    paged.adapter.init_cuda_graph_state(4, 4)
    plain.enter(3)
    for engine, mode, row in ((plain, EXTEND, (3, 7)), (paged, DECODE, (0, 1)), (plain, DECODE, (3, 1)),
                              (paged, EXTEND, (1, 4))):  # fmt: skip
        engine.run(mode, [row])
        assert engine.adapter.plans.plans.cache.page_size == engine.page_size
    GraphRunner(paged, 4, 1, make_recorder("cpu")).run([(0, 1), (1, 1)])
    with pytest.raises(RuntimeError, match="batch's pool has pages of 1 slots, and so far 16; graphs were captured"):
        paged.adapter.init_forward_metadata(plain.make(DECODE, [(3, 1)]).batch)


def test_graphs_before_the_first_batch() -> None:
    """Then no pool was there to say: pages of one token serve any pool, and stay."""
    engine = filled(17, 2, page_size=16)
    engine.adapter = Emulated(4, 2, 64, HALF, HALF, 40, engine.req_to_token, torch.device("cpu"), 5)
    engine.adapter.init_cuda_graph_state(4, 4)
    GraphRunner(engine, 4, 1, make_recorder("cpu")).run([(1, 1), (0, 1)])
    engine.run(DECODE, [(1, 1), (0, 1)])
    assert engine.adapter.plans.plans.cache.page_size == 1


def test_a_pool_of_other_pages_than_the_planned_steps() -> None:
    paged, plain = filled(17, 2, page_size=16), filled(7, 5)
    step = paged.make(DECODE, [(0, 1)])
    paged.adapter.init_forward_metadata(step.batch)
    given, others = (step.queries[0], None, None, FULL), replace(step.batch, token_to_kv_pool=plain.pool)
    with pytest.raises(
        ValueError, match="the batch's pool has pages of 1 slots, and the step is planned for pages of 16"
    ):
        paged.adapter.forward_decode(*given, others)


def test_an_encoder_has_pages_of_one_token() -> None:
    """Its tokens lie in front of the decoder's, wherever these begin in a page: whatever the pool has."""
    engine = PymllmEngine(CROSS)
    engine.pool.page_size = 16
    engine.enter(0, 4)
    engine.enter(1, 3)
    engine.run(EXTEND, [(0, 5), (1, 2)])
    engine.run(DECODE, [(0, 1), (1, 1)])
    assert engine.adapter.plans.plans.cache.page_size == 1


def test_a_pool_that_says_nothing_of_pages() -> None:
    """It has those that the adapter was made with."""
    engine = filled(17, page_size=16)
    adapter = engine.adapter
    silent = SimpleNamespace(get_kv_buffer=engine.pool.get_kv_buffer, set_kv_buffer=engine.pool.set_kv_buffer)
    assert ReqToTokenAttention._pool(adapter, SimpleNamespace(token_to_kv_pool=silent)) is silent


def test_pages_that_could_not_be_planned_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PymllmEngine((FULL,), page_size=16)
    engine.enter(0)
    batch = engine.make(EXTEND, [(0, 5)]).batch
    with monkeypatch.context() as without_memory:
        without_memory.setattr(ReqToTokenAttention, "__init__", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            engine.adapter.init_forward_metadata(batch)
    engine.adapter.init_forward_metadata(batch)
    assert engine.adapter.plans.plans.cache.page_size == 16


def test_the_updater_plans_a_decode() -> None:
    engine = filled(7, 2)
    lens = torch.tensor([8, 3])
    engine.adapter.indices_updater_decode.update(torch.tensor([0, 1]), lens, lens, 11)
    (wrapper,) = engine.adapter.forward_metadata.decode_wrappers
    assert wrapper._paged_kv_indptr_buf.tolist() == [0, 8, 11]


def test_shared_buffers_and_no_prefill() -> None:
    indptr, last = torch.full((6,), -1, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    engine = filled(7, 2)
    engine.adapter = draft = Emulated(
        4, 2, 64, HALF, HALF, 40, engine.req_to_token, torch.device("cpu"), 5, None, True, indptr, last
    )
    engine.run(DECODE, [(1, 1), (0, 1)])
    assert indptr[:3].tolist() == [0, 3, 11]
    assert last[:2].tolist() == [1, 1]
    with pytest.raises(ValueError, match="skip_prefill"):
        draft.init_forward_metadata(engine.make(EXTEND, [(0, 2)]).batch)


def test_workspaces() -> None:
    """One for all of a device, but for those who ask for their own; a larger one takes the place of a smaller."""
    one, two, alone = filled(7), filled(7), filled(7, init_new_workspace=True)
    spaces = [each.adapter.plans.plans.state.float_workspace for each in (one, two, alone)]
    assert spaces[0] is spaces[1] is plans._SHARED[torch.device("cpu")]
    assert spaces[2].data_ptr() != spaces[0].data_ptr()
    for step in range(2):
        for each in (one, two, alone):
            each.run(DECODE, [(0, 1)])
        assert step < 2


def test_it_refuses() -> None:
    engine = filled(7)
    step = engine.make(DECODE, [(0, 1)])
    engine.adapter.init_forward_metadata(step.batch)
    given = (step.queries[0], step.keys[0], step.values[0], FULL)
    with pytest.raises(Unsupported, match="sinks: got given; supported: left out"):
        engine.adapter.forward_decode(*given, step.batch, sinks=torch.ones(4))
    without = replace(step.batch, token_to_kv_pool=None)
    with pytest.raises(ValueError, match="the batch has no token_to_kv_pool"):
        engine.adapter.forward_decode(*given, without)
    with pytest.raises(Unsupported, match="head_dim"):
        Emulated(4, 2, 60, HALF, HALF, 40, engine.req_to_token, torch.device("cpu"), 5)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "expected"),
    [
        (torch.float8_e4m3fn, 4, 4, True),
        (torch.float8_e5m2, 32, 8, True),
        (torch.float16, 32, 8, True),
        (torch.bfloat16, 12, 4, False),
        (torch.bfloat16, 7, 1, True),
        (torch.float32, 32, 8, False),
    ],
)
def test_tensor_cores(
    dtype: torch.dtype, heads: int, kv_heads: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert should_use_tensor_core(dtype, heads, kv_heads) is expected
    for said, meant in (("off", False), ("1", True), ("FALSE", False), ("", expected)):
        monkeypatch.setenv("ATTN_BACKENDS_FLASHINFER_TENSOR_CORES", said)
        assert should_use_tensor_core(dtype, heads, kv_heads) is meant
    monkeypatch.setenv("ATTN_BACKENDS_FLASHINFER_TENSOR_CORES", "perhaps")
    with pytest.raises(ValueError, match="TENSOR_CORES is 'perhaps'; allowed: 1, on, true, 0"):
        should_use_tensor_core(dtype, heads, kv_heads)


def test_decode_runs_where_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, meant in (("on", True), ("off", False)):
        monkeypatch.setenv("ATTN_BACKENDS_FLASHINFER_TENSOR_CORES", said)
        engine = filled(7)
        engine.run(DECODE, [(0, 1)])
        assert engine.adapter.decode_use_tensor_cores is meant
        assert engine.adapter.decode_wrappers[0].use_tensor_cores is meant

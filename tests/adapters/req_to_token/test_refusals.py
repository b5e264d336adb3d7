"""What the req_to_token adapter refuses: each error says what was asked, what is served, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.adapters.req_to_token.attention import ReqToTokenAttention
from attn_backends.adapters.req_to_token.batch import ForwardBatch, ForwardMode, step_rows
from attn_backends.adapters.req_to_token.kv_pool import TokenKVPool
from attn_backends.adapters.req_to_token.table import SharedBuffers, TokenTable
from attn_backends.interface.capabilities import CudaGraphSupport, Unsupported
from attn_backends.registry import register_backend, table
from attn_backends.registry.table import UnknownBackendError
from tests.helpers.fake_backends import fake_backend
from tests.helpers.req_to_token_engine import (
    CROSS,
    DECODE,
    EXTEND,
    FULL,
    SCALARS,
    VERIFY,
    Engine,
    GraphRunner,
    filled,
    layer,
)


@pytest.fixture
def engine() -> Engine:
    return filled("TORCH", 6, 9, layers=(FULL, layer(1, sliding_window_size=3)))


def batch(mode: object = DECODE, lens: Any = (6, 9), slots: int = 2, **how: Any) -> ForwardBatch:
    return ForwardBatch(
        mode, torch.tensor([0, 1]), torch.tensor([6, 9]), torch.zeros(slots, dtype=torch.int64), lens, **how
    )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (batch("DRAFT_EXTEND"), "DRAFT_EXTEND.*served: EXTEND, MIXED, DECODE, TARGET_VERIFY, IDLE"),
        (batch(EXTEND, None), "seq_lens_cpu is missing.*as a CPU tensor or a list"),
        (batch(DECODE, None), "seq_lens_cpu is missing, and TORCH plans with lengths on the host"),
        (batch(DECODE, torch.empty(2, device="meta")), "seq_lens_cpu is not on the host"),
        (batch(DECODE, [6]), r"seq_lens_cpu has shape \[1\]; the step has 2 rows"),
        (batch(DECODE, slots=3), "DECODE of 2 rows and 3 tokens.*one token a row; steps of unequal rows are EXTEND"),
        (batch(VERIFY, slots=5), "TARGET_VERIFY of 2 rows and 5 tokens.*as many drafts in every row"),
        (batch(EXTEND, slots=4), r"\[6, 9\] new tokens.*4 slots.*without it no row has a prefix"),
        (batch(EXTEND, slots=3, extend_prefix_lens_cpu=[6, 6]), r"rows with \[0, 3\] new tokens"),
        (batch(DECODE, [6, 41]), r"a row has 41 tokens.*at most 40 \(max_context_len\)"),
        (batch(DECODE, encoder_lens=torch.zeros(2)), "encoder_lens_cpu is missing"),
    ],
)  # fmt: skip
def test_batches(engine: Engine, wrong: ForwardBatch, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        engine.adapter.init_forward_metadata(wrong)
    with pytest.raises(RuntimeError, match="no step is planned: call init_forward_metadata"):
        engine.adapter.forward(torch.zeros(2, 256), None, None, FULL, batch())


def test_a_backend_that_reads_lengths_on_the_device_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH in a graph is one, but for what its builder says."""
    monkeypatch.setattr("attn_backends.backends.torch.metadata.TorchMetadataBuilder.needs_exact_lengths", False)
    engine = filled("TORCH", 6, 9)
    engine.adapter.init_cuda_graph_state(3, 9)
    graph = GraphRunner(engine, 3, 3)
    graph.run([(0, 3), (1, 3)], with_host_lens=False)
    graph.run([(1, 3)], with_host_lens=False)


def test_a_step_that_a_graph_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Plans.can_run_in_cudagraph` says so, before anything is planned."""
    engine = filled("TORCH", 6, 9, layers=(FULL,), options={"graph_max_seq_len": 10})
    engine.adapter.init_cuda_graph_state(2, 2)
    graph = GraphRunner(engine, 2)
    graph.run([(1, 1), (0, 1)])
    told = r"TORCH cannot run this step in a CUDA graph \(most keys of a row: decoder attention 11\): run it eager"
    with pytest.raises(ValueError, match=told):
        graph.run([(1, 1)])
    monkeypatch.setattr(type(engine.adapter.plans.plans), "can_run_in_cudagraph", lambda plans, common: False)
    with pytest.raises(ValueError, match="decoder attention 8"):
        graph.run([(0, 1)])


def test_limits(engine: Engine) -> None:
    six = ForwardBatch(DECODE, torch.zeros(6, dtype=torch.int64), torch.ones(6), torch.zeros(6), [1] * 6)
    with pytest.raises(ValueError, match=r"6 rows and 6 tokens.*5 rows \(max_req_pool_size\)"):
        engine.adapter.init_forward_metadata(six)
    small = filled("TORCH", 4, layers=(FULL,), max_num_tokens=7)
    with pytest.raises(ValueError, match=r"2 rows and 8 tokens.*7 tokens \(max_num_tokens\)"):
        small.adapter.init_forward_metadata(batch(VERIFY, slots=8))


def test_a_tree_of_drafts(engine: Engine) -> None:
    tree = SimpleNamespace(**vars(batch(VERIFY, slots=4)), spec_info=SimpleNamespace(custom_mask=torch.ones(4)))
    with pytest.raises(Unsupported, match="a chain of drafts"):
        engine.adapter.init_forward_metadata(tree)


def test_cross_attention_without_an_encoder() -> None:
    engine = Engine("TORCH", CROSS)
    with pytest.raises(ValueError, match="no encoder_lens: pass encoder_lens and encoder_lens_cpu, 0 for"):
        engine.adapter.init_forward_metadata(batch())


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"sliding_window_size": 4}, "layer 7 was not declared: it asks for decoder.*window 4.*Pass every layer"),
        ({"logit_cap": 30.0}, "layer 7 was not declared.*soft cap 30"),
        ({"scaling": 0.5}, r"layer 7 was not declared.*scale 0\.5"),
        ({"tp_q_head_num": 8}, r"8 query heads.*this adapter was made for \(4, 2, 64\)"),
        ({"is_cross_attention": True}, "layer 7 was not declared: it asks for encoder_decoder"),
    ],
)
def test_layers(engine: Engine, how: dict[str, Any], told: str) -> None:
    engine.adapter.init_forward_metadata(batch())
    with pytest.raises(ValueError, match=told):
        engine.adapter.forward(torch.zeros(2, 256), None, None, layer(7, **how), batch())


def test_a_layer_of_another_type(engine: Engine) -> None:
    engine.adapter.init_forward_metadata(batch())
    encoder = SimpleNamespace(**vars(FULL), attn_type=SimpleNamespace(value="encoder_only"))
    with pytest.raises(ValueError, match="serves decoder layers"):
        engine.adapter.forward(torch.zeros(2, 256), None, None, encoder, batch())


def test_calls(engine: Engine) -> None:
    adapter, query, new = engine.adapter, torch.zeros(2, 256), torch.zeros(2, 128)
    adapter.init_forward_metadata(batch())
    with pytest.raises(ValueError, match="planned step is DECODE, and this call is for EXTEND, MIXED, TARGET_VERIFY"):
        adapter.forward_extend(query, new, new, FULL, batch())
    for q in (torch.zeros(3, 256), torch.zeros(2, 128), torch.zeros(2, 256, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"need \[2, 256\] torch.float32"):
            adapter.forward(q, new, new, FULL, batch())
    for k, v, slots in ((new, None, 2), (new, new, 3), (new[:1], new, 2)):
        with pytest.raises(ValueError, match="need one k, v and slot a token"):
            adapter.forward(query, k, v, FULL, batch(slots=slots))
    engine.check_pool()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"req_to_token": torch.zeros(5, 48)}, r"\[5, 48\] torch.float32.*need \[max_reqs, 40"),
        ({"req_to_token": torch.zeros(5, 39, dtype=torch.int32)}, r"\[5, 39\]"),
        ({"sliding_window_size": 4}, r"layers have windows \[-1\], and sliding_window_size is 4"),
        ({"layers": []}, "declare every layer"),
        ({"num_heads": 8}, r"4 query heads.*made for \(8, 2, 64\)"),
        ({"kv_cache_dtype": torch.float16}, r"get_kv_buffer gives \[10, 2, 64\] torch.float32.*reads.*torch.float16"),
        ({"options": {"gather": 1}}, "gather"),
    ],
)
def test_construction(how: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        adapter("TORCH", **how)


def adapter(name: str, **how: Any) -> ReqToTokenAttention:
    given: dict[str, Any] = {
        "kv_cache_dtype": torch.float32, "q_dtype": torch.float32, "max_context_len": 40, "device": "cpu",
        "req_to_token": torch.zeros(5, 48, dtype=torch.int32), "max_req_pool_size": 5, "layers": [FULL],
        "kv_pool": TokenKVPool(9, [FULL], torch.float32, "cpu"),
    }  # fmt: skip
    return ReqToTokenAttention(name, **(given | SCALARS | how))


@pytest.fixture
def _own_table() -> Iterator[None]:
    """What a test registers is gone behind it."""
    before = dict(table._rows()), dict(table._classes)
    yield
    for held, content in zip((table._rows(), table._classes), before, strict=True):
        held.clear()  # type: ignore[attr-defined]
        held.update(content)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_own_table")
def test_backends_are_used_or_refused() -> None:
    with pytest.raises(UnknownBackendError, match="TORCH"):
        adapter("TORCHH")
    register_backend("PLAIN", fake_backend("PLAIN"))
    register_backend("PAGED", fake_backend("PAGED", page_sizes={16, 32}))
    for name, how, told in (
        ("PLAIN", {"layers": [FULL, layer(1, is_cross_attention=True)]}, "attention_type: got encoder_decoder"),
        ("PLAIN", {"layers": [layer(0, logit_cap=30.0)]}, r"soft_cap: got logits_soft_cap=30\.0"),
        ("PLAIN", {"layers": None, "sliding_window_size": 7}, "window: got window_left=7"),
        ("PAGED", {}, "page_size: got 1; supported: 16, 32"),
    ):
        with pytest.raises(Unsupported, match=told):
            adapter(name, **how)


@pytest.mark.parametrize(("heads", "dim", "dtype"), [(2, 16, torch.float16), (4, 16, None), (2, 8, None)])
def test_a_pool_that_is_not_the_layers(heads: int, dim: int, dtype: torch.dtype | None) -> None:
    """Of layers that were not declared too: their pool is seen when they first run."""
    engine = filled("TORCH", 6, 9, layers=(FULL,))
    other = replace(FULL, tp_k_head_num=heads, qk_head_dim=dim, v_head_dim=dim)
    pool = TokenKVPool(64, [other], dtype or engine.dtype, "cpu")
    how = SCALARS | {"kv_cache_dtype": engine.dtype, "q_dtype": engine.dtype, "max_context_len": 40, "device": "cpu"}
    made = ReqToTokenAttention("TORCH", **how, req_to_token=engine.req_to_token, max_req_pool_size=5, kv_pool=pool)
    step = engine.make(DECODE, [(0, 1), (1, 1)])
    made.init_forward_metadata(step.batch)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"kv_cache.key has pages of .*this layer has pages of"):
            made.forward_decode(step.queries[0], None, None, FULL, step.batch)


def test_a_buffer_that_is_too_small() -> None:
    with pytest.raises(ValueError, match="kv_indptr_buf has room for 1, and this step needs 3: make it larger"):
        filled("TORCH", 4, 4, layers=(FULL,), kv_indptr_buf=torch.zeros(1, dtype=torch.int32))


def test_a_buffer_of_the_very_size_will_do() -> None:
    pages, lens = torch.tensor([[3, 4], [5, 0]], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    buffers = SharedBuffers(*(torch.zeros(count, dtype=torch.int32) for count in (3, 2, 3)))
    csr = buffers.csr(pages, lens, 1, 3)
    assert csr is not None
    assert (csr.indptr.tolist(), csr.indices.tolist(), csr.last_page_len.tolist()) == ([0, 2, 3], [3, 4, 5], [1, 1])


def test_an_encoder_that_leaves_no_columns() -> None:
    table = TokenTable(torch.zeros(2, 16, dtype=torch.int32), 12, torch.device("cpu"))
    encoders = {"encoder_lens": torch.tensor([0, 8]), "encoder_lens_cpu": [0, 8]}
    with pytest.raises(ValueError, match=r"a row has 9 tokens, with up to 8 of an encoder in front.*in 16 columns"):
        table.self_attention(step_rows(batch(**encoders), 12))


def test_lengths_may_be_written_over_once_a_step_is_planned() -> None:
    """Engines keep them in tensors that the next step is written to."""
    lens, lens_cpu, encoders = (torch.tensor(two, dtype=torch.int32) for two in ((6, 9), (6, 9), (2, 1)))
    encoders_cpu = encoders.clone()
    step = replace(batch(lens=lens_cpu), seq_lens=lens, encoder_lens=encoders, encoder_lens_cpu=encoders_cpu)
    rows = step_rows(step, 40)
    crossed = TokenTable(torch.zeros(2, 50, dtype=torch.int32), 40, torch.device("cpu")).cross_attention(rows)
    for each in (lens, lens_cpu, encoders, encoders_cpu):
        each.fill_(-7)
    assert (rows.seq_lens.tolist(), rows.seq_lens_cpu.tolist(), crossed.seq_lens.tolist()) == ([6, 9], [6, 9], [2, 1])
    assert rows.encoder_lens_cpu is not None
    assert rows.encoder_lens_cpu.tolist() == [2, 1]


def test_graphs_of_decodes_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = engine.adapter.plans.plans.backend
    decodes = replace(backend.capabilities(), cuda_graph=CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    monkeypatch.setattr(backend, "capabilities", lambda: decodes)
    engine.adapter.init_cuda_graph_state(2, 6)
    GraphRunner(engine, 2).run([(0, 1), (1, 1)])
    with pytest.raises(Unsupported, match="a graph of 3 tokens a row; supported: UNIFORM_SINGLE_TOKEN_DECODE"):
        GraphRunner(engine, 2, 3)


def test_modes_go_by_name() -> None:
    assert ForwardMode.of("decode") is ForwardMode.of(SimpleNamespace(name="DECODE")) is DECODE
    assert replace(batch(), forward_mode="idle").forward_mode == "idle"

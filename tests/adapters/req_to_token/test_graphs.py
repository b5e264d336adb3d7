"""The req_to_token convention in CUDA graphs: capture and replay of decode and verify, with padded rows."""

from __future__ import annotations

import pytest
import torch

from attn_backends.adapters.req_to_token.batch import ForwardMode
from attn_backends.graphs.recorder import GraphRecorder
from attn_backends.testing.graphs.harness import make_recorder
from attn_backends.testing.graphs.host_reads import forbid_host_reads
from tests.helpers.req_to_token_engine import (
    BACKENDS,
    CROSS,
    DECODE,
    EXTEND,
    FULL,
    MIXED,
    VERIFY,
    Engine,
    GraphRunner,
    filled,
)

pytestmark = pytest.mark.parametrize("name", BACKENDS)


def graphs(engine: Engine, *sizes: tuple[int, int], recorder: GraphRecorder | None = None) -> list[GraphRunner]:
    """Graphs of (rows, tokens a row), captured in one pool."""
    engine.adapter.init_cuda_graph_state(max(bs for bs, _ in sizes), max(bs * query_len for bs, query_len in sizes))
    recorder = recorder or make_recorder(engine.device)
    return [GraphRunner(engine, bs, query_len, recorder) for bs, query_len in sizes]


def test_decode(name: str) -> None:
    """Sizes in turns, rows that come and go, eager steps between; padding disturbs no live slot."""
    engine = filled(name, 7, 2, 12, 1)
    large, small = graphs(engine, (4, 1), (2, 1))
    engine.check_pool()
    large.run([(0, 1), (1, 1), (2, 1), (3, 1)])
    large.run([(2, 1)])
    small.run([(3, 1)])
    engine.run(EXTEND, [(3, 6), (0, 2)])
    large.run([(3, 1), (0, 1), (1, 1)])
    small.run([(0, 1), (3, 1)])


def test_verify(name: str) -> None:
    """As many drafts in every row, of which some are taken back."""
    engine = filled(name, 7, 2, 12)
    verify, decode = graphs(engine, (4, 3), (4, 1))
    for _ in range(2):
        verify.run([(0, 3), (1, 3), (2, 3)])
        engine.forget(1, 2)
        verify.run([(1, 3)])
        decode.run([(2, 1), (0, 1)])
    engine.run(VERIFY, [(0, 2), (1, 2)])


def test_sizes_are_captured_at_any_time(name: str) -> None:
    """Between replays and eager steps too."""
    engine = filled(name, 4)
    recorder = make_recorder("cpu")
    (first,) = graphs(engine, (2, 1), recorder=recorder)
    first.run([(0, 1)])
    engine.run(DECODE, [(0, 1)])
    GraphRunner(engine, 1, recorder=recorder).run([(0, 1)])
    first.run([(0, 1)])


def test_a_first_token_decodes_next_to_padding(name: str) -> None:
    """A live row of one key looks like padding of the same request, but for its slot."""
    engine = Engine(name, MIXED)
    engine.enter(0)
    (graph,) = graphs(engine, (3, 1))
    graph.run([(0, 1)])
    graph.run([(0, 1)])


def test_an_idle_step_replays_a_decode(name: str) -> None:
    engine = filled(name, 4)
    (graph,) = graphs(engine, (2, 1))
    graph.run([(0, 1)])
    graph.static["out_cache_loc"].zero_()
    ones = torch.ones(2, dtype=torch.int64)
    indices = torch.zeros(2, dtype=torch.int64)
    engine.adapter.init_forward_metadata_replay_cuda_graph(2, indices, ones, 2, ForwardMode.IDLE, ones)
    graph.graph.replay()
    engine.check_pool()


def test_shared_indices(name: str) -> None:
    engine = filled(name, 4, 2, layers=(FULL,), kv_indptr_buf=torch.zeros(6, dtype=torch.int32))
    indices = torch.full((60,), -1, dtype=torch.int32)
    engine.adapter.init_cuda_graph_state(2, 2, kv_indices_buf=indices)
    graph = GraphRunner(engine, 2)
    graph.run([(1, 1), (0, 1)])
    assert indices[:8].tolist() == [*engine.req_to_token[1, :3].tolist(), *engine.req_to_token[0, :5].tolist()]
    assert engine.adapter.buffers.indptr is not None
    assert engine.adapter.buffers.indptr[:3].tolist() == [0, 3, 8]


def test_filling_reads_nothing_from_the_device(name: str) -> None:
    engine = filled(name, 4, 2)
    graphs(engine, (2, 3))
    indices, lens, lens_cpu = torch.tensor([0, 1]), torch.tensor([4, 2]), torch.tensor([4, 2])
    with forbid_host_reads("cpu", [indices, lens, engine.req_to_token]):
        engine.adapter.init_forward_metadata_replay_cuda_graph(2, indices, lens, 6, VERIFY, lens_cpu)


def test_refusals(name: str) -> None:
    engine = filled(name, 4)
    adapter, indices, ones = engine.adapter, torch.zeros(9, dtype=torch.int64), torch.ones(9, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state"):
        adapter.init_forward_metadata_capture_cuda_graph(2, 2, indices, ones, DECODE)
    with pytest.raises(ValueError, match=r"6 rows and 6 tokens.*up to 5 rows \(max_req_pool_size\)"):
        adapter.init_cuda_graph_state(6, 6)
    adapter.init_cuda_graph_state(2, 6)
    for bs, tokens, mode, told in (
        (3, 3, DECODE, "3 rows and 3 tokens.*up to 2 rows and 6 tokens"),
        (2, 8, VERIFY, "2 rows and 8 tokens.*up to 2 rows and 6 tokens"),
        (2, 5, VERIFY, "as many drafts in every row"),
        (2, 4, DECODE, "one token a row"),
        (2, 2, EXTEND, "EXTEND.*serves DECODE, TARGET_VERIFY: run this step eager"),
    ):
        with pytest.raises(ValueError, match=told):
            adapter.init_forward_metadata_capture_cuda_graph(bs, tokens, indices, ones, mode)
    GraphRunner(engine, 2)
    with pytest.raises(ValueError, match=r"no graph of 1 rows was captured for DECODE; captured: \[2\]"):
        adapter.init_forward_metadata_replay_cuda_graph(1, indices, ones, 1, DECODE, ones)
    with pytest.raises(ValueError, match="captured for TARGET_VERIFY; captured: none"):
        adapter.init_forward_metadata_replay_cuda_graph(2, indices, ones, 2, VERIFY, ones)
    with pytest.raises(ValueError, match=f"seq_lens_cpu is missing, and {name} plans with lengths on the host"):
        adapter.init_forward_metadata_replay_cuda_graph(2, indices, ones, 2, DECODE, None)
    with pytest.raises(RuntimeError, match="no step is planned"):
        adapter.forward(torch.zeros(2, 256), None, None, FULL, engine.make(DECODE, [(0, 1)]).batch)
    with pytest.raises(RuntimeError, match="never grow"):
        adapter.init_cuda_graph_state(1, 1)


def test_cross_attention(name: str) -> None:
    """Decodes over an encoder's keys, which an eager step has written."""
    engine = Engine(name, CROSS)
    for request, encoder_len in enumerate((3, 9, 1)):
        engine.enter(request, encoder_len)
    engine.run(EXTEND, [(0, 4), (1, 2), (2, 6)])
    engine.adapter.init_cuda_graph_state(3, 3)
    indices, ones = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="no encoder_lens"):
        engine.adapter.init_forward_metadata_capture_cuda_graph(1, 1, indices, ones, DECODE)
    graph = GraphRunner(engine, 3)
    graph.run([(1, 1), (0, 1), (2, 1)])
    graph.run([(2, 1)])
    engine.run(EXTEND, [(1, 2)])
    graph.run([(1, 1), (2, 1)])

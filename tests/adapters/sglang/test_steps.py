"""Any backend in SGLang's convention, over its pools and layers: every answer against the reference.

Over what stands for SGLang here; `make test-engines` runs the same over SGLang itself.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.adapters.sglang.steps import eager_rows, graph_rows
from attn_backends.testing.graphs.harness import make_recorder
from tests.helpers import flashinfer_emulated  # noqa: F401 (registers)
from tests.helpers.sglang_engine import Engine, GraphRunner, Kind, Shape

SINKS = (Kind(sinks=True), Kind(window=3, sinks=True), Kind())
SHAPES = {
    "page 1": Shape(page_size=1),
    "page 16": Shape(page_size=16),
    "page 64": Shape(page_size=64),
    "sinks": Shape(kinds=SINKS),
    "hnd": Shape(hnd=True),
    "swa pool": Shape(swa_pool=True),
    "swa pool, page 1": Shape(swa_pool=True, page_size=1),
    "fp8": Shape(cache_dtype=torch.float8_e4m3fn, scales=(0.5, 0.125)),
    "fp8 without scales": Shape(cache_dtype=torch.float8_e4m3fn),
    "scales that nothing divides by": Shape(scales=(0.5, 0.125)),
    "bfloat16": Shape(dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
    "fp8 in an swa pool": Shape(swa_pool=True, cache_dtype=torch.float8_e4m3fn, scales=(0.5, 2.0)),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def random_steps(engine: Engine, choose: random.Random, count: int) -> None:
    """Steps of any mode, over any rows; rejected drafts are taken back."""
    for _ in range(count):
        live = [r for r, length in enumerate(engine.lens) if 0 < length < engine.shape.context - 12]
        started = choose.sample(live, choose.randint(1, len(live))) if live else []
        mode = choose.choice(["EXTEND", "MIXED", "SPLIT_PREFILL", "DRAFT_EXTEND_V2"] + ["DECODE", "TARGET_VERIFY"] * 2)
        if mode in ("DECODE", "TARGET_VERIFY") and started:
            new = 1 if mode == "DECODE" else choose.randint(2, 4)
            engine.run(mode, [(r, new) for r in started])
            if new > 1:
                engine.forget(started[0], choose.randint(0, new - 1))
            continue
        rows = [(r, choose.choice((1, 2, 7, 11))) for r in started]
        fresh = [r for r, length in enumerate(engine.lens) if length == 0]
        rows += [(r, choose.choice((1, 5, 16, 17, 33))) for r in fresh[:2]]
        if rows:
            choose.shuffle(rows)
            engine.run("EXTEND" if mode in ("DECODE", "TARGET_VERIFY") else mode, rows)


@each_shape
@pytest.mark.parametrize("seed", range(2))
def test_random_steps(shape: Shape, seed: int) -> None:
    choose = random.Random(seed)
    kv_heads = choose.choice((1, 2, 4))
    random_steps(Engine("TORCH", replace(shape, kv_heads=kv_heads), seed), choose, 12)


@each_shape
def test_graphs(shape: Shape) -> None:
    """Sizes in turns, rows that come and go, eager steps between, drafts that are taken back: by the simulator, which
    runs what was recorded and no Python of ours."""
    graphs_in_turns(Engine("TORCH", shape))


def graphs_in_turns(engine: Engine) -> None:
    engine.run("EXTEND", [(0, 7), (1, 2), (2, 18), (3, 1)])
    engine.attention.init_cuda_graph_state(4, 12)
    recorder = make_recorder("cpu")
    decode, small = (GraphRunner(engine, bs, recorder=recorder) for bs in (4, 2))
    verify = GraphRunner(engine, 4, "TARGET_VERIFY", 3, recorder)
    drafts = GraphRunner(engine, 4, "DRAFT_EXTEND_V2", 2, recorder)
    decode.run([0, 1, 2, 3])
    small.run([3])
    verify.run([2, 0, 1])
    engine.forget(1, 2)
    decode.run([2])
    engine.run("EXTEND", [(3, 6), (4, 30), (0, 2)])
    drafts.run([4, 1])
    verify.run([4])
    small.run([0, 4])
    engine.run("DECODE", [(4, 1), (1, 1)])


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_backend_that_plans(page_size: int) -> None:
    """FLASHINFER works its plans and indices out before a graph is replayed."""
    half = Shape(
        kinds=(Kind(), Kind(window=5)), head_dim=64, page_size=page_size, dtype=torch.float16, cache_dtype=torch.float16
    )
    random_steps(Engine("FLASHINFER_EMULATED", half), random.Random(0), 6)
    graphs_in_turns(Engine("FLASHINFER_EMULATED", replace(half, swa_pool=True)))


def test_an_idle_step_gives_zeros() -> None:
    engine = Engine("TORCH", Shape())
    step = engine.make("DECODE", [(0, 1)])
    step.batch.forward_mode = type(step.batch.forward_mode)["IDLE"]
    engine.attention.init_forward_metadata(step.batch)
    got = engine.call(0, step.batch, torch.full((3, 4, 16), torch.nan), step.keys[0], step.values[0])
    assert got.shape == (3, 64)
    assert not got.any()


def test_tokens_behind_the_rows_come_back_as_zeros() -> None:
    """As a padded prompt's do."""
    engine = Engine("TORCH", Shape())
    step = engine.make("EXTEND", [(0, 3)])
    engine.attention.init_forward_metadata(step.batch)
    query = torch.cat([step.queries[0], torch.full((2, 4, 16), torch.nan)])
    got = engine.call(0, step.batch, query, step.keys[0], step.values[0])
    assert got[:3].any()
    assert not got[3:].any()


def test_a_layer_that_shares_keys_writes_none() -> None:
    engine = Engine("TORCH", Shape(kinds=(Kind(), Kind())))
    engine.run("EXTEND", [(0, 5)])
    before = [buffer.clone() for buffer in engine.pool.get_kv_buffer(0)]
    step = engine.make("DECODE", [(0, 1)])
    engine.attention.init_forward_metadata(step.batch)
    query, key, value = (each[0] for each in (step.queries, step.keys, step.values))
    engine.attention.forward(query.flatten(1), None, None, engine.layers[0], step.batch)
    engine.attention.forward(query.flatten(1), key, value, engine.layers[0], step.batch, save_kv_cache=False)
    for buffer, then in zip(engine.pool.get_kv_buffer(0), before, strict=True):
        torch.testing.assert_close(buffer, then, equal_nan=True)


def test_without_lengths_on_the_host() -> None:
    """A backend that plans with them says so; TORCH is one."""
    engine = Engine("TORCH", Shape())
    engine.run("EXTEND", [(0, 5)])
    step = engine.make("DECODE", [(0, 1)])
    step.batch.seq_lens_cpu = None
    with pytest.raises(ValueError, match="exact lengths on the host"):
        engine.attention.init_forward_metadata(step.batch)


def step_of(mode: str, lens: list[int], num_tokens: int, *, on_host: bool = True, **more: Any) -> SimpleNamespace:
    """What SGLang says of a step of so many rows and tokens."""
    given = {
        "forward_mode": SimpleNamespace(name=mode), "batch_size": len(lens), "seq_lens": torch.tensor(lens),
        "seq_lens_cpu": torch.tensor(lens) if on_host else None, "req_pool_indices": torch.arange(len(lens)),
        "input_ids": torch.zeros(num_tokens, dtype=torch.int64), "spec_info": None,
    }  # fmt: skip
    return SimpleNamespace(**given | more)


def test_padding_of_a_graph_has_keys_for_its_queries() -> None:
    """SGLang fills the lengths of padded rows with 1, whatever tokens they have."""
    rows = graph_rows(step_of("DRAFT_EXTEND_V2", [9, 1], 6), "TORCH", 40, 1)
    assert (rows.seq_lens.tolist(), rows.seq_lens_cpu.tolist(), rows.query_lens.tolist()) == ([9, 3], [9, 3], [3, 3])


def test_a_verify_has_the_tokens_that_it_brings() -> None:
    """A draft's own number of tokens is of the steps that extend it."""
    told = SimpleNamespace(num_tokens_per_req=5)
    for mode, query_len in (("TARGET_VERIFY", 3), ("DRAFT_EXTEND_V2", 5)):
        rows = graph_rows(step_of(mode, [9, 8], 6, spec_info=told), "TORCH", 40, 1)
        assert rows.query_lens.tolist() == [query_len] * 2


def test_a_decode_beside_a_tree_of_drafts_is_a_decode() -> None:
    rows = eager_rows(step_of("DECODE", [9, 8], 2), "TORCH", 40, 4)
    assert (rows.query_lens.tolist(), rows.seq_lens_cpu.tolist()) == ([1, 1], [9, 8])


def test_lengths_of_prompts_follow_from_their_prefixes() -> None:
    prompts = {"extend_seq_lens_cpu": [3, 2], "extend_prefix_lens_cpu": [6, 0]}
    rows = eager_rows(step_of("EXTEND", [9, 2], 5, on_host=False, **prompts), "TORCH", 40, 1)
    assert (rows.seq_lens_cpu.tolist(), rows.are_upper_bounds) == ([9, 2], False)

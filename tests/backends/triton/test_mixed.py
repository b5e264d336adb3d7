"""TRITON's graphs of mixed batches: two lists have each token once between them; seeded faults are found; and on Hopper
replays are what eager steps are, and the reference."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.spec import KVCacheSpec, Limits, plan_groups
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.conformance import BackendConformance
from attn_backends.testing.graphs.harness import CapturedStep, make_recorder
from attn_backends.testing.graphs.mixed import MixedFiller, engine_tensors
from attn_backends.testing.harness import assert_step, make_layer
from attn_backends.testing.kit.mixed import MIXED_ROWS, MIXED_TOKENS
from tests.helpers.interpreted import in_own_process, interpreted, only_interpreted, run_interpreted
from tests.helpers.mutate import copied_module

state = pytest.importorskip("attn_backends.backends.triton.state", reason="needs triton")
launch = pytest.importorskip("attn_backends.kernels.prefill.launch")
schedule = pytest.importorskip("attn_backends.backends.triton.schedule")
decode = pytest.importorskip("attn_backends.backends.triton.kernels.decode")
equal_cuts = pytest.importorskip("attn_backends.kernels.equal_cuts")
list_kernel = pytest.importorskip("attn_backends.kernels.prefill.list_kernel")
split_launch = pytest.importorskip("attn_backends.kernels.prefill.split_launch")

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
FAULTS = {  # of the list of tiles
    "rows that neither has": ("(query_lens > others_tokens)", "(query_lens > others_tokens + 1)"),
    "tokens behind all rows that nobody writes": ("is_rest | (", "(nth < 0) | ("),
    "the last of them that nobody writes": ("num_tokens - starts, 0", "num_tokens - 1 - starts, 0"),
    "a row in their place": ("is_rest = nth == num_rows", "is_rest = nth == num_rows - 1"),
}

test_interpreted, test_more_interpreted = interpreted(__file__, "not emulated")


def kit() -> BackendConformance:
    return type("Kit", (BackendConformance,), {"backend_name": "TRITON", "dtypes": (torch.float32,)})()


@only_interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_finds_lists_that_leave_tokens_out(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_launch, "list_kernel", copied_module(list_kernel, tmp_path, FAULTS[fault]).list_kernel)
    with pytest.raises(AssertionError):
        kit().test_mixed_replays_equal_the_reference("plain")


@only_interpreted
def test_the_kit_finds_decodes_that_neither_list_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made = schedule.CutList
    monkeypatch.setattr(schedule, "CutList", lambda *given: made(*given[:3], given[3] - 1, *given[4:]))
    with pytest.raises(AssertionError):
        kit().test_mixed_replays_equal_the_reference("plain")


@only_interpreted
def test_the_kit_finds_lists_of_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    make = state._relister

    def once(*given: Any) -> Any:
        again = functools.cache(make(*given))
        again()  # the first batch, or what was there before it
        return again

    monkeypatch.setattr(state, "_relister", once)
    with pytest.raises(AssertionError):
        kit().test_mixed_replays_equal_the_reference("plain")
    with pytest.raises(AssertionError):
        kit().test_mixed_replays_are_planned_over_an_engines_tensors("plain")


@only_interpreted
@pytest.mark.parametrize("seed", range(40))
def test_lists_have_every_query_once(seed: int) -> None:
    """Random rows of no tokens, of few and of many, in any order: tokens of a row are one kernel's, and those behind
    all rows are the prefill's, without keys. Nothing is beyond what the lists have room for."""
    numbers = Random(seed)
    num_rows, group = numbers.choice((1, 3, 40, 127, 128, 129, 200)), numbers.choice((1, 3, 4, 16))
    most = numbers.choice((3, 20, 200))
    query_lens = [numbers.choice((0, 1, numbers.randint(0, most))) for _ in range(num_rows)]
    seq_lens = [count + numbers.choice((0, 5, 3000)) if count else 0 for count in query_lens]
    num_tokens = max(num_rows, sum(query_lens) + numbers.choice((0, 1, 77)))
    spec = AttentionSpec(2 * group, 2, 32, window_left=numbers.choice((-1, 100)), dtype=torch.float16)
    limits = Limits(num_rows, num_tokens, 4096)
    made = state.TritonState(plan_groups({0: spec}), KVCacheSpec(64, 16), limits, "cpu")
    made.hold_graph_buffers(num_rows)
    clone = made.mixed_graph_clone(num_rows, num_tokens)
    step, buffers = clone.steps[0], clone.get_graph_input_buffers(clone.steps[0].metadata)
    starts = np.cumsum([0, *query_lens])
    buffers["query_start_loc"].copy_(torch.from_numpy(starts))
    buffers["seq_lens"].copy_(torch.tensor(seq_lens))
    clone.replan(step.metadata)
    tile, served = step.splits.tile, np.zeros((num_tokens, group), int)
    for row, first_token, query_len, first, seq_len, _count, split, _slot in step.splits.work_items.tolist():
        if row >= 0 and split == 0:
            of_row = served[first_token : first_token + query_len].reshape(-1)  # token times query head
            of_row[first : first + tile.rows] += 1
            is_rest = first_token == starts[-1]
            assert (seq_len, query_len) == (
                (0, num_tokens - starts[-1]) if is_rest else (seq_lens[row], query_lens[row])
            )
            assert is_rest or query_len > step.metadata.max_decode_len
    for row, _start, _stop, _slot, info, seq_len, first_token, query_len in _cuts(step.schedule):
        if info % (1 << 15) == 0:
            half, query_len = divmod(query_len, equal_cuts.HALF.value)
            of_row, rows = served[first_token : first_token + query_len].reshape(-1), decode.HALF_ROWS.value
            of_row[slice(None) if half == 0 else slice((half - 1) * rows, half * rows)] += 1
            assert (seq_len, query_len) == (seq_lens[row], query_lens[row])
            assert 0 < query_len <= step.metadata.max_decode_len
    assert (served == 1).all()


def _cuts(schedule: Any) -> list[list[int]]:
    """The work items of all programs."""
    items = schedule.work_list.work_items.tolist()
    found = [items[program] for program in range(schedule.work_list.num_programs) if items[program][0] >= 0]
    return found + [item for begin, end in schedule.work_list.more_items.tolist() for item in items[begin:end]]


@only_interpreted
def test_more_heads_than_a_gpu_works_on_at_a_time() -> None:
    """No keys are split then, so there is nothing to join."""
    case = kit()
    batches = case.mixed_batches(case.make_spec(num_qo_heads=8, num_kv_heads=8), 3)
    case.check_mixed(batches, "8 heads")


@only_interpreted
def test_a_launch_that_another_kernel_listed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where queries do not lie as the kernel for Hopper reads them: the portable one would serve all rows."""
    spec, backend = AttentionSpec(4, 2, 32), get_backend("TRITON")
    batch = random_batch(backend, spec, [40, 9], [20, 1])
    layer, held = make_layer(backend, batch), engine_tensors(2, 21, 9, batch.device)
    layer.state.hold_graph_buffers(2)
    step = layer.state.step_for(layer.builder.build(0, MixedFiller(held, 21)(batch, 2, 0)))
    monkeypatch.setattr(launch, "portable_tile", lambda *_: None)
    with pytest.raises(ValueError, match="align them, or run eager"):
        layer.forward(batch, step)


@only_interpreted
def test_a_state_of_eager_steps_serves_all_rows() -> None:
    """Metadata of a graph of mixed batches, and its view of decodes, which all its rows are."""
    case = kit()
    spec = case.make_spec()
    (batch,) = case.mixed_batches(spec, 1)
    layer = make_layer(get_backend("TRITON"), batch, num_padded_reqs=MIXED_TOKENS)
    held = engine_tensors(MIXED_ROWS, MIXED_TOKENS, batch.cache.pages, batch.device)
    metadata = layer.builder.build(0, MixedFiller(held, MIXED_TOKENS)(batch, MIXED_ROWS, 0))
    for each in (metadata, metadata.decode_metadata):
        step = layer.state.begin_forward(each)
        padding = MIXED_TOKENS - len(batch.query)
        assert_step(layer.forward(batch, step, num_padded_reqs=padding, want_lse=True), batch, "mixed rows, eager")


MIXED_ON_HOPPER = (  # keys in the cache, and query tokens
    [(300, 1), (0, 150), (40, 3), (700, 20)],
    [(90, 1), (400, 1), (3, 1), (0, 1)],
    [(130, 70), (0, 9)],
)


@pytest.mark.rest
@in_own_process
def test_on_hopper_interpreted() -> None:
    run_interpreted(__file__, "emulated")


@only_interpreted
@pytest.mark.parametrize(
    ("heads", "seen"), [((8, 2, 64), {}), ((4, 2, 128), {"window_left": 90}), ((10, 2, 64), {"sinks": True})], ids=str
)  # fmt: skip
def test_emulated_on_hopper(heads: tuple[int, ...], seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for Hopper takes what the list has, tokens behind all rows among it, or nothing. One clone's step
    serves one batch after the other."""
    from attn_backends.kernels.prefill import hopper_kernel
    from tests.helpers.gluon_emulator import Emulated
    from tests.helpers.split_prefills import splitting

    made: list[int] = []
    monkeypatch.setattr(launch, "has_hopper_kernels", lambda device: True)
    emulated = Emulated(hopper_kernel.prefill_hopper_kernel, made.append)
    monkeypatch.setattr(hopper_kernel, "prefill_hopper_kernel", emulated)
    backend, spec = get_backend("TRITON"), AttentionSpec(*heads, dtype=torch.float16, **seen)
    batches = [
        random_batch(backend, spec, [context + count for context, count in rows], [count for _, count in rows],
                     page_size=16, num_pages=96, seed=seed, poison=float("nan"))
        for seed, rows in enumerate(MIXED_ON_HOPPER)
    ]  # fmt: skip
    batches = [replace(batch, sinks=batches[0].sinks) for batch in batches]
    with splitting(7):
        layer = make_layer(backend, *batches, num_padded_reqs=10)
        rows, tokens, held = 6, 184, engine_tensors(6, 184, 60, "cpu")
        layer.state.hold_graph_buffers(rows, held)
        for batch in (*batches, batches[0]):
            step = layer.state.step_for(layer.builder.build(0, MixedFiller(held, tokens)(batch, rows, 0)))
            for want_lse in (False, True):
                result = layer.forward(batch, step, num_padded_reqs=tokens - len(batch.query), want_lse=want_lse)
                assert_step(result, batch, f"on Hopper, {[row.data.query_len for row in batch.rows]}")
    assert len(made) == 8


ROWS, TOKENS, SLOTS = 48, 1024, 72 << 10
LOADS = (  # keys in the cache, and query tokens
    [(1500, 1)] * 20 + [(0, 600), (6000, 100), (20, 3), (1000, 17)],
    [(1500 if row % 5 else 11, 1) for row in range(ROWS)],
    [(0, TOKENS)],
    [(0, 300), (0, 20), (0, 7), (0, 500)],
    [(17_000, 1)],
    [(700, 5)] * 30,
    [(8000, 200), (40, 130), (0, 1)],
)


def batches_of(spec: AttentionSpec, page_size: int) -> list[Any]:
    scales = {"k_scale": 0.5, "v_scale": 0.25} if spec.cache_dtype is FP8 else {}
    made = [
        random_batch(
            get_backend("TRITON"), spec, [context + count for context, count in rows], [count for _, count in rows],
            page_size=page_size, num_pages=SLOTS // page_size, device="cuda", seed=seed, poison=float("nan"),
            **scales,
        )
        for seed, rows in enumerate(LOADS)
    ]  # fmt: skip
    return [replace(batch, sinks=made[0].sinks) for batch in made]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "changes", "page_size"),
    [
        ((32, 8, 128), {}, 16),
        ((32, 8, 128), {}, 64),
        ((16, 2, 64), {}, 64),
        ((8, 8, 128), {"window_left": 500}, 16),
        ((64, 8, 64), {"window_left": 127, "sinks": True}, 16),
        ((16, 8, 256), {"logits_soft_cap": 30.0}, 16),
        ((16, 8, 256), {}, 32),
        ((24, 8, 112), {"chunk_size": 700}, 16),
        ((32, 8, 128), {"cache_dtype": FP8}, 16),
        ((64, 4, 128), {"cache_dtype": FP8}, 64),
        ((71, 1, 64), {}, 16),
        ((8, 2, 48), {"dtype": torch.float32, "cache_dtype": torch.float32}, 16),
    ],
    ids=str,
)  # fmt: skip
def test_replays_of_long_rows(heads: tuple[int, int, int], changes: dict[str, Any], page_size: int) -> None:
    """By the kernel for Hopper where it serves, and by the portable one. Eager steps come in between."""
    spec = AttentionSpec(*heads, **{"dtype": BF16, "cache_dtype": BF16, **changes})
    batches = batches_of(spec, page_size)
    layer = make_layer(get_backend("TRITON"), *batches, num_padded_reqs=TOKENS)
    held = engine_tensors(ROWS, TOKENS, max(batch.common().page_table.shape[1] for batch in batches), "cuda")
    layer.state.hold_graph_buffers(ROWS, held)
    clone, filler = layer.state.mixed_graph_clone(ROWS, TOKENS), MixedFiller(held, TOKENS)
    captured = CapturedStep([layer], clone, batches[:1], ROWS, 0, make_recorder("cuda"), filler, TOKENS)
    for batch in (*batches, batches[0]):
        expected = batch.expected()
        (result,) = captured.run([batch])
        assert_step(result, batch, "a mixed graph's replay", expected)
        captured.put_in([batch])
        filler(batch, ROWS, 0)
        assert layer.state.replanned_mixed(ROWS, TOKENS) is not None
        (again,) = captured.replay()
        assert_step(again, batch, "planned over an engine's tensors alone", expected)
        assert_step(layer.forward(batch, layer.begin(batch)), batch, "eager, in between", expected)

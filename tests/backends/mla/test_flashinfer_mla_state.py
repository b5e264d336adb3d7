"""FLASHINFER_MLA's plans and workspaces, and what each wrong use is told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, Limits, Unsupported, plan_groups, select_backend
from attn_backends.backends.mla.flashinfer_mla import plan as flashinfer_plan
from attn_backends.backends.mla.flashinfer_mla.metadata import FlashInferMLAMetadataBuilder
from attn_backends.backends.mla.flashinfer_mla.options import FlashInferMLAOptions
from attn_backends.backends.mla.flashinfer_mla.plan import (
    MLALibrary,
    PlannedRows,
    flat_pages,
    float_bytes,
    int_bytes,
    tokens_of_a_row,
)
from attn_backends.backends.mla.metadata import DecodeRows
from attn_backends.registry import validate_options
from attn_backends.spec import MLASpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.conformance import MLAConformance
from attn_backends.testing.graphs.harness import CapturedStep, make_recorder
from attn_backends.testing.harness import assert_matches, make_layer
from tests.emulated import flashinfer
from tests.helpers.flashinfer_mla_emulated import EmulatedFlashInferMLA, EmulatedState

HALF: dict[str, Any] = {"dtype": torch.bfloat16}
CACHE, LIMITS = KVCacheSpec(64, 16), Limits(8, 64, 512)


class Kit(MLAConformance):
    backend_name = "FLASHINFER_MLA_EMULATED"


def state(limits: Limits = LIMITS, *heads: int, **options: Any) -> EmulatedState:
    groups = plan_groups({n: MLASpec(n, **HALF) for n in heads or (16,)})
    return EmulatedState(groups, CACHE, limits, "cpu", options=FlashInferMLAOptions(**options))


def test_kernels_are_chosen_before_traffic() -> None:
    """A first plan loads or compiles kernels."""
    given = state(LIMITS, 16, 8)
    given.warm_up()
    assert [plan.is_planned for plan in given._eager.values()] == [True, True]


def batch(*seq_lens: int, query_len: int = 1, **changes: Any) -> Batch:
    shape = BatchShape(seq_lens=seq_lens, query_lens=(query_len,) * len(seq_lens))
    return Kit().make_batch(Kit().make_spec(**changes), shape, num_pages=CACHE.num_pages)


# Workspaces and plans.


@pytest.mark.parametrize("query_len", [1, 8])
@pytest.mark.parametrize("heads", [1, 16, 100, 128])
def test_no_plan_overflows(heads: int, query_len: int) -> None:
    """The emulated scheduler takes what the real one takes, and refuses when a workspace has less."""
    owner = state(LIMITS, heads)
    spec = owner.specs[0]
    assert owner.float_workspace.numel() == float_bytes(spec, 132)
    given = batch(*(64 * n for n in range(1, 9)), query_len=query_len, num_qo_heads=heads)
    plan = owner._eager[spec]
    builder = FlashInferMLAMetadataBuilder(owner.groups[0], CACHE, Limits(8, 64, 512), "cpu")
    rows = builder.build(0, given.common()).decode
    assert rows is not None
    plan(rows)
    info = plan.wrapper._plan_info
    assert info[0] == (2 if heads * query_len > 64 else 1)
    assert info[-2] + info[0] * info[1] * 2 * 64 * 4 <= owner.float_workspace.numel()
    for short in (owner.float_workspace[:-100], owner.float_workspace):
        ints = torch.empty(int_bytes(132) - (4096 if short is owner.float_workspace else 0), dtype=torch.uint8)
        plan.wrapper._float_workspace_buffer, plan.wrapper._int_workspace_buffer = short, ints
        with pytest.raises(RuntimeError, match="Buffer overflow"):
            plan(rows)


def test_limits_beyond_a_schedule_are_refused_at_start() -> None:
    many = Limits(4096, 32768, 512)
    assert state(many, 16).float_workspace.numel() > 0
    with pytest.raises(ValueError, match=r"over 128 heads takes up to 32900 tiles.*hold 16384: lower max_num_requests"):
        state(many, 16, 128)


def test_a_page_table_that_kernels_cannot_number_is_refused_at_start() -> None:
    state(Limits(4000, 4000, 1 << 20))
    with pytest.raises(ValueError, match="max_num_requests 4096 times max_model_len 1048576"):
        state(Limits(4096, 4096, 1 << 20))


def test_a_page_table_is_read_where_it_lies() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    for view, width in ((table, 10), (table[:3, :4], 10), (table[::2], 20), (table[2:, 1:3], 10)):
        pages, apart = flat_pages(view)
        assert apart == width
        assert pages.data_ptr() == view.data_ptr()
        assert [pages[i * apart : i * apart + view.shape[1]].tolist() for i in range(len(view))] == view.tolist()
    pages, apart = flat_pages(table.T)
    assert pages.view(10, apart).equal(table.T)


def test_lengths_are_planned_without_the_wrappers_public_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called once a plan: what it brings to the device is of no use."""
    calls: list[str] = []
    wrapper: Any = flashinfer.mla.BatchMLAPagedAttentionWrapper
    plan = wrapper.plan
    monkeypatch.setattr(wrapper, "plan", lambda self, *args: calls.append("plan") or plan(self, *args))
    batches = [batch(40, 17, 33), batch(5, 60), batch(64, 3, 20, 30), batch(20, 31, query_len=3)]
    layer = make_layer(EmulatedFlashInferMLA, *batches)
    for each in batches:
        assert_matches(layer.forward(each, layer.begin(each)), each)
    assert calls == ["plan"]


def test_a_pinned_buffer_is_not_rewritten_while_its_copy_may_run() -> None:
    layer = make_layer(EmulatedFlashInferMLA, batch(40, 17))
    given, waited = batch(40, 17), []

    class Event:
        def record(self) -> None: ...

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            waited.append(layer.state._ring.slot)  # type: ignore[attr-defined]

    ring = layer.state._ring  # type: ignore[attr-defined]
    ring._events = [Event() for _ in ring._events]
    buffers = []
    for _ in range(6):
        layer.begin(given)
        buffers.append(ring.hosts_cpu[ring.slot].data_ptr())
    assert len(set(buffers[:4])) == 4
    assert buffers[4:] == buffers[:2]
    assert waited == [0, 1, 2, 3, 0, 1]


def test_a_plan_is_for_one_set_of_lengths() -> None:
    """Runs read the last plan alone: a step of an earlier one is refused. Prompts without a context have no such plan,
    and graphs have one of their own."""
    given = batch(40, 17)
    prompt = Kit().make_batch(given.spec, BatchShape(seq_lens=(40, 17), query_lens=(40, 17)), num_pages=64)
    layer = make_layer(EmulatedFlashInferMLA, given, prompt)
    step, of_prompt = layer.begin(given), layer.begin(prompt)
    assert_matches(layer.forward(given, step), given)
    layer.begin(batch(10, 9))
    with pytest.raises(RuntimeError, match=r"of an earlier plan of its group \(0\), and FLASHINFER_MLA holds one"):
        layer.forward(given, step)
    assert_matches(layer.forward(prompt, of_prompt), prompt)
    with layer.state.graph_capture(2):
        common = replace(given.common(), for_graph=True)
        in_graph, eager = layer.plan(common), layer.begin(given)
        assert layer.plan(common).plan is in_graph.plan  # type: ignore[attr-defined]
        for each in (eager, in_graph):
            assert_matches(layer.forward(given, each), given)


def test_the_kit_finds_plans_that_graphs_keep() -> None:
    class Kept(EmulatedState):
        def plan_decode(self, spec: MLASpec, rows: Any, held: Any) -> Any:
            return held or super().plan_decode(spec, rows, None)

    backend = type("Stale", (EmulatedFlashInferMLA,), {"state_cls": Kept})
    kit: Any = type("Kit", (Kit,), {"backend": backend})()
    with pytest.raises(AssertionError, match="output is off"):
        kit.test_replays_equal_the_reference("plain")


# Tiles of 128 query tokens times heads, which end within a token where the heads do not divide them.

CUT_TOKENS = [(40, 8), (24, 8), (100, 2), (36, 4), (160, 3)]  # heads, tokens of a row


def rows_of_whole_blocks(heads: int, query_len: int, **changes: Any) -> Batch:
    """A row for each tile but the last whose keys in front of the token that it cuts fill blocks of 64."""
    ends = [i * 128 // heads for i in range(1, -(-query_len * heads // 128))]
    return batch(*(64 - end + query_len for end in ends), query_len=query_len, num_qo_heads=heads, **changes)


@pytest.mark.parametrize(("heads", "query_len"), CUT_TOKENS)
@pytest.mark.parametrize("in_graph", [False, True])
def test_no_token_loses_its_own_key(heads: int, query_len: int, in_graph: bool) -> None:
    given = rows_of_whole_blocks(heads, query_len)
    layer, rows = make_layer(EmulatedFlashInferMLA, given, num_padded_reqs=2 * query_len), len(given.rows) + 2
    if not in_graph:
        assert_matches(layer.forward(given, layer.begin(given), want_lse=True), given)
        return
    with layer.state.graph_capture(rows):
        clone = layer.state.graph_clone(rows, query_len)
        captured = CapturedStep([layer], clone, [given], rows, query_len, make_recorder("cpu"))
    captured.fill([given])
    assert_matches(captured.replay()[0], given)


@pytest.mark.parametrize(("heads", "query_len"), CUT_TOKENS)
def test_the_emulated_kernels_lose_it(heads: int, query_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are planned whole, as the real ones do; one key more, and they do not."""
    monkeypatch.setattr(flashinfer_plan, "tokens_of_a_row", lambda query_len, heads: query_len)
    given = rows_of_whole_blocks(heads, query_len)
    longer = batch(*(row.data.seq_len + 1 for row in given.rows[:1]), query_len=query_len, num_qo_heads=heads)
    layer = make_layer(EmulatedFlashInferMLA, given, longer)
    with pytest.raises(AssertionError, match="output is off"):
        assert_matches(layer.forward(given, layer.begin(given)), given)
    assert_matches(layer.forward(longer, layer.begin(longer)), longer)


def test_rows_are_planned_whole_where_tiles_end_with_tokens() -> None:
    whole = {(heads, n) for heads in (1, 2, 4, 8, 16, 32, 64, 128) for n in range(1, 9)}
    whole |= {(heads, 128 // heads) for heads in range(1, 129)} | {(heads, 1) for heads in range(1, 257)}
    assert all(tokens_of_a_row(n, heads) == n for heads, n in whole)
    cut = {(40, 8): 3, (24, 8): 5, (65, 2): 1, (200, 2): 1}
    assert {(heads, n): tokens_of_a_row(n, heads) for heads, n in cut} == cut


def test_parts_of_rows_have_the_keys_that_they_see() -> None:
    table = torch.zeros(3, 7, dtype=torch.int32)
    lens = torch.tensor([69, 8, 0], dtype=torch.int32)
    planned = PlannedRows.of(DecodeRows(3, 8, table, lens, lens, None), 7, 3)
    assert planned.query_starts.tolist() == [0, 3, 6, 8, 11, 14, 16, 19, 22, 24]
    assert planned.page_starts.tolist() == [0, 0, 0, 7, 7, 7, 14, 14, 14, 21]
    assert planned.kv_lens.tolist() == [64, 67, 69, 3, 6, 8, 0, 0, 0]
    assert {each.dtype for each in planned[:3]} == {torch.int32}
    assert planned.causal
    assert not PlannedRows.of(DecodeRows(3, 8, table, lens, lens, None), 7, 1).causal


# What is told.


@pytest.mark.parametrize("kernels", ["auto", "fa2", "fa3"])
def test_every_choice_of_kernels_is_right(kernels: str) -> None:
    given = batch(40, 17, 33, num_qo_heads=16)
    layer = make_layer(EmulatedFlashInferMLA, given, options=FlashInferMLAOptions(kernels=kernels))
    assert_matches(layer.forward(given, layer.begin(given), want_lse=True), given)


def test_fa3_needs_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("backend", "state"):
        monkeypatch.setattr(f"attn_backends.backends.mla.flashinfer_mla.{module}.is_hopper", lambda device: False)
    state(kernels="auto")
    with pytest.raises(ValueError, match="needs a Hopper GPU: set it to auto"):
        state(kernels="fa3")
    with pytest.raises(ValueError, match="kernels"):
        validate_options("FLASHINFER_MLA_EMULATED", {"kernels": "cutlass"})
    given, cache = MLASpec(16, dtype=torch.bfloat16), KVCacheSpec(8, 64)
    assert select_backend("FLASHINFER_MLA_EMULATED", [given], cache, "cpu", options={"kernels": "fa2"})
    with pytest.raises(Unsupported, match="kernels: got fa3 on another GPU than Hopper; supported: fa2"):
        select_backend("FLASHINFER_MLA_EMULATED", [given], cache, "cpu", options={"kernels": "fa3"})


def test_planning_during_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = state()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    owner.device = torch.device("cuda")
    with pytest.raises(RuntimeError, match="FLASHINFER_MLA plans on the host, and a CUDA graph is being captured"):
        owner.plan_decode(owner.specs[0], SimpleNamespace(idle=None), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["0.4.9", "0.7.0"])
def test_unknown_versions_are_refused(version: str) -> None:
    with pytest.raises(ImportError, match=f"{version} is installed; this backend knows 0.5.0 to below 0.7.0"):
        MLALibrary(SimpleNamespace(__version__=version))


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(self: Any, *args: Any) -> None:
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")

    monkeypatch.setattr(flashinfer.mla.BatchMLAPagedAttentionWrapper, "plan", plan)
    given = batch(40, 17)
    with pytest.raises(RuntimeError, match=r"no kernels ready for MLA of 512 \+ 64, torch.float16.*nvcc"):
        make_layer(EmulatedFlashInferMLA, given).begin(given)


REFUSED: list[tuple[AttentionSpec, str]] = [
    (AttentionSpec(16, 1, 64, **HALF), "mla: got plain attention; supported: MLA"),
    (MLASpec(16, kv_lora_rank=256, **HALF), "kv_lora_rank: got 256; supported: 512"),
    (MLASpec(16, qk_rope_head_dim=32, **HALF), "qk_rope_head_dim: got 32; supported: 64"),
    (MLASpec(16, dtype=torch.float32), "dtype: got float32; supported: bfloat16, float16"),
    (MLASpec(16, cache_dtype=torch.float8_e4m3fn, **HALF), "cache_dtype: got float8_e4m3fn"),
    (MLASpec(16, cache_dtype=torch.float16, **HALF), "cache_dtype: got float16; supported: bfloat16, as the queries"),
    (MLASpec(16, window_left=64, **HALF), "window: got window_left=64"),
    (MLASpec(16, logits_soft_cap=30.0, **HALF), "soft_cap: got logits_soft_cap=30.0"),
]


@pytest.mark.parametrize(("spec", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_it_cannot_do_is_refused_at_selection(spec: AttentionSpec, told: str) -> None:
    with pytest.raises(Unsupported) as caught:
        select_backend("FLASHINFER_MLA_EMULATED", [spec], CACHE, "cpu")
    assert told in str(caught.value)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_pages_of_any_size(page_size: int) -> None:
    shape = BatchShape(seq_lens=(40, 17, 33), query_lens=(1, 1, 1))
    Kit().check(Kit().make_spec(), [shape], page_size=page_size)


def test_a_batch_of_upper_bounds_is_refused() -> None:
    given = batch(40, 17)
    bounds = replace(given.common(), seq_lens_are_upper_bounds=True)
    with pytest.raises(ValueError, match="plans with exact lengths on the host"):
        make_layer(EmulatedFlashInferMLA, given).builder.build(0, bounds)

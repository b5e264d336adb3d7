"""The emulated FlashInfer's plans: what passes through them, what goes stale, what they need, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends.testing.graphs.host_reads import forbid_host_reads
from tests.emulated import flashinfer
from tests.emulated.flashinfer_schedule import cta_tile_q
from tests.emulated.test_flashinfer import (
    HEAD_DIM,
    PAGE_SIZE,
    VARIANTS,
    Pages,
    assert_as_reference,
    spec_of,
    starts,
    workspace,
)

MiB = 2**20
DECODE = flashinfer.BatchDecodeWithPagedKVCacheWrapper
PAGED = flashinfer.BatchPrefillWithPagedKVCacheWrapper
RAGGED = flashinfer.BatchPrefillWithRaggedKVCacheWrapper


def decode_arguments(pages: Pages, wrapper: DECODE) -> list[Any]:
    return [
        wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
        pages.indptr, len(pages.kv_lens), pages.num_qo_heads, pages.num_kv_heads, PAGE_SIZE,
        wrapper.is_cuda_graph_enabled, -1, 0.0, pages.head_dim, pages.head_dim,
        torch.empty(0, dtype=pages.dtype), torch.empty(0, dtype=pages.cache_dtype),
    ]  # fmt: skip


def prefill_arguments(pages: Pages, wrapper: Any) -> list[Any]:
    """For fa3; fa2 takes three more."""
    return [
        wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
        pages.qo_indptr, pages.indptr, torch.tensor(pages.kv_lens).int(), sum(pages.qo_lens), len(pages.kv_lens),
        pages.num_qo_heads, pages.num_kv_heads, PAGE_SIZE, wrapper.is_cuda_graph_enabled, pages.head_dim,
        pages.head_dim, True, -1,
    ]  # fmt: skip


FA2_MORE = [-1, False, 0]


def planned_decode(pages: Pages, **more: Any) -> DECODE:
    wrapper = DECODE(workspace(), use_tensor_cores=more.pop("use_tensor_cores", False))
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes(), **more)
    return wrapper


def planned_prefill(pages: Pages, backend: str = "fa2", **more: Any) -> PAGED:
    wrapper = PAGED(workspace(), backend=backend)
    wrapper.plan(pages.qo_indptr, *pages.table, *pages.sizes, causal=True, **pages.dtypes(), **more)
    return wrapper


def point_at(wrapper: Any, pages: Pages) -> None:
    wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf = pages.table
    wrapper._qo_indptr_buf = pages.qo_indptr
    wrapper._qo_indptr_last = sum(pages.qo_lens)


@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
def test_the_module_plans_another_batch_by_itself(kind: str) -> None:
    """One full plan; then the module's own, with the arguments of the real one, and the buffers by hand."""
    one, other = Pages([20, 5], [1, 1]), Pages([3, 100, 40], [1, 1, 1] if kind == "decode" else [3, 9, 1], seed=1)
    if kind == "decode":
        wrapper: Any = planned_decode(one)
        arguments = decode_arguments(other, wrapper)
    else:
        wrapper = planned_prefill(one, kind)
        arguments = prefill_arguments(other, wrapper) + (FA2_MORE if kind == "fa2" else [])
    point_at(wrapper, other)
    wrapper._plan_info = wrapper._cached_module.plan(*arguments)
    assert len(wrapper._plan_info) == {"decode": 10, "fa2": 15, "fa3": 9}[kind]
    assert_as_reference(wrapper.run(other.query, other.cache, return_lse=True), other.expected(other.spec()))


@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_module_counts_its_arguments(kind: str, difference: int) -> None:
    pages = Pages([20], [1])
    wrapper: Any = planned_decode(pages) if kind == "decode" else planned_prefill(pages, kind)
    arguments = decode_arguments(pages, wrapper) if kind == "decode" else prefill_arguments(pages, wrapper)
    arguments += FA2_MORE if kind == "fa2" else []
    assert len(arguments) == {"decode": 15, "fa2": 19, "fa3": 16}[kind]
    with pytest.raises(TypeError, match="Mismatched number of arguments"):
        wrapper._cached_module.plan(*(arguments[:-1] if difference < 0 else [*arguments, 0]))


@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
def test_an_old_plan_does_not_reach_new_keys(kind: str) -> None:
    """The buffers say 40 keys, the plan was made for 32: keys 32 to 39 are not attended."""
    before, after = Pages([32], [1]), Pages([40], [1])
    wrapper: Any = planned_decode(before) if kind == "decode" else planned_prefill(before, kind)
    point_at(wrapper, after)
    stale = wrapper.run(after.query, after.cache)
    after.keys = [(key[:32], value[:32]) for key, value in after.keys]
    torch.testing.assert_close(stale.double(), after.expected(after.spec())[0], rtol=1e-2, atol=1e-2)


def test_an_old_plan_does_not_reach_new_queries() -> None:
    """Rows of 2 tokens planned, of 3 by the buffers: the third of each keeps what stood in `out`."""
    before, after = Pages([20, 20], [2, 2]), Pages([20, 20], [3, 3])
    wrapper = planned_prefill(before)
    point_at(wrapper, after)
    out = torch.full((6, 4, HEAD_DIM), 7.0).bfloat16()
    wrapper.run(after.query, after.cache, out=out)
    assert (out == 7.0).all(-1).all(-1).tolist() == [False, False, True] * 2


def test_shorter_rows_than_planned_are_as_the_buffers_say() -> None:
    before, after = Pages([40], [1]), Pages([33], [1])
    wrapper = planned_decode(before)
    point_at(wrapper, after)
    assert_as_reference(wrapper.run(after.query, after.cache, return_lse=True), after.expected(after.spec()))


def test_wrappers_that_share_an_int_workspace_overwrite_each_other() -> None:
    one, other = Pages([40, 20], [1, 1]), Pages([5, 5], [1, 1])
    wrapper = planned_decode(one)
    right = wrapper.run(one.query, one.cache).clone()
    second = DECODE(workspace())
    second.reset_workspace_buffer(wrapper._float_workspace_buffer, wrapper._int_workspace_buffer)
    second.plan(*other.table, *other.sizes, **other.dtypes())
    assert not torch.equal(wrapper.run(one.query, one.cache), right)


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_fast_decode_plan(tensor_cores: bool, graph: bool) -> None:
    """In a graph it fills no buffer, which is the caller's to do."""
    one, other = Pages([20, 5], [1, 1]), Pages([40, 33], [1, 1], seed=1)
    buffers = [torch.zeros(3).int(), torch.zeros(40).int(), torch.zeros(2).int()] if graph else []
    wrapper = DECODE(workspace(), "NHD", graph, tensor_cores, *buffers)
    wrapper.plan(*one.table, *one.sizes, **one.dtypes(), **VARIANTS["all"])
    if graph:
        for buffer, values in zip(buffers, other.table, strict=True):
            buffer[: len(values)].copy_(values)
    more = {"global_override_indptr_cpu": other.indptr, **VARIANTS["all"]}
    flashinfer.fast_decode_plan(wrapper, *other.table, *other.sizes, **other.dtypes(), **more)
    got = wrapper.run(other.query, other.cache, return_lse=True)
    assert_as_reference(got, other.expected(spec_of(other, VARIANTS["all"], True)))


def test_fast_decode_plan_needs_a_full_one() -> None:
    pages = Pages([20], [1])
    with pytest.raises(RuntimeError, match="Error in standard plan"):
        flashinfer.fast_decode_plan(DECODE(workspace()), *pages.table, *pages.sizes, q_data_type=torch.bfloat16)


def test_tiles_of_fa2() -> None:
    """`FA2DetermineCtaTileQ`."""
    assert [cta_tile_q(n, 128) for n in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, 128]
    assert cta_tile_q(65, 256) == 64


def test_the_plan_info_of_a_graph_does_not_depend_on_lengths() -> None:
    """Two rows of 2 KV heads: 264 // 2 tiles of 16 for fa2, 16 * 132 // 2 for CUDA cores."""
    for tensor_cores, padded in ((True, 132), (False, 1056)):
        infos = []
        for kv_lens in ([1, 1], [600, 30]):
            pages = Pages(kv_lens, [1, 1], num_pages=50)
            buffers = torch.zeros(3).int(), torch.zeros(50).int(), torch.zeros(2).int()
            wrapper = DECODE(workspace(), "NHD", True, tensor_cores, *buffers)
            wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes())
            infos.append(wrapper._plan_info)
        assert infos[0] == infos[1]
        assert infos[0][0] == padded


def graph_decode(num_bytes: int, tensor_cores: bool) -> None:
    pages = Pages([20, 5], [1, 1])
    buffers = torch.zeros(3).int(), torch.zeros(9).int(), torch.zeros(2).int()
    wrapper = DECODE(workspace(num_bytes), "NHD", True, tensor_cores, *buffers)
    wrapper.plan(*pages.table, *pages.sizes, **pages.dtypes())


@pytest.mark.parametrize(
    ("tensor_cores", "values"),
    [(False, 4 * 1056 * HEAD_DIM), (True, 4 * 132 * 16 * HEAD_DIM)],
    ids=["batch_decode", "batch_prefill"],
)
def test_a_float_workspace_has_to_hold_values_and_their_sums(tensor_cores: bool, values: int) -> None:
    """heads · tiles · rows of a tile · head_dim, and one number in head_dim for the sums, float32."""
    name = "batch_prefill" if tensor_cores else "batch_decode"
    needed = 4 * (values + values // HEAD_DIM)
    graph_decode(needed, tensor_cores)
    with pytest.raises(
        RuntimeError, match=f"overflow when allocating memory for {name}_tmp_s with size .* 16, but only"
    ):
        graph_decode(needed - 1, tensor_cores)
    with pytest.raises(
        RuntimeError, match=rf"{name}_tmp_v with size {4 * values} and .* Increase the workspace buffer"
    ):
        graph_decode(4 * values - 1, tensor_cores)


@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
def test_an_int_workspace_that_is_too_small(kind: str) -> None:
    pages = Pages([20, 5], [1, 1])
    wrapper: Any = DECODE(workspace()) if kind == "decode" else PAGED(workspace(), backend=kind)
    wrapper.reset_workspace_buffer(wrapper._float_workspace_buffer, workspace(48))
    assert wrapper._pin_memory_int_workspace_buffer.shape == (48,)
    rows = () if kind == "decode" else (pages.qo_indptr,)
    with pytest.raises(RuntimeError, match="Buffer overflow when allocating memory for batch_"):
        wrapper.plan(*rows, *pages.table, *pages.sizes, **pages.dtypes())


def test_fa3_and_short_rows_need_no_float_workspace() -> None:
    pages = Pages([20, 5], [3, 1])
    for backend in ("fa2", "fa3"):
        wrapper = PAGED(workspace(0), backend=backend)
        wrapper.plan(pages.qo_indptr, *pages.table, *pages.sizes, causal=True, **pages.dtypes())
        assert_as_reference(wrapper.run(pages.query, pages.cache, return_lse=True), pages.expected(pages.spec()))


def test_splits_on_request() -> None:
    pages = Pages([600], [1], num_pages=40)
    split = {"never": {"disable_split_kv": True}, "two": {"fixed_split_size": 19}, "one": {"fixed_split_size": 38}}
    infos = {name: planned_decode(pages, use_tensor_cores=True, **more)._plan_info for name, more in split.items()}
    assert {name: (info[0], info[14]) for name, info in infos.items()} == {
        "never": (1, 0),
        "two": (2, 1),
        "one": (1, 0),
    }
    with pytest.raises(ValueError, match="only supported by tensor core decode"):
        planned_decode(pages, fixed_split_size=4)


def test_a_run_reads_nothing_on_the_host() -> None:
    pages = Pages([20, 40], [3, 9])
    wrapper = planned_prefill(pages)
    with forbid_host_reads("cpu", [wrapper, pages.query, pages.cache]):
        wrapper.run(pages.query, pages.cache, return_lse=True)


def test_host_tensors_are_copied_and_indices_are_not() -> None:
    """As on the way to a device: what the caller's arrays hold next is not what the run reads."""
    pages = Pages([20, 40], [1, 1])
    wrapper = planned_decode(pages)
    before = wrapper.run(pages.query, pages.cache).clone()
    pages.indptr.zero_()
    pages.last_page_len.zero_()
    torch.testing.assert_close(wrapper.run(pages.query, pages.cache), before, rtol=0, atol=0)
    assert wrapper._paged_kv_indices_buf is pages.indices


def test_modules_are_shared() -> None:
    pages = Pages([20], [1])
    assert planned_decode(pages)._cached_module is planned_decode(pages)._cached_module
    assert planned_prefill(pages)._cached_module is not planned_prefill(pages, window_left=3)._cached_module


def test_auto_is_fa2_for_decode_and_fa3_for_prefill() -> None:
    pages = Pages([20], [1])
    assert planned_decode(pages, use_tensor_cores=True)._backend == "fa2"
    assert planned_prefill(pages, "auto")._backend == "fa3"
    ragged = RAGGED(workspace())
    ragged.plan(starts([3]), starts([3]), 4, 2, HEAD_DIM)
    assert ragged._backend == "fa3"


def test_attributes_that_engines_use() -> None:
    pages = Pages([20, 40], [3, 9])
    wrapper = planned_prefill(pages, sm_scale=0.5, window_left=7, logits_soft_cap=2.0)
    assert (wrapper._batch_size, wrapper._qo_indptr_last, wrapper._max_q_len, wrapper._max_kv_len) == (2, 12, 9, 40)
    assert (wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap, wrapper._causal) == (0.5, 7, 2.0, True)
    assert (wrapper._max_total_num_rows, wrapper._fixed_batch_size, wrapper.is_cuda_graph_enabled) == (None, 0, False)
    assert not planned_decode(Pages([20], [1])).use_tensor_cores

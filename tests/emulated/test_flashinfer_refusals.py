"""What the emulated FlashInfer refuses: as the real one does, and what it does not emulate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulated import flashinfer
from tests.emulated.test_flashinfer import HEAD_DIM, PAGE_SIZE, Pages, starts, workspace
from tests.emulated.test_flashinfer_plans import DECODE, PAGED, RAGGED, planned_decode, planned_prefill

BUFFERS = {"indptr": 3, "indices": 9, "last_page_len": 2}


def graph_buffers(prefix: str = "paged_kv_", suffix: str = "_buffer", **lens: int) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}{suffix}": torch.zeros(n).int() for name, n in (BUFFERS | lens).items()}


@pytest.mark.parametrize("name", BUFFERS)
def test_graph_decode_without_a_buffer(name: str) -> None:
    given = graph_buffers()
    del given[f"paged_kv_{name}_buffer"]
    with pytest.raises(ValueError, match=f"paged_kv_{name}_buffer should be a torch.Tensor in cudagraph mode"):
        DECODE(workspace(), use_cuda_graph=True, **given)


def test_graph_wrappers_whose_buffers_do_not_fit() -> None:
    with pytest.raises(ValueError, match="indptr_buffer should be batch_size"):
        DECODE(workspace(), use_cuda_graph=True, **graph_buffers(indptr=4))
    rows = {"qo_indptr_buf": torch.zeros(3).int()}
    with pytest.raises(ValueError, match=r"qo_indptr_buf should be a torch\.Tensor in CUDA graph mode"):
        PAGED(workspace(), use_cuda_graph=True, **graph_buffers(suffix="_buf"))
    for name, length in (("indptr", 4), ("last_page_len", 3)):
        with pytest.raises(ValueError, match=f"paged_kv_{name}_buf should be batch_size"):
            PAGED(workspace(), use_cuda_graph=True, **rows, **graph_buffers(suffix="_buf", **{name: length}))
    with pytest.raises(ValueError, match=r"kv_indptr_buf should be a torch\.Tensor in cuda graph mode"):
        RAGGED(workspace(), use_cuda_graph=True, **rows)
    with pytest.raises(ValueError, match=r"length of kv_indptr_buf \(4\)"):
        RAGGED(workspace(), use_cuda_graph=True, **rows, kv_indptr_buf=torch.zeros(4).int())


def test_graph_decode_of_another_batch() -> None:
    wrapper = DECODE(workspace(), use_cuda_graph=True, **graph_buffers())
    three, long = Pages([3, 3, 3], [1, 1, 1]), Pages([100, 100], [1, 1])
    for plan in (DECODE.plan, flashinfer.fast_decode_plan):
        with pytest.raises(ValueError, match="batch size should be fixed in cudagraph mode"):
            plan(wrapper, *three.table, *three.sizes, q_data_type=torch.bfloat16)
        with pytest.raises(ValueError, match="size of indices should be less than or equal to the allocated buffer"):
            plan(wrapper, *long.table, *long.sizes, q_data_type=torch.bfloat16)


def test_graph_prefill_of_another_batch() -> None:
    rows = {"qo_indptr_buf": torch.zeros(3).int()}
    wrapper = PAGED(workspace(), use_cuda_graph=True, **rows, **graph_buffers(suffix="_buf"))

    def plan(pages: Pages) -> None:
        wrapper.plan(pages.qo_indptr, *pages.table, *pages.sizes, **pages.dtypes())

    plan(Pages([20, 20], [3, 4]))
    assert wrapper._max_total_num_rows == 7
    plan(Pages([20, 20], [1, 1]))
    assert wrapper._max_total_num_rows == 7
    with pytest.raises(ValueError, match=r"total number of rows in qo_indptr 8 in cuda graph mode cannot exceed .* 7"):
        plan(Pages([20, 20], [4, 4]))
    with pytest.raises(ValueError, match="batch size should be fixed"):
        plan(Pages([20], [4]))
    with pytest.raises(ValueError, match="exceeds the allocated buffer"):
        plan(Pages([100, 100], [3, 4]))


def test_graph_ragged_of_another_batch() -> None:
    buffers = {"qo_indptr_buf": torch.zeros(3).int(), "kv_indptr_buf": torch.zeros(3).int()}
    wrapper = RAGGED(workspace(), use_cuda_graph=True, **buffers)
    wrapper.plan(starts([3, 4]), starts([3, 4]), 4, 2, HEAD_DIM)
    with pytest.raises(ValueError, match="cannot exceed"):
        wrapper.plan(starts([4, 4]), starts([4, 4]), 4, 2, HEAD_DIM)
    with pytest.raises(ValueError, match="batch size should be fixed"):
        wrapper.plan(starts([4]), starts([4]), 4, 2, HEAD_DIM)
    with pytest.raises(ValueError, match="kv_indptr length"):
        wrapper.plan(starts([3, 4]), starts([4]), 4, 2, HEAD_DIM)


def test_a_run_before_the_plan() -> None:
    pages = Pages([20], [1])
    for wrapper in (DECODE(workspace()), PAGED(workspace())):
        with pytest.raises(AttributeError):
            wrapper.run(pages.query, pages.cache)
    with pytest.raises(AttributeError):
        RAGGED(workspace()).run(pages.query, *pages.keys[0])


def test_the_default_dtype_is_float16() -> None:
    """The trap: bfloat16 has to be said at plan."""
    pages = Pages([20], [1])
    wrapper = DECODE(workspace())
    wrapper.plan(*pages.table, *pages.sizes)
    with pytest.raises(ValueError, match=r"dtype of q torch\.bfloat16 does not match the q_data_type torch\.float16"):
        wrapper.run(pages.query, pages.cache)
    with pytest.raises(ValueError, match=r"dtype of k torch\.bfloat16 does not match the kv_data_type torch\.float16"):
        wrapper.run(pages.query.half(), pages.cache)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_another_window_at_run(kind: str) -> None:
    pages = Pages([20], [1])
    plan: Any = planned_decode if kind == "decode" else planned_prefill
    wrapper = plan(pages, window_left=4)
    wrapper.run(pages.query, pages.cache, window_left=4)
    with pytest.raises(AssertionError):
        wrapper.run(pages.query, pages.cache, window_left=5)


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_tensors_of_a_wrong_form(kind: str) -> None:
    pages = Pages([20, 7], [1, 1])
    if kind == "ragged":
        wrapper: Any = RAGGED(workspace())
        wrapper.plan(pages.qo_indptr, starts(pages.kv_lens), *pages.sizes[:3], **pages.dtypes())
        keys: tuple[Any, ...] = tuple(torch.cat(parts) for parts in zip(*pages.keys, strict=True))
    else:
        wrapper = planned_decode(pages) if kind == "decode" else planned_prefill(pages)
        keys = (pages.cache,)
    query = pages.query
    with pytest.raises(ValueError, match="does not match"):
        wrapper.run(query[:1], *keys)
    for out in (query.new_empty(2, 4, 32), query.new_empty(1, 4, HEAD_DIM), query.float()):
        with pytest.raises(ValueError, match="out"):
            wrapper.run(query, *keys, out=out)
    for lse in (torch.empty(2, 3), torch.empty(2, 4).double(), torch.empty(4, 2)):
        with pytest.raises(ValueError, match="of lse"):
            wrapper.run(query, *keys, lse=lse, return_lse=True)
    with pytest.raises(RuntimeError, match="contiguous"):
        wrapper.run(query, *keys, out=query.new_empty(2, HEAD_DIM, 4).transpose(1, 2))


@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 80}, "Unsupported head_dim: 80"),
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, "Unsupported data type: q torch.float32"),
        ({"dtype": torch.float16}, "Unsupported data type: kv torch.bfloat16 with q torch.float16"),
    ],
)
def test_no_kernel(kind: str, sizes: dict[str, Any], message: str) -> None:
    pages = Pages([20], [1], **sizes)
    with pytest.raises(RuntimeError, match=message):
        planned_decode(pages) if kind == "decode" else planned_prefill(pages, kind)


def test_kernels_that_some_have() -> None:
    wide = Pages([20], [1], head_dim=512)
    planned_decode(wide)
    with pytest.raises(RuntimeError, match="Unsupported head_dim: 512"):
        planned_decode(wide, use_tensor_cores=True)
    group_of_6 = Pages([20], [1], 6, 1)
    planned_decode(group_of_6, use_tensor_cores=True)
    with pytest.raises(RuntimeError, match="Unsupported group_size: 6"):
        planned_decode(group_of_6)
    fp8 = Pages([20], [1], cache_dtype=torch.float8_e4m3fn)
    planned_prefill(fp8, "fa2")
    with pytest.raises(RuntimeError, match=r"kv torch\.float8_e4m3fn with q torch\.bfloat16 in fa3"):
        planned_prefill(fp8, "fa3")
    ragged = RAGGED(workspace())
    ragged.plan(starts([3]), starts([3]), 4, 4, 192, 128)
    with pytest.raises(RuntimeError, match="Unsupported head_dim: 128 of q and k, 64 of v"):
        ragged.plan(starts([3]), starts([3]), 4, 4, 128, 64)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(RuntimeError, match="num_qo_heads 5 should be divisible by num_kv_heads 2"):
        RAGGED(workspace()).plan(starts([3]), starts([3]), 5, 2, HEAD_DIM)


def test_other_heads_or_dims_than_planned() -> None:
    pages = Pages([20], [1])
    wrapper = planned_decode(pages)
    with pytest.raises(RuntimeError, match="not those of the plan"):
        wrapper.run(pages.query[:, :2], pages.cache)
    other = Pages([20], [1], head_dim=128)
    with pytest.raises(RuntimeError, match="head dims of q, k, v"):
        wrapper.run(other.query, other.cache)


def test_numbers_that_are_not_int32() -> None:
    """The real scheduler reads 32 bits each, whatever is there."""
    pages = Pages([20], [1])
    wrapper = DECODE(workspace())
    with pytest.raises(RuntimeError, match=r"indptr should be torch\.int32, got torch\.int64"):
        wrapper.plan(pages.indptr.long(), *pages.table[1:], *pages.sizes, **pages.dtypes())
    wrapper = planned_decode(pages)
    wrapper._paged_kv_indices_buf = pages.indices.long()
    with pytest.raises(RuntimeError, match=r"paged_kv_indices should be torch\.int32"):
        wrapper.run(pages.query, pages.cache)


def test_a_page_that_is_not_in_the_pool() -> None:
    pages = Pages([20], [1])
    pages.indices[1] = 1_000_003
    with pytest.raises(IndexError):
        planned_decode(pages).run(pages.query, pages.cache)


def test_an_indptr_that_decreases() -> None:
    pages = Pages([20, 20], [2, 2])
    pages.qo_indptr[1] = 5
    for backend in ("fa2", "fa3"):
        with pytest.raises(RuntimeError, match="should be non-negative"):
            planned_prefill(pages, backend)


def test_caches_of_a_wrong_form() -> None:
    pages = Pages([20], [1])
    wrapper = planned_decode(pages)
    key, value = pages.cache
    with pytest.raises(RuntimeError, match="k/v strides differs"):
        wrapper.run(pages.query, (key, value.transpose(1, 2).contiguous().transpose(1, 2)))
    with pytest.raises(KeyError, match="Unrecognized paged_kv_cache type"):
        wrapper.run(pages.query, [key, value])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 5-D"):
        wrapper.run(pages.query, key)


def test_scales_of_queries_and_keys_are_numbers() -> None:
    pages = Pages([20], [1])
    with pytest.raises(TypeError, match="is a number"):
        planned_prefill(pages).run(pages.query, pages.cache, k_scale=torch.ones(()))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 4, 80), torch.float16, "Unsupported head_dim: 80"),
        ((2, 4, 64), torch.float32, "unsupported data type"),
        ((2, 65, 128), torch.float16, "1040 threads in a block"),
    ],
)
def test_merges_that_no_kernel_does(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    state = torch.zeros(shape, dtype=dtype), torch.zeros(shape[:2])
    with pytest.raises(RuntimeError, match=message):
        flashinfer.merge_state(*state, *state)


def test_merges_of_a_wrong_form() -> None:
    out, lse = torch.zeros(2, 4, 64).half(), torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="states must be v"):
        flashinfer.merge_state(out, lse, out[:1], lse[:1])
    with pytest.raises(RuntimeError, match="contiguous"):
        flashinfer.merge_state_in_place(out, torch.zeros(4, 2).t(), out, lse)


def test_an_lse_of_another_dtype_is_merged_into_a_copy() -> None:
    out, lse = torch.ones(2, 4, 64).half(), torch.zeros(2, 4).double()
    flashinfer.merge_state_in_place(out, lse, out * 3, lse.clone())
    assert out.unique().tolist() == [2.0]
    assert lse.count_nonzero() == 0, "as in the real package"


def test_what_is_not_emulated_is_refused() -> None:
    pages = Pages([20], [1])
    for wrapper in (DECODE, PAGED, RAGGED):
        with pytest.raises(NotImplementedError, match="'trtllm-gen'"):
            wrapper(workspace(), backend="trtllm-gen")
        with pytest.raises(NotImplementedError, match="jit_args"):
            wrapper(workspace(), jit_args=[1])
        with pytest.raises(KeyError, match="Invalid kv_layout"):
            wrapper(workspace(), "HDN")
    with pytest.raises(NotImplementedError, match="custom_mask"):
        planned_prefill(pages, custom_mask=torch.ones(20))
    with pytest.raises(NotImplementedError, match="ALIBI with a soft cap"):
        planned_decode(pages, pos_encoding_mode="ALIBI", logits_soft_cap=30.0)
    fp8 = Pages([20], [1], cache_dtype=torch.float8_e4m3fn)
    planned_prefill(fp8, pos_encoding_mode="ALIBI")  # `IsInvalid` leaves out rotations alone
    with pytest.raises(RuntimeError, match=r"Invalid configuration: ROPE_LLAMA over torch\.float8_e4m3fn in fa2"):
        planned_prefill(fp8, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(KeyError, match="pos_encoding_mode"):
        planned_decode(pages, pos_encoding_mode="ROPE_NEOX")
    with pytest.raises(NotImplementedError, match="kv_cache_sf"):
        planned_decode(pages).run(pages.query, pages.cache, kv_cache_sf=pages.cache)
    assert pages.cache[0].shape[1] == PAGE_SIZE

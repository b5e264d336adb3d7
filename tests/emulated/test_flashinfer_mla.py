"""The emulated MLA wrapper of FlashInfer: plans, graphs, and what it refuses as the real one does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.emulated import flashinfer

HEADS, PAGE_SIZE, PAGES = 4, 16, 24
LENS = torch.tensor([33, 0, 70], dtype=torch.int32)
STARTS = torch.tensor([0, 8, 8, 16], dtype=torch.int32)  # of each row's pages in `INDICES`; where they end is not read
INDICES = torch.arange(PAGES, dtype=torch.int32).flip(0)
QUERIES = torch.arange(4, dtype=torch.int32)


def made(device_tensors: bool = False, **changes: Any) -> Any:
    workspace = torch.empty(18 << 20, dtype=torch.uint8)
    buffers = {}
    if device_tensors:
        buffers = {"use_cuda_graph": True, "qo_indptr": QUERIES.clone(), "kv_indptr": STARTS.clone(),
                   "kv_indices": INDICES.clone(), "kv_len_arr": LENS.clone()}  # fmt: skip
    return flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, **buffers, **changes)


def plan(wrapper: Any, *, lens: torch.Tensor = LENS, queries: torch.Tensor = QUERIES, **changes: Any) -> None:
    given = {"num_heads": HEADS, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": PAGE_SIZE, "causal": False,
             "sm_scale": 0.05, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, **changes}  # fmt: skip
    wrapper.plan(queries, STARTS, INDICES, lens, **given)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, HEADS, 576).bfloat16(), torch.randn(PAGES, PAGE_SIZE, 576).bfloat16()


def run(wrapper: Any, **how: Any) -> Any:
    query, cache = tensors()
    return wrapper.run(query[..., :512], query[..., 512:], cache[..., :512], cache[..., 512:], **how)


def test_it_attends_to_the_keys_of_a_row_in_strided_caches() -> None:
    wrapper = made()
    plan(wrapper)
    out, lse = run(wrapper, return_lse=True)
    query, cache = (tensor.float() for tensor in tensors())
    for row, length in ((0, 33), (2, 70)):
        pages = INDICES[STARTS[row] : STARTS[row] + 8].long()
        keys = cache[pages].flatten(0, 1)[:length]
        logits = 0.05 * query[row] @ keys.T
        torch.testing.assert_close(lse[row], logits.logsumexp(-1) / math.log(2))
        torch.testing.assert_close(out[row].float(), logits.softmax(-1) @ keys[:, :512], atol=1e-2, rtol=1e-2)
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == -math.inf).all())


def test_lengths_are_those_of_the_plan() -> None:
    """What a graph's kv_len_arr and kv_indptr hold later is read by nobody: only another plan changes lengths."""
    wrapper = made(device_tensors=True)
    plan(wrapper)
    before = run(wrapper)
    for buffer in wrapper._buffers:
        buffer.fill_(1)
    assert run(wrapper).equal(before)
    plan(wrapper, lens=LENS // 2)
    assert not run(wrapper).equal(before)


def test_a_graph_has_the_size_of_a_cluster_baked_in() -> None:
    wrapper = made()
    plan(wrapper, num_heads=64)
    baked = list(wrapper._plan_info)
    plan(wrapper, num_heads=65)
    assert (baked[0], wrapper._plan_info[0]) == (1, 2)
    wrapper._plan_info = baked
    assert run(wrapper).isnan().all()


def test_a_run_needs_a_plan() -> None:
    with pytest.raises(AttributeError):
        run(made())


PLANS: list[tuple[dict[str, Any], str]] = [
    ({"head_dim_ckv": 256}, "no kernel compiles"),
    ({"q_data_type": torch.float32}, "no kernel compiles"),
    ({"kv_data_type": torch.float8_e4m3fn}, "no kernel compiles"),
    ({"lens": LENS.long()}, "kv_len should be torch.int32"),
    ({"queries": QUERIES.flip(0)}, "non-decreasing"),
    ({"queries": QUERIES[:3]}, "should have 4 numbers"),
    ({"queries": QUERIES * 8192, "num_heads": 128}, "more than the 16384"),
]


@pytest.mark.parametrize(("changes", "told"), PLANS, ids=[f"{told} {i}" for i, (_, told) in enumerate(PLANS)])
def test_what_a_plan_refuses(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        plan(made(), **changes)


def test_what_a_run_refuses() -> None:
    wrapper, (query, cache) = made(), tensors()
    plan(wrapper)
    with pytest.raises(ValueError, match="Invalid shape of out"):
        run(wrapper, out=torch.empty(2, HEADS, 512).bfloat16())
    with pytest.raises(ValueError, match="Invalid dtype of lse"):
        run(wrapper, lse=torch.empty(3, HEADS).half(), return_lse=True)
    with pytest.raises(RuntimeError, match="head dims"):
        wrapper.run(query[..., :256], query[..., 512:], cache[..., :256], cache[..., 512:])
    with pytest.raises(RuntimeError, match=r"ckv should be torch\.bfloat16"):
        wrapper.run(query[..., :512], query[..., 512:], cache[..., :512].half(), cache[..., 512:])
    with pytest.raises(RuntimeError, match="should have 4 heads"):
        wrapper.run(query[..., :512], query[:, :3, 512:], cache[..., :512], cache[..., 512:])
    with pytest.raises(NotImplementedError, match="cutlass"):
        made(backend="cutlass")

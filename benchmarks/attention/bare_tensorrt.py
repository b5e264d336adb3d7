"""The kernels of TensorRT-LLM that FlashInfer has, by hand: XQA's decode and fmha_v2's prefill.

FlashInfer compiles a module for each head dim, group, dtype and page size of XQA, and one for each dtype of fmha_v2.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from benchmarks.attention.paged_problem import Call, Problem

WORKSPACE_BYTES = 256 << 20


@lru_cache(maxsize=2)
def workspace(device: torch.device, owner: str) -> torch.Tensor:
    """[num_bytes] u8, zeros: kernels count in it, so each has its own."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def xqa_decode(problem: Problem) -> Call:
    """Over fp8, queries and weights are rounded to it."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    common, spec, room = problem.common, problem.spec, workspace(problem.device, "xqa")
    if common.max_query_len > 1:
        raise ValueError("XQA is measured with one token a row")
    lens = common.seq_lens.view(torch.uint32)
    return lambda i: xqa_batch_decode_with_kv_cache(
        problem.queries[i], tuple(problem.caches[i]), room, common.page_table, lens, common.max_seq_len, spec.scale,
        1.0, spec.window_left, problem.outputs[i],
    )  # fmt: skip


def fmha_v2_prefill(problem: Problem) -> Call:
    """Over keys and values that lie side by side in a page, which is its only way: they are copied so beforehand.

    Raises:
        ValueError: over fp8, which hangs on Hopper, as FlashInfer 0.6.12 itself warns.
    """
    from flashinfer.prefill import trtllm_fmha_v2_prefill

    common, spec, room = problem.common, problem.spec, workspace(problem.device, "fmha_v2")
    if spec.cache_dtype.itemsize == 1:
        raise ValueError("FlashInfer says that fmha_v2 over fp8 hangs on this GPU")
    starts = torch.cat([common.seq_lens.new_zeros(1), common.seq_lens.cumsum(0, dtype=torch.int32)])
    caches = [torch.stack([*cache], 1) for cache in problem.caches]
    mask = "causal" if spec.window_left < 0 else "sliding_window"
    return lambda i: trtllm_fmha_v2_prefill(
        (problem.queries[i], caches[i]), "Q_PAGED_KV_NHD", room, common.seq_lens, common.max_query_len,
        common.max_seq_len, spec.scale, 1.0, common.num_reqs, common.query_start_loc, starts, common.page_table,
        problem.outputs[i], mask_mode=mask, window_left=spec.window_left,
    )  # fmt: skip

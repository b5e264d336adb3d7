"""`vllm.vllm_flash_attn.flash_attn_interface` (0.26.0) played on a CPU: FlashAttention 2 and 3 by one function."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.emulated.flash_attn import varlen_fwd
from tests.emulated.flash_attn_blocks import blocks_of
from tests.emulated.flash_attn_checks import check, check_shape
from tests.emulated.flash_attn_interface import forward, get_scheduler_metadata as get_fa3_metadata
from tests.emulated.flash_attn_kernel import Rules

FA2_AVAILABLE = FA3_AVAILABLE = True
FA2_UNAVAILABLE_REASON = FA3_UNAVAILABLE_REASON = None
MAX_SINKS = 64
PAGE_SIZE_MULTIPLE = 16  # of FlashAttention 2; vLLM asks it of 3 as well


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> torch.Tensor:
    """As that of FlashAttention 3, without `attention_chunk`."""
    if "attention_chunk" in kwargs or len(args) > 16:
        raise TypeError("get_scheduler_metadata() got an unexpected keyword argument 'attention_chunk'")
    return get_fa3_metadata(*args, **kwargs)


def flash_attn_varlen_func(
    q: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
    k: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim], or [num_keys, num_kv_heads, head_dim]
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,  # [num_rows + 1] i32
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,  # [num_rows] i32
    q_v: None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,  # [num_rows, max_pages] i32
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    output_scale: None = None,
    fa_version: int = 2,
    s_aux: torch.Tensor | None = None,  # [num_qo_heads] bf16: sinks
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: torch.Tensor | None = None,  # [num_rows] i32
) -> Any:
    """`out` is written in place. Returns (out, lse [num_qo_heads, num_tokens]) with `return_softmax_lse`."""
    assert cu_seqlens_k is not None or seqused_k is not None, "cu_seqlens_k or seqused_k must be provided"
    assert cu_seqlens_k is None or seqused_k is None, "cu_seqlens_k and seqused_k cannot be provided at the same time"
    assert block_table is None or seqused_k is not None, "seqused_k must be provided if block_table is provided"
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    window = (-1, -1) if window_size is None else (window_size[0], window_size[1])
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    if fa_version == 2:
        if s_aux is not None:
            raise NotImplementedError("FA2 does not support s_aux")
        if num_splits > 1:
            raise NotImplementedError("FA2 does not support num_splits > 1")
        made = varlen_fwd(
            q, k, v, None, cu_seqlens_q, torch.empty_like(cu_seqlens_q) if cu_seqlens_k is None else cu_seqlens_k,
            seqused_k, None, block_table, alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p, scale, False, causal,
            *window, softcap, False, None, PAGE_SIZE_MULTIPLE,
        )  # fmt: skip
        result = (made[0] if out is None else out.copy_(made[0]), made[1])
        return result if return_softmax_lse else result[0]
    if fa_version != 3:
        raise ValueError(f"Unsupported FA version: {fa_version}")
    assert alibi_slopes is None, "Alibi is not supported in FA3"
    if s_aux is not None:
        check(q.shape[1] <= MAX_SINKS, f"We only support query heads <= {MAX_SINKS} with S aux")
        check(s_aux.dtype is torch.bfloat16, "We only support bf16 dtype for S aux.")
        check(s_aux.is_contiguous(), "s_aux must be contiguous")
        check_shape(s_aux, (q.shape[1],), "s_aux")
    if (cp_world_size, cp_rank) != (1, 0):
        raise NotImplementedError("context parallelism is not emulated")
    rules = Rules(scale, causal, window, softcap, sinks=s_aux)
    blocks = blocks_of(
        q.element_size(), q.shape[2], block_table is not None, window, causal, max_seqlen_k, cp_tot_seqused_k,
        len(cu_seqlens_q) - 1,
    )  # fmt: skip
    three = forward(
        q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, block_table,
        (q_descale, k_descale, v_descale), rules, scheduler_metadata, num_splits, blocks,
    )  # fmt: skip
    return three if return_softmax_lse else three[0]


MODULES: dict[str, Any] = {"vllm.vllm_flash_attn.flash_attn_interface": sys.modules[__name__]}

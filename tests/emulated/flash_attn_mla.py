"""FlashAttention 3 with `qv`, as vLLM and as its authors build it, played on a CPU: what FLASH_ATTN_MLA calls.

A schedule is `[1 + 4 * round_up(num_rows, 4)]` i32. Where the real one has splits, this one has the lengths of its
time: a call with a schedule that is too old attends the keys of then.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

HALF = (torch.float16, torch.bfloat16)


def check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,  # [num_rows] i32
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    page_size: int | None = None,
    causal: bool = False,
    num_splits: int = 0,
) -> torch.Tensor:
    check(qkv_dtype in HALF, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(num_heads_q % num_heads_kv == 0, "Number of heads in key/value must divide number of heads in query")
    check(cache_seqlens.shape == (batch_size,), f"cache_seqlens must have shape ({batch_size},)")
    made = cache_seqlens.new_zeros(1 + 4 * (-(-batch_size // 4) * 4))
    made[1 : 1 + batch_size] = cache_seqlens
    return made


def _paged(
    q: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
    k: torch.Tensor,  # [num_pages, page_size, 1, head_dim]
    v: torch.Tensor,  # [num_pages, page_size, 1, head_dim_vo]
    q_v: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim_vo]
    lens: torch.Tensor,  # [num_rows] i32
    table: torch.Tensor,  # [num_rows, max_pages] i32
    starts: torch.Tensor,  # [num_rows + 1] i32, of rows of one length
    scale: float,
    schedule: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, query_len, page_size = len(lens), len(q) // len(lens), k.shape[1]
    check(q.dtype in HALF and q.dtype == k.dtype == v.dtype == q_v.dtype, "query, key and value must have one dtype")
    check(q.shape[-1] <= 64, "q_v is only supported for head_size <= 64")
    check(v.shape[-1] >= 256, "q_v is only supported for hdim_v >= 256.")
    check(page_size in (1, 2, 4, 8, 16, 32), "not emulated: pages of whole blocks")
    check(starts.shape == (num_rows + 1,) and table.shape[0] == num_rows, "cu_seqlens_q and block_table are of a batch")
    known = lens if schedule is None else torch.minimum(lens, schedule[1 : 1 + num_rows])
    positions = torch.arange(table.shape[1] * page_size, device=q.device)
    is_key = positions < known[:, None]  # [num_rows, slots]
    slots = table.long()[:, positions // page_size] * page_size + positions % page_size
    slots = slots.where(is_key, 0)
    key, value = (cache.flatten(0, 1)[slots, 0].float().where(is_key[..., None], 0) for cache in (k, v))
    query, query_v = (part.view(num_rows, query_len * q.shape[1], -1).float() for part in (q, q_v))
    logits = (query @ key.mT + query_v @ value.mT) * scale  # [num_rows, query_len * num_qo_heads, slots]
    last_seen = lens[:, None] - query_len + torch.arange(query_len, device=q.device)
    seen = is_key[:, None] & (positions <= last_seen.repeat_interleave(q.shape[1], 1)[..., None])
    return _softmax(logits, seen, value, (len(q), q.shape[1]))


def _ragged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, key_starts: torch.Tensor, scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Equal heads; [num_tokens, num_heads, dim] each."""
    check(128 < q.shape[-1] <= 192 and 96 < v.shape[-1] <= 128, "not emulated: other pairs of head dims")
    check(all(tensor.stride(-1) == 1 for tensor in (q, k, v)), "Input tensor must have contiguous last dimension")
    rows, key_rows = (torch.searchsorted(cu[1:].long(), torch.arange(len(of), device=q.device), right=True)
                      for cu, of in ((starts, q), (key_starts, k)))  # fmt: skip
    at, key_at = (torch.arange(len(of), device=q.device) - cu.long()[row]
                  for cu, of, row in ((starts, q, rows), (key_starts, k, key_rows)))  # fmt: skip
    behind = (key_starts.diff() - starts.diff())[rows]
    seen = rows[:, None] == key_rows
    if causal:
        seen = seen & (key_at <= (at + behind)[:, None])
    logits = (q.float().transpose(0, 1) @ k.float().permute(1, 2, 0)) * scale  # [num_heads, num_tokens, num_keys]
    out, lse = _softmax(logits, seen, v.float().transpose(0, 1), (q.shape[1], len(q)))
    return out.transpose(0, 1), lse.t()


def _softmax(
    logits: torch.Tensor, seen: torch.Tensor, value: torch.Tensor, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [*shape, head_dim_vo] and natural LSEs [*shape], zeros and minus infinity where nothing is seen."""
    logits = logits.masked_fill(~seen, -math.inf)
    lse = logits.logsumexp(-1, keepdim=True)
    weights = (logits - lse.masked_fill(lse == -math.inf, 0)).exp()
    return (weights @ value).view(*shape, -1), lse.view(shape)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
) -> Any:
    """vLLM's. `out` is written in place; (out, lse [num_qo_heads, num_tokens]) with `return_softmax_lse`."""
    check(fa_version == 3 and softmax_scale is not None, "not emulated: FlashAttention 2, or a scale of its own")
    assert softmax_scale is not None
    if q_v is None:
        assert cu_seqlens_k is not None, "cu_seqlens_k or seqused_k must be provided"
        made, lse = _ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    else:
        assert seqused_k is not None, "seqused_k must be provided if block_table is provided"
        assert block_table is not None
        made, lse = _paged(q, k, v, q_v, seqused_k, block_table, cu_seqlens_q, softmax_scale, scheduler_metadata)
    out = made.to(q.dtype) if out is None else out.copy_(made)
    return (out, lse.t().contiguous()) if return_softmax_lse else out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qv: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = False,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """The authors'. It allocates what it returns."""
    made, lse = _paged(q, k_cache, v_cache, qv, cache_seqlens, page_table, cu_seqlens_q, softmax_scale,
                       scheduler_metadata)  # fmt: skip
    out = made.to(q.dtype)
    return (out, lse.t().contiguous(), None, None) if return_softmax_lse else out


def authors_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Theirs over ragged keys; (out, lse) with `return_attn_probs`."""
    made, lse = _ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    return (made.to(q.dtype), lse.t().contiguous()) if return_attn_probs else made.to(q.dtype)


AUTHORS = SimpleNamespace(
    flash_attn_varlen_func=authors_varlen_func,
    flash_attn_with_kvcache=flash_attn_with_kvcache,
    get_scheduler_metadata=get_scheduler_metadata,
)

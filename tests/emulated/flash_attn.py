"""FlashAttention 2 (`flash_attn` 2.8.3) played on a CPU: its paged functions, and the extension below them.

    from tests.emulated import flash_attn
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, …, return_softmax_lse=True)

`MODULES` are the modules that it stands for. Rows without keys get zeros and an LSE of plus infinity.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from tests.emulated.flash_attn_checks import (
    HALF,
    check,
    check_inputs,
    check_ints,
    check_out,
    check_page_table,
    check_shape,
    check_slopes,
)
from tests.emulated.flash_attn_kernel import Rules, attend, own_keys, paged_keys

__version__ = "2.8.3"
DEVICES = frozenset({"cpu", "cuda"})
PAGE_SIZE_MULTIPLE = 256


def fwd_kvcache(
    q: torch.Tensor,  # [num_rows, query_len, num_qo_heads, head_dim]
    kcache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    vcache: torch.Tensor,
    k: None,
    v: None,
    seqlens_k: torch.Tensor,  # [num_rows] i32
    rotary_cos: None,
    rotary_sin: None,
    cache_batch_idx: None,
    leftpad_k: None,
    block_table: torch.Tensor,  # [num_rows, max_pages] i32
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The extension's function for rows of one length over pages. `out` is written in place: at one query token a row,
    grouped heads and neither window nor ALiBi it is [num_rows, group_size, num_kv_heads, head_dim].

    Returns:
        out [num_rows, query_len, num_qo_heads, head_dim], lse [num_rows, num_qo_heads, query_len] f32.
    """
    _not_emulated(k=k, v=v, rotary_cos=rotary_cos, cache_batch_idx=cache_batch_idx, leftpad_k=leftpad_k)
    check_inputs(q, kcache, vcache, HALF)
    num_rows, query_len, num_heads, dim = q.shape
    group = num_heads // kcache.shape[2]
    check(kcache.shape[1] % PAGE_SIZE_MULTIPLE == 0, "Paged KV cache block size must be divisible by 256")
    check_page_table(block_table, num_rows)
    check_ints(seqlens_k, num_rows, "seqlens_k")
    check_slopes(alibi_slopes, num_heads)
    check(num_splits <= 128, "num_splits > 128 not supported")
    if query_len == 1 and alibi_slopes is None:
        is_causal = False
    left, right = window_size_left, 0 if is_causal else window_size_right
    swapped = query_len == 1 and group > 1 and left < 0 and right < 0 and alibi_slopes is None
    capacity = block_table.shape[1] * kcache.shape[1]
    window = tuple(-1 if size >= capacity else size for size in (left, right))
    written = torch.empty_like(q) if out is None else out
    if out is not None:
        check_out(out, (num_rows, group, kcache.shape[2], dim) if swapped else tuple(q.shape), q.dtype)
    rules = Rules(softmax_scale, False, (window[0], window[1]), softcap, alibi_slopes, empty_lse=math.inf)
    starts = torch.arange(num_rows + 1, device=q.device) * query_len
    made, lse, _ = attend(q.flatten(0, 1), starts, paged_keys(kcache, vcache, block_table, seqlens_k), rules)
    made = made.view(q.shape)
    if out is not None and swapped:
        made = made.view(num_rows, kcache.shape[2], group, dim).transpose(1, 2)
    written.copy_(made)
    if out is not None and swapped:
        written = written.transpose(1, 2).reshape(q.shape)
    return written, lse.view(num_rows, query_len, num_heads).transpose(1, 2).contiguous()


def varlen_fwd(
    q: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
    k: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim], or [num_keys, num_kv_heads, head_dim]
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,  # [num_rows + 1] i32
    cu_seqlens_k: torch.Tensor,  # [num_rows + 1] i32; not read where seqused_k is given
    seqused_k: torch.Tensor | None,  # [num_rows] i32
    leftpad_k: None,
    block_table: torch.Tensor | None,  # [num_rows, max_pages] i32
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: None,
    page_size_multiple: int = PAGE_SIZE_MULTIPLE,
) -> list[torch.Tensor]:
    """The extension's function for rows of any lengths.

    Returns:
        out [num_tokens, num_qo_heads, head_dim], lse [num_qo_heads, num_tokens] f32. Over pages a row without keys
        has its LSE written where those of other rows are, and beyond them, whatever lies there: both are NaN here then.
    """
    _not_emulated(leftpad_k=leftpad_k, p_dropout=p_dropout or None, return_softmax=return_softmax or None)
    check_inputs(q, k, v, HALF)
    num_rows, num_heads = len(cu_seqlens_q) - 1, q.shape[1]
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_ints(starts, num_rows + 1, name)
    check_slopes(alibi_slopes, num_heads)
    if max_seqlen_q == 1 and alibi_slopes is None:
        is_causal = False
    left, right = window_size_left, 0 if is_causal else window_size_right
    window = tuple(-1 if size >= max_seqlen_k else size for size in (left, right))
    if out is not None:
        check_out(out, tuple(q.shape), q.dtype)
    if block_table is not None:
        multiple = page_size_multiple
        check(k.dim() == 4, "k must have shape (num_blocks, page_block_size, num_heads_k, head_size)")
        check(k.shape[1] % multiple == 0, f"Paged KV cache block size must be divisible by {multiple}")
        check_page_table(block_table, num_rows)
        lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1] if seqused_k is None else seqused_k
        check_ints(lens, num_rows, "seqused_k")
        keys = paged_keys(k, v, block_table, lens)
        is_within = (lens > 0).all()
    else:
        check_shape(v, tuple(k.shape), "v")
        keys = own_keys(k, v, cu_seqlens_k)
        is_within = torch.ones((), dtype=torch.bool, device=q.device)
    rules = Rules(softmax_scale, False, (window[0], window[1]), softcap, alibi_slopes, empty_lse=math.inf)
    made, lse, _ = attend(q, cu_seqlens_q, keys, rules)
    made, lse = (torch.where(is_within, each, math.nan) for each in (made, lse))
    # Kernels go over tiles of the longest row that they were told of: tokens beyond it are not written.
    starts = cu_seqlens_q.long()
    index = torch.arange(len(q), device=q.device)
    row = torch.searchsorted(starts[1:], index, right=True).clamp(max=num_rows - 1)
    covered = index - starts[row] < -(-max_seqlen_q // 64) * 64
    target = torch.empty_like(q) if out is None else out
    swapped = max_seqlen_q == 1 and num_heads > k.shape[-2] and window == (-1, -1) and alibi_slopes is None
    if out is not None and swapped:
        target = torch.empty_like(q)  # a copy in another order of heads: the one given stays as it was
    target.copy_(torch.where(covered[:, None, None], made.to(q.dtype), target))
    return [target, lse.t().contiguous(), q.new_empty(0), q.new_empty(0)]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """The package's function; allocates what it returns, (out, lse, None) with `return_attn_probs`."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse, *_ = varlen_fwd(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, None, None, block_table, alibi_slopes, max_seqlen_q, max_seqlen_k,
        dropout_p, scale, False, causal, *window_size, softcap, False, None,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """The package's function, over pages; allocates what it returns, (out, lse) with `return_softmax_lse`."""
    if cache_seqlens is None or block_table is None:
        raise NotImplementedError("a cache without pages or lengths is not emulated")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    made = fwd_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes, None, scale, causal, *window_size, softcap, rotary_interleaved, num_splits,
    )  # fmt: skip
    return made if return_softmax_lse else made[0]


def _not_emulated(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not emulated")


MODULES: dict[str, Any] = dict.fromkeys(("flash_attn", "flash_attn_2_cuda"), sys.modules[__name__])

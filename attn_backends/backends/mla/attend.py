"""Attention with its LSE in plain torch: what runs where a backend has no kernel of its own, and no plan has one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attn_backends.machine import is_hip


def attend(
    query: torch.Tensor,  # [B, H, num_queries, head_dim]
    key: torch.Tensor,  # [B, H, num_keys, head_dim]
    value: torch.Tensor,  # [B, H, num_keys, head_dim_vo]
    scale: float,
    *,
    is_causal: bool = False,  # over as many keys as queries
    bias: torch.Tensor | None = None,  # [B, H | 1, num_queries | 1, num_keys] of the query's dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [B, H, num_queries, head_dim_vo], and the LSE [B, H, num_queries] in float32 or wider, natural log.

    The kernels are those under `scaled_dot_product_attention`, which keeps the LSE to itself.
    """
    if is_causal and scale <= 0:  # fused kernels hide keys before they scale: -inf would become +inf, or NaN
        query, scale = (-query, -scale) if scale else (torch.zeros_like(query), 1.0)
    if query.device.type == "cpu":
        widest = max(key.shape[-1], value.shape[-1])  # this kernel has one head_dim; zeros change nothing
        wide = [t if t.shape[-1] == widest else F.pad(t, (0, widest - t.shape[-1])) for t in (query, key, value)]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *wide, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return out[..., : value.shape[-1]], lse
    if query.is_cuda and not is_hip() and bias is None and query.dtype is not torch.float64:
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *map(in_whole_words, (query, key, value)), None, True, 0.0, is_causal, scale=scale
        )
        return out[..., : value.shape[-1]], lse[..., : query.shape[2]]  # it is as long as whole tiles
    return _attend_by_hand(query, key, value, scale, is_causal, bias)


def in_whole_words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels read it, 16 bytes at a time: a copy padded with zeros where it does not lie so yet."""
    word = 16 // tensor.itemsize
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    if any(step % word for step in steps):
        return F.pad(tensor, (0, -tensor.shape[-1] % word)).contiguous()
    return tensor


def _attend_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    is_causal: bool,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    work = torch.promote_types(query.dtype, torch.float32)
    logits = torch.matmul(query.to(work), key.to(work).mT) * scale  # [B, H, num_queries, num_keys]
    if bias is not None:
        logits = logits + bias
    if is_causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    lse = logits.logsumexp(-1)
    return torch.matmul((logits - lse[..., None]).exp(), value.to(work)).to(query.dtype), lse

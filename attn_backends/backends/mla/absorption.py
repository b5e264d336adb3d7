"""The two products around a layer's decode, head by head: W_UK is absorbed by queries, and W_UV projects what they
attended up to values. By launches of ours where few queries would make a library's take longer to begin than to end.

Where decode's kernels are ours too, each of these starts before the one in front of it has ended. Others' may not: a
kernel that starts early without waiting for what is in front, or ends before that has, leaves what comes next without
it. With FlashMLA's between them layers came out wrong.
"""

from __future__ import annotations

import torch

from attn_backends.machine import HAS_TRITON
from attn_backends.spec import MLASpec

# Pairs of token and head up to which a launch of ours takes less time than torch's, as measured on an H200 with 16 and
# 128 heads of DeepSeek's dims.
_MOST_ABSORBED, _MOST_PROJECTED = 256 * 128, 64 * 128


def suits_kernels(spec: MLASpec, kv_b_proj: torch.Tensor, device: torch.device) -> bool:
    """Whether the launches of ours serve a layer on a device."""
    if not HAS_TRITON:
        return False
    from attn_backends.backends.mla.absorption_triton import are_served

    return are_served(spec, kv_b_proj, device)


def absorb(
    query: torch.Tensor, w_uk: torch.Tensor, absorbed: torch.Tensor, *, by_kernel: bool, starts_early: bool
) -> None:  # fmt: skip
    """Multiply the first part of queries by W_UK, and copy what is behind it.

    Args:
        query: [num_tokens, num_qo_heads, qk_nope_head_dim + qk_rope_head_dim].
        w_uk: [num_qo_heads, qk_nope_head_dim, kv_lora_rank].
        absorbed: [num_tokens, num_qo_heads, kv_lora_rank + qk_rope_head_dim], contiguous, written in place.
        by_kernel: `suits_kernels` says that launches of ours serve.
        starts_early: so does decode, and waits in all of its programs.
    """
    (num_tokens, num_heads, _), (nope, rank) = query.shape, w_uk.shape[1:]
    if by_kernel and num_tokens * num_heads <= _MOST_ABSORBED:
        from attn_backends.backends.mla.absorption_triton import launch_absorb

        launch_absorb(query, w_uk, absorbed, starts_early)
        return
    torch.bmm(query[..., :nope].transpose(0, 1), w_uk, out=absorbed[..., :rank].transpose(0, 1))
    absorbed[..., rank:] = query[..., nope:]


def up_project(
    attended: torch.Tensor, w_uv: torch.Tensor, output: torch.Tensor, *, by_kernel: bool, starts_early: bool
) -> None:  # fmt: skip
    """Multiply weighted latent rows by W_UV.

    Args:
        attended: [num_tokens, num_qo_heads, kv_lora_rank], contiguous.
        w_uv: [num_qo_heads, kv_lora_rank, head_dim_vo]; columns lie together.
        output: [num_tokens, num_qo_heads, head_dim_vo], written in place.
        by_kernel, starts_early: as for `absorb`.
    """
    num_tokens, num_heads, _ = attended.shape
    if by_kernel and num_tokens * num_heads <= _MOST_PROJECTED:
        from attn_backends.backends.mla.absorption_triton import launch_up_project

        launch_up_project(attended, w_uv, output, starts_early)
        return
    torch.bmm(attended.transpose(0, 1), w_uv, out=output.transpose(0, 1))

"""Joining attention over two sets of keys, where each output weighs exp(its LSE); and sinks, behind a kernel."""

from __future__ import annotations

import torch

from attn_backends.machine import HAS_TRITON


def merge(output: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Join attention over two disjoint sets of keys, in place: in one launch on a GPU.

    Of a token that saw no key in one set (an LSE of -inf) only the other's output counts, of one that saw none at all
    zeros: what stands in `more` there may be anything.

    Args:
        output, more: [num_tokens, num_qo_heads, dim], the last dimension contiguous; dtypes may differ.
        lse, more_lse: [num_tokens, num_qo_heads], natural log, float32 or wider.
    """
    if output.is_cuda and lse.dtype is torch.float32 and HAS_TRITON:
        from attn_backends.kernels.merge_state_triton import merge as merge_in_one_launch

        merge_in_one_launch(output, lse, more, more_lse)
    else:
        merge_in_torch(output, lse, more, more_lse)


def merge_in_torch(output: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """`merge`, anywhere, by torch's own operations."""
    both = torch.logaddexp(lse, more_lse)
    own, others = ((part - both).exp().masked_fill(part == -torch.inf, 0.0)[..., None] for part in (lse, more_lse))
    joined = torch.where(own > 0, output * own, 0.0) + torch.where(others > 0, more * others, 0.0)
    output.copy_(joined)
    lse.copy_(both)


def add_sinks(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, *, scale: float = 1.0, want_lse: bool = True
) -> None:
    """Let sinks join a softmax that was taken without them, in place. A sink takes its share and gives nothing.

    The factor of the outputs has the LSE's dtype, float32 or wider, so that outputs are rounded once. The LSE of a
    token that saw no key stays -inf.

    Args:
        output: [..., num_qo_heads, dim].
        lse: [..., num_qo_heads], natural log, without the sinks; with them afterwards if `want_lse`.
        sinks: [num_qo_heads].
        scale: what outputs are multiplied by besides.
    """
    sinks = sinks.to(lse.dtype)
    output.mul_((torch.sigmoid(lse - sinks) * scale)[..., None])
    if want_lse:
        lse.copy_(torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks)))

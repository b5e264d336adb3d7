"""`attn_backends.kernels.merge_state` in one launch on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn_backends.kernels.launch import start_kernel

_BLOCK_M = 16  # pairs of token and head of a program


# How LSEs lie follows from the number of tokens, for libraries that have them head by head.
_NOT_CONSTANT = ["num_rows", "lse_token", "lse_head", "more_lse_token", "more_lse_head"]


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_NOT_CONSTANT, do_not_specialize_on_alignment=["lse", "more_lse"]
)
def merge_kernel(  # type: ignore[no-untyped-def]
    output,  # [num_tokens, HEADS, DIM], changed in place
    lse,  # [num_tokens, HEADS] f32, natural log, changed in place
    more,  # [num_tokens, HEADS, DIM]
    more_lse,  # [num_tokens, HEADS] f32
    num_rows,  # num_tokens * HEADS
    out_token,  # elements from token to token, as all strides
    out_head,
    lse_token,
    lse_head,
    more_token,
    more_head,
    more_lse_token,
    more_lse_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # DIM, padded
    BLOCK_M: tl.constexpr,  # pairs of token and head of a program
):
    """One program merges BLOCK_M pairs of token and head."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < num_rows
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    at_lse = lse + token * lse_token + head * lse_head
    own = tl.load(at_lse, mask=there, other=float("-inf"))
    other = tl.load(more_lse + token * more_lse_token + head * more_lse_head, mask=there, other=float("-inf"))
    m_max = tl.maximum(own, other)
    m_safe = tl.where(m_max == float("-inf"), 0.0, m_max)  # of a token that saw nothing
    own_weight, other_weight = tl.exp(own - m_safe), tl.exp(other - m_safe)
    l_sum = own_weight + other_weight
    share = 1.0 / tl.where(l_sum > 0, l_sum, 1.0)
    dims = tl.arange(0, BLOCK_DIM)
    live = there[:, None] & (dims < DIM)[None]
    to = output + (token * out_token + head * out_head)[:, None] + dims[None]
    of = more + (token * more_token + head * more_head)[:, None] + dims[None]
    # Not loaded where it weighs nothing: it may be NaN there.
    first = tl.load(to, mask=live & (own_weight > 0)[:, None], other=0.0).to(tl.float32)
    second = tl.load(of, mask=live & (other_weight > 0)[:, None], other=0.0).to(tl.float32)
    joined = first * (own_weight * share)[:, None] + second * (other_weight * share)[:, None]
    tl.debug_barrier()  # every warp loads all LSEs: none writes over them before all have
    tl.store(to, joined.to(output.dtype.element_ty), mask=live)
    tl.store(at_lse, tl.where(l_sum > 0, m_safe + tl.log(l_sum), float("-inf")), mask=there)


def merge(output: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    num_tokens, num_heads, dim = output.shape
    grid = (-(-num_tokens * num_heads // _BLOCK_M),)
    start_kernel(
        merge_kernel, grid,
        output, lse, more, more_lse, num_tokens * num_heads, *output.stride()[:2], *lse.stride(), *more.stride()[:2],
        *more_lse.stride(), num_heads, dim, triton.next_power_of_2(dim), _BLOCK_M,
    )  # fmt: skip

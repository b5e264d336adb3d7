"""`attn_backends.backends.mla.absorption` by kernels of ours: for few tokens, whose weights take the time.

Where decode's kernels do so too, both start early and let the next kernel start. A library's products do neither, and
what is copied behind absorbed queries would be a launch of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attn_backends.kernels.examples import empty
from attn_backends.kernels.launch import launch, supports_pdl
from attn_backends.kernels.operators import operator
from attn_backends.kernels.pdl import grid_wait_and_launch_dependents
from attn_backends.kernels.tiles import padded
from attn_backends.spec import MLASpec

_LEAST_BLOCK = 16  # that a product takes
# Blocks at most, and warps, as measured on an H200 with 16 and 128 heads of DeepSeek's dims: tokens; rows and columns
# of W_UK; columns and rows of W_UV as the model has it.
_TOKENS = 64
_NOPE, _ABSORBED, _ABSORB_WARPS = 128, 128, 8
_RANK, _VALUES, _PROJECT_WARPS = 128, 64, 4


class AbsorbTensors(NamedTuple):
    query: torch.Tensor
    weight: torch.Tensor
    absorbed: torch.Tensor


class ProjectTensors(NamedTuple):
    attended: torch.Tensor
    weight: torch.Tensor
    output: torch.Tensor


class Tokens(NamedTuple):
    num_tokens: int


class ProductStrides(NamedTuple):
    token: int  # of the model's tensor
    head: int
    weight_head: int
    weight_row: int


class AbsorbConstants(NamedTuple):
    NOPE: int
    ROPE: int
    RANK: int
    BLOCK_T: int
    BLOCK_NOPE: int
    BLOCK_RANK: int
    USE_PDL: bool


class ProjectConstants(NamedTuple):
    RANK: int
    BLOCK_T: int
    BLOCK_RANK: int
    BLOCK_V: int
    USE_PDL: bool


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def absorb_kernel(  # type: ignore[no-untyped-def]
    query,  # [num_tokens, heads, NOPE + ROPE]
    weight,  # [heads, NOPE, RANK], W_UK
    absorbed,  # [num_tokens, heads, RANK + ROPE], contiguous
    num_tokens,
    query_token,  # elements from token to token, as all strides
    query_head,
    weight_head,
    weight_row,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tokens of a program
    BLOCK_NOPE: tl.constexpr,  # rows of the weight that are multiplied at a time
    BLOCK_RANK: tl.constexpr,  # columns of a program
    USE_PDL: tl.constexpr,  # this kernel starts early, and lets the next one, see `kernels.pdl.Pdl`
):
    """One program absorbs some columns of a head's weight, for BLOCK_T tokens. Weights are asked for before the kernel
    in front has ended: no kernel of a step writes them."""
    head = tl.program_id(1)
    nope = tl.arange(0, BLOCK_NOPE)
    column = tl.program_id(0) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    weight_at = weight + head * weight_head + nope[:, None] * weight_row + column[None]
    w_uk = ()
    for part in tl.static_range(NOPE // BLOCK_NOPE):
        w_uk = w_uk + (tl.load(weight_at + part * BLOCK_NOPE * weight_row),)  # type: ignore[assignment]  # noqa: RUF005
    if USE_PDL:
        grid_wait_and_launch_dependents()
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = (token < num_tokens)[:, None]
    query_at = query + token.to(tl.int64)[:, None] * query_token + head * query_head
    to = absorbed + (token.to(tl.int64) * tl.num_programs(1) + head)[:, None] * (RANK + ROPE)
    acc = tl.zeros([BLOCK_T, BLOCK_RANK], tl.float32)
    for part in tl.static_range(NOPE // BLOCK_NOPE):
        q_nope = tl.load(query_at + part * BLOCK_NOPE + nope[None], mask=live, other=0.0)
        acc = tl.dot(q_nope, w_uk[part], acc)
    if tl.program_id(0) == 0:
        rope = tl.arange(0, ROPE)[None]
        tl.store(to + RANK + rope, tl.load(query_at + NOPE + rope, mask=live, other=0.0), mask=live)
    tl.store(to + column[None], acc.to(absorbed.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def up_project_kernel(  # type: ignore[no-untyped-def]
    attended,  # [num_tokens, heads, RANK], contiguous
    weight,  # [heads, values, RANK], W_UV as the model has it
    output,  # [num_tokens, heads, values]
    num_tokens,
    output_token,  # elements from token to token, as all strides
    output_head,
    weight_head,
    weight_row,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tokens of a program
    BLOCK_RANK: tl.constexpr,  # columns of the weight that are multiplied at a time
    BLOCK_V: tl.constexpr,  # rows of the weight of a program
    USE_PDL: tl.constexpr,  # as in `absorb_kernel`
):
    """One program gives some values of a head, for BLOCK_T tokens."""
    head = tl.program_id(1)
    rank = tl.arange(0, BLOCK_RANK)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    weight_at = weight + head * weight_head + value[:, None] * weight_row + rank[None]
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = (token < num_tokens)[:, None]
    attended_at = attended + (token.to(tl.int64) * tl.num_programs(1) + head)[:, None] * RANK + rank[None]
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    if USE_PDL:
        grid_wait_and_launch_dependents()
    for first in tl.range(0, RANK, BLOCK_RANK, num_stages=3):
        latent = tl.load(attended_at + first, mask=live, other=0.0)
        acc = tl.dot(latent, tl.load(weight_at + first).T, acc)
    to = output + token.to(tl.int64)[:, None] * output_token + head * output_head + value[None]
    tl.store(to, acc.to(output.dtype.element_ty), mask=live)


def are_served(spec: MLASpec, kv_b_proj: torch.Tensor, device: torch.device) -> bool:
    """Whether the kernels serve a layer on a device: 16 bits, dims that whole blocks divide, and a GPU where they were
    measured to take less time, which lets kernels start early."""
    dims = spec.qk_nope_head_dim, spec.kv_lora_rank, spec.head_dim_vo
    return (
        supports_pdl(device)
        and spec.dtype in (torch.float16, torch.bfloat16)
        and all(dim % _LEAST_BLOCK == 0 for dim in dims)
        and spec.qk_rope_head_dim == padded(spec.qk_rope_head_dim)
        and kv_b_proj.stride(-1) == 1
    )


@operator(("absorbed",))
def launch_absorb(query: torch.Tensor, w_uk: torch.Tensor, absorbed: torch.Tensor, starts_early: bool) -> None:
    """`absorption.absorb` in one launch."""
    (num_tokens, num_heads, width), (nope, rank) = query.shape, w_uk.shape[1:]
    constants = AbsorbConstants(
        NOPE=nope, ROPE=width - nope, RANK=rank, BLOCK_T=_block_tokens(num_tokens), BLOCK_NOPE=_block(nope, _NOPE),
        BLOCK_RANK=_block(rank, _ABSORBED), USE_PDL=starts_early and supports_pdl(query.device),
    )  # fmt: skip
    grid = rank // constants.BLOCK_RANK, num_heads, -(-num_tokens // constants.BLOCK_T)
    strides = ProductStrides._make((*query.stride()[:2], *w_uk.stride()[:2]))
    launch(absorb_kernel, grid, AbsorbTensors(query, w_uk, absorbed), Tokens(num_tokens), (strides, constants),
           _ABSORB_WARPS, use_pdl=constants.USE_PDL)  # fmt: skip


@operator(("output",))
def launch_up_project(attended: torch.Tensor, w_uv: torch.Tensor, output: torch.Tensor, starts_early: bool) -> None:
    """`absorption.up_project` in one launch."""
    (num_tokens, num_heads, rank), values = attended.shape, w_uv.shape[2]
    constants = ProjectConstants(
        RANK=rank, BLOCK_T=_block_tokens(num_tokens), BLOCK_RANK=_block(rank, _RANK),
        BLOCK_V=_block(values, _VALUES), USE_PDL=starts_early and supports_pdl(attended.device),
    )  # fmt: skip
    grid = values // constants.BLOCK_V, num_heads, -(-num_tokens // constants.BLOCK_T)
    strides = ProductStrides._make((*output.stride()[:2], w_uv.stride(0), w_uv.stride(2)))
    launch(up_project_kernel, grid, ProjectTensors(attended, w_uv, output), Tokens(num_tokens), (strides, constants),
           _PROJECT_WARPS, use_pdl=constants.USE_PDL)  # fmt: skip


def _block_tokens(num_tokens: int) -> int:
    return min(_TOKENS, padded(num_tokens))


def _block(dim: int, most: int) -> int:
    """The largest power of two that divides a dim, but no more than `most`, which is one."""
    return min(dim & -dim, most)


def list_products(spec: MLASpec, most_tokens: int, device: torch.device, *, starts_early: bool) -> None:
    """Launch, in a listing, what decodes of up to `most_tokens` tokens can: with blocks of each size."""
    heads, nope = spec.num_qo_heads, spec.qk_nope_head_dim
    kv_b_proj = empty(heads, nope + spec.head_dim_vo, spec.kv_lora_rank, dtype=spec.dtype)
    if not are_served(spec, kv_b_proj, device):
        return
    w_uk, w_uv = kv_b_proj[:, :nope], kv_b_proj[:, nope:].mT
    for num_tokens in (1, _LEAST_BLOCK + 1, 2 * _LEAST_BLOCK + 1):
        if num_tokens <= most_tokens:
            dims = spec.head_dim, spec.latent_dim, spec.kv_lora_rank, spec.head_dim_vo
            query, absorbed, attended, output = (empty(num_tokens, heads, dim, dtype=spec.dtype) for dim in dims)
            launch_absorb(query, w_uk, absorbed, starts_early)
            launch_up_project(attended, w_uv, output, starts_early)

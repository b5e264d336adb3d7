"""What lies between the products of a decoder layer of the Llama form, and products of one token, as GPU kernels.

A product of one token reads every weight once and computes next to nothing: it is as fast as memory, if enough reads
are under way. It takes the normalisation of its input, or the addition and the gate of its output, along.

In a step of one token (USE_PDL) each starts before the kernel in front of it has ended, where GPUs can, and waits for
it before it reads anything but weights: those are on their way by then. So a weight must have been there before the
kernel in front was launched. With more tokens products are the library's, which let nothing start.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attn_backends.kernels.launch import launch, power_of_two, supports_pdl
from attn_backends.kernels.pdl import grid_wait_and_launch_dependents

_GATE_WARPS = 4


class ProductTile(NamedTuple):
    """How a product of one token is cut."""

    rows: int  # output features a program
    columns: int  # input features at a time
    warps: int


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    hidden,  # [num_tokens, size]
    weight,  # [size]
    out,  # [num_tokens, size]
    size,
    epsilon,  # f32
    BLOCK: tl.constexpr,  # size, padded
    USE_PDL: tl.constexpr,  # 0 or 1: it starts before the kernel in front of it has ended
):
    """One program normalises a token."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    live = lane < size
    w = tl.load(weight + lane, mask=live, other=0.0).to(tl.float32)
    if USE_PDL:
        grid_wait_and_launch_dependents()
    x = tl.load(hidden + token * size + lane, mask=live, other=0.0).to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    tl.store(out + token * size + lane, (scaled * w).to(out.dtype.element_ty), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def rotate_kernel(  # type: ignore[no-untyped-def]
    heads,  # [num_tokens, num_heads, DIM], rotated in place
    cos,  # [num_tokens, DIM]
    sin,  # [num_tokens, DIM]
    stride,  # elements from token to token
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # DIM / 2, padded
    USE_PDL: tl.constexpr,  # 0 or 1
):
    """One program rotates a head of a token in place, its first half with its second."""
    if USE_PDL:
        grid_wait_and_launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, HALF)
    live = lane < DIM // 2
    start = heads + token * stride + head * DIM
    first = tl.load(start + lane, mask=live).to(tl.float32)
    second = tl.load(start + DIM // 2 + lane, mask=live).to(tl.float32)
    angles = token * DIM + lane
    c, s = tl.load(cos + angles, mask=live).to(tl.float32), tl.load(sin + angles, mask=live).to(tl.float32)
    tl.debug_barrier()  # a short half is loaded by several lanes, or warps: all have it before it is written over
    tl.store(start + lane, (first * c - second * s).to(heads.dtype.element_ty), mask=live)
    tl.store(start + DIM // 2 + lane, (second * c + first * s).to(heads.dtype.element_ty), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(  # type: ignore[no-untyped-def]
    gate_up,  # [num_tokens, 2 * size]
    out,  # [num_tokens, size]
    size,
    BLOCK: tl.constexpr,  # features of a program
    USE_PDL: tl.constexpr,  # 0 or 1
):
    """One program multiplies SiLU of a token's first features with the second half of them."""
    if USE_PDL:
        grid_wait_and_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = lane < size
    gate = tl.load(gate_up + token * 2 * size + lane, mask=live).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + lane, mask=live).to(tl.float32)
    tl.store(out + token * size + lane, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    weight_rows, up, norm, column, live_rows, num_columns, NORM: tl.constexpr, GATED: tl.constexpr
):
    """Weights of some columns, being read: the product's, or the gate's and up's, and the normalisation's."""
    live = column < num_columns
    mask = live_rows[:, None] & live[None]
    w = tl.load(weight_rows + column[None], mask=mask, other=0.0)
    w_up, n = w, column
    if GATED:
        w_up = tl.load(up + column[None], mask=mask, other=0.0)
    if NORM:
        n = tl.load(norm + column, mask=live, other=0.0)
    return w, w_up, n


@triton.jit  # type: ignore[untyped-decorator]
def one_token_kernel(  # type: ignore[no-untyped-def]
    tokens,  # [1, num_columns]
    weight,  # [num_rows, num_columns]; GATED: [2 * num_rows, num_columns], the gate's rows, then up's
    norm,  # [num_columns], if NORM
    residual,  # [1, num_rows], if RESIDUAL
    out,  # [1, num_rows]
    epsilon,  # f32, if NORM
    num_rows,  # output features
    num_columns,  # input features
    NORM: tl.constexpr,  # the token is normalised first
    RESIDUAL: tl.constexpr,  # a residual is added
    GATED: tl.constexpr,  # the output is SiLU of the gate times up
    BLOCK_N: tl.constexpr,  # output features of a program
    BLOCK_K: tl.constexpr,  # input features at a time
    USE_PDL: tl.constexpr,
):
    """One program multiplies a token with BLOCK_N rows of a weight."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_rows = rows < num_rows
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    weight_rows = weight + rows.to(tl.int64)[:, None] * num_columns
    up = weight_rows + num_rows.to(tl.int64) * num_columns
    w, w_up, n = _weights(weight_rows, up, norm, lane, live_rows, num_columns, NORM, GATED)
    if USE_PDL:
        grid_wait_and_launch_dependents()
    for start in range(0, num_columns, BLOCK_K):
        column = start + lane
        next_w, next_up, next_n = _weights(weight_rows, up, norm, column + BLOCK_K, live_rows, num_columns, NORM, GATED)
        x = tl.load(tokens + column, mask=column < num_columns, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= n.to(tl.float32)
        acc += w.to(tl.float32) * x[None]
        if GATED:
            up_acc += w_up.to(tl.float32) * x[None]
        w, w_up, n = next_w, next_up, next_n
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / num_columns + epsilon)
    result = tl.sum(acc, 1) * scale
    if GATED:
        result = result * tl.sigmoid(result) * tl.sum(up_acc, 1) * scale
    if RESIDUAL:
        result += tl.load(residual + rows, mask=live_rows, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=live_rows)


class NormTensors(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor


class NormNumbers(NamedTuple):
    size: int
    epsilon: float
    BLOCK: int
    USE_PDL: bool


class RotateTensors(NamedTuple):
    heads: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class RotateNumbers(NamedTuple):
    stride: int
    DIM: int
    HALF: int
    USE_PDL: bool


class GateTensors(NamedTuple):
    gate_up: torch.Tensor
    out: torch.Tensor


class GateNumbers(NamedTuple):
    size: int
    BLOCK: int
    USE_PDL: bool


class OneTokenTensors(NamedTuple):
    tokens: torch.Tensor
    weight: torch.Tensor
    norm: torch.Tensor
    residual: torch.Tensor
    out: torch.Tensor


class OneTokenNumbers(NamedTuple):
    epsilon: float
    num_rows: int
    num_columns: int
    NORM: bool
    RESIDUAL: bool
    GATED: bool
    BLOCK_N: int
    BLOCK_K: int
    USE_PDL: bool


def _uses_pdl(tokens: torch.Tensor) -> bool:
    return tokens.shape[0] == 1 and supports_pdl(tokens.device)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[num_tokens, size], normalised: x · w / √(mean x² + ε)."""
    num_tokens, size = hidden.shape
    out = torch.empty_like(hidden)
    block = power_of_two(size)
    use_pdl, warps = _uses_pdl(hidden), min(16, max(1, block // 512))
    numbers = NormNumbers(size, epsilon, block, use_pdl)
    launch(rms_norm_kernel, num_tokens, NormTensors(hidden, weight, out), (), (numbers,), warps, use_pdl=use_pdl)
    return out


def rotate_(heads: torch.Tensor, num_rotated: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first heads of [num_tokens, num_heads, dim] in place, by angles [num_tokens, dim]."""
    num_tokens, _, dim = heads.shape
    use_pdl = _uses_pdl(heads)
    numbers = RotateNumbers(heads.stride(0), dim, power_of_two(dim // 2), use_pdl)
    tensors = RotateTensors(heads, cos, sin)
    launch(rotate_kernel, (num_tokens, num_rotated), tensors, (), (numbers,), 1, use_pdl=use_pdl)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) · up of [num_tokens, 2 · size]."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    block = min(1024, power_of_two(size))
    use_pdl, grid = _uses_pdl(out), (num_tokens, -(-size // block))
    numbers = GateNumbers(size, block, use_pdl)
    launch(gate_kernel, grid, GateTensors(gate_up, out), (), (numbers,), _GATE_WARPS, use_pdl=use_pdl)
    return out


def one_token_linear(
    token: torch.Tensor,  # [1, in_features]
    weight: torch.Tensor,  # [out_features, in_features]; gated: [2 · out_features, in_features]
    *,
    norm: torch.Tensor | None = None,  # [in_features]: the token is normalised first
    epsilon: float = 0.0,
    residual: torch.Tensor | None = None,  # [1, out_features], added
    is_gated: bool = False,  # SiLU of the first half of the output times the second
    tile: ProductTile | None = None,
) -> torch.Tensor:  # [1, out_features]
    """A product of one token with what comes before and behind it, in one launch."""
    num_columns = token.shape[1]
    num_rows = weight.shape[0] // (2 if is_gated else 1)
    tile = tile or choose_tile(num_columns, norm is not None)
    out = token.new_empty(1, num_rows)
    tensors = OneTokenTensors(
        token, weight, token if norm is None else norm, token if residual is None else residual, out
    )
    use_pdl = _uses_pdl(out)
    numbers = OneTokenNumbers(
        epsilon, num_rows, num_columns, NORM=norm is not None, RESIDUAL=residual is not None, GATED=is_gated,
        BLOCK_N=tile.rows, BLOCK_K=tile.columns, USE_PDL=use_pdl,
    )  # fmt: skip
    launch(one_token_kernel, -(-num_rows // tile.rows), tensors, (), (numbers,), tile.warps, use_pdl=use_pdl)
    return out


def choose_tile(num_columns: int, has_norm: bool) -> ProductTile:
    """The tile that benchmarks/engine/layer_products.py found best."""
    if has_norm:
        return ProductTile(4, 1024, 8)
    return ProductTile(2, 1024, 4) if num_columns <= 1024 else ProductTile(2, 2048, 8)


def pays(weight: torch.Tensor, has_norm: bool) -> bool:
    """Whether our kernel of one token is faster than the library's and those before and behind it.

    The normalisation is read by every program again: on an H200 that pays for small weights alone.
    """
    return weight.numel() <= (1 << 22 if has_norm else 1 << 26)

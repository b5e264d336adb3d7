"""Tiles of the portable prefill kernel for keys one behind the other, where no table has one that was measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_backends.kernels.tiles import block_bytes, fitted, padded
from attn_backends.spec import AttentionSpec

_SWIZZLED = 64  # columns of 16 bits from which on shared memory holds them in the widest swizzle
_SWIZZLED_FLOATS = 32  # the same of float32
_MARGIN = 3 << 10  # bytes of a program, beside its queries and blocks
_WIDE = 256  # columns of values from which on four warps cannot hold their sums


@dataclass(frozen=True)
class VarlenTile:
    """How prefill over keys that lie one behind the other is tiled."""

    rows: int  # of a tile: query tokens times the query heads of a KV head
    keys: int
    warps: int
    stages: int


def varlen_tile(spec: AttentionSpec, smem_bytes: int) -> VarlenTile:
    """The largest of its kind whose blocks fit; a program can have `smem_bytes` bytes of shared memory."""
    dim, dim_vo = block_dims(spec)
    is_exact = spec.dtype is torch.float32  # products are of two parts
    query_bytes = (2 if is_exact else 1) * dim * spec.dtype.itemsize

    def need(tile: VarlenTile) -> int:
        return tile.rows * query_bytes + block_bytes(spec, tile.keys, tile.stages, dim + dim_vo) + _MARGIN

    warps = 8 if dim_vo >= _WIDE else 4
    return fitted(VarlenTile(64, 32, warps, 2) if is_exact else VarlenTile(64, 64, warps, 3), need, smem_bytes)


def block_dims(spec: AttentionSpec) -> tuple[int, int]:
    """Columns of a block of keys, and of one of values: a narrow one is as wide as the other, up to 64, and blocks of
    float32 as wide in bytes, since ptxas 12.8 miscompiles products of blocks in different swizzles on Hopper."""
    dim, dim_vo = padded(spec.head_dim), padded(spec.head_dim_vo)
    least = min(_SWIZZLED, max(dim, dim_vo, _SWIZZLED_FLOATS if spec.dtype is torch.float32 else 0))
    return max(dim, least), max(dim_vo, least)

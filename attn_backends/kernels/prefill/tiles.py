"""Tiles of the portable prefill kernel for keys one behind the other, where no table has one that was measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_backends.kernels.tiles import block_bytes, block_dims, fitted
from attn_backends.spec import AttentionSpec

MARGIN = 3 << 10  # bytes of a program, beside its queries and blocks
_WIDE = 256  # columns of values from which on four warps cannot hold their sums


@dataclass(frozen=True)
class PrefillTile:
    """How prefill is tiled: over pages, and over keys that lie one behind the other."""

    rows: int  # of a tile: query tokens times the query heads of a KV head
    keys: int
    warps: int
    stages: int


def varlen_tile(spec: AttentionSpec, smem_bytes: int) -> PrefillTile:
    """The largest of its kind whose blocks fit; a program can have `smem_bytes` bytes of shared memory."""
    dim, dim_vo = block_dims(spec)
    is_exact = spec.dtype is torch.float32  # products are of two parts
    query_bytes = (2 if is_exact else 1) * dim * spec.dtype.itemsize

    def need(tile: PrefillTile) -> int:
        return tile.rows * query_bytes + block_bytes(spec, tile.keys, tile.stages, dim + dim_vo) + MARGIN

    warps = 8 if dim_vo >= _WIDE else 4
    return fitted(PrefillTile(64, 32, warps, 2) if is_exact else PrefillTile(64, 64, warps, 3), need, smem_bytes)

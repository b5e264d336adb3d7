"""Launches of TRITON's kernels: grids, constants, and where Triton interprets them, one torch operator each.

As an operator a launch on a CPU is seen by what records torch operations, such as the simulator of CUDA graphs.
"""

from __future__ import annotations

import math

import torch

from attn_backends.backends.triton.decode_kernel import decode_kernel
from attn_backends.backends.triton.prefill_kernel import prefill_kernel
from attn_backends.backends.triton.tuning import DecodeTile, PrefillTile
from attn_backends.spec import AttentionSpec
from attn_backends.triton_split import list_items, operator, padded

_MAX_TILE_ROWS = 64  # of decode: more queries of a row take several tiles


class Schedule:
    """How decode rows are cut into items: the list on the device, and what follows from shapes alone.

    Args:
        num_rows: of the batch, padding included.
        query_len: most query tokens of a row.
        target: items that fill the GPU.
    """

    def __init__(
        self, spec: AttentionSpec, tile: DecodeTile, num_rows: int, query_len: int, target: int, device: torch.device
    ) -> None:
        self.tile = tile
        self.tiles, self.tile_rows = self.num_tiles(spec, query_len), self.tile_queries(spec, query_len)
        self.items = torch.empty(num_rows + target, 8, dtype=torch.int32, device=device)
        min_blocks = max(1, tile.min_keys // tile.keys)
        self._how = [num_rows, target, spec.window_left, spec.chunk_size or 0, tile.keys, min_blocks]

    @staticmethod
    def tile_queries(spec: AttentionSpec, query_len: int) -> int:
        """Queries, token times head, of a tile."""
        return min(padded(query_len * spec.group_size), _MAX_TILE_ROWS)

    @staticmethod
    def num_tiles(spec: AttentionSpec, query_len: int) -> int:
        """Tiles of a row and KV head."""
        return -(-query_len * spec.group_size // Schedule.tile_queries(spec, query_len))

    def fill(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """List the items for these lengths, [num_rows] and [num_rows + 1] i32. One launch."""
        list_items(seq_lens, query_start_loc, self.items, self._how)


class Kernels:
    """The launches of one layer: all that does not change from step to step is worked out once.

    Args:
        slopes, sinks: [num_qo_heads] f32 on the device, where the layer has them.
        k_scale, v_scale: of the cache.
    """

    def __init__(
        self, spec: AttentionSpec, prefill: PrefillTile, slopes: torch.Tensor | None, sinks: torch.Tensor | None,
        k_scale: float, v_scale: float,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.prefill_tile = prefill
        self.extras = (slopes, sinks)
        self.scales = {True: (k_scale, v_scale), False: (1.0, 1.0)}  # of the cache; of keys as they came
        self._layer = [
            int(spec.causal), spec.window_left, spec.chunk_size or 0, int(spec.alibi_slopes is not None),
            int(spec.sinks),
        ]  # fmt: skip
        self._dims = [spec.head_dim, spec.head_dim_vo, padded(spec.head_dim), padded(spec.head_dim_vo)]

    def decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor | None, page_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
        schedule: Schedule, room: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:  # fmt: skip
        """Rows whose keys are split; `room` is where their parts meet."""
        spec, tile = self.spec, schedule.tile
        shape = [key.shape[1], spec.num_kv_heads, spec.group_size, schedule.tiles, schedule.tile_rows, tile.keys]
        how = [*self._layer, int(lse is not None), *shape, *self._dims, tile.stages, tile.warps]
        _decode(query, key, value, output, lse, page_table, seq_lens, query_start_loc, schedule.items, *room,
                *self.extras, *self._factors(True), spec.logits_soft_cap or 0.0, how)  # fmt: skip

    def prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
        lse: torch.Tensor | None, page_table: torch.Tensor | None, seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor, key_start_loc: torch.Tensor, first_row: int, num_tokens: int,
    ) -> None:  # fmt: skip
        """Rows from `first_row` on, of `num_tokens` query tokens; without a page table over keys as they came."""
        spec, tile = self.spec, self.prefill_tile
        tile_tokens = max(1, tile.rows // spec.group_size)
        rows = padded(tile_tokens * spec.group_size)
        paged = page_table is not None
        page_size = key.shape[1] if paged else 0
        shape = [page_size, spec.num_kv_heads, spec.group_size, tile_tokens, rows, tile.keys]
        how = [*self._layer, int(lse is not None), *shape, *self._dims, tile.stages, tile.warps]
        _prefill(query, key, value, output, lse, page_table, seq_lens, query_start_loc, key_start_loc, *self.extras,
                 *self._factors(paged), spec.logits_soft_cap or 0.0, first_row, num_tokens, how)  # fmt: skip

    def _factors(self, cached: bool) -> tuple[float, float]:
        """Of logits, in base 2 unless a soft cap comes between; of values."""
        k_scale, v_scale = self.scales[cached]
        base = 1.0 if self.spec.logits_soft_cap is not None else math.log2(math.e)
        return self.spec.scale * k_scale * base, v_scale


def _strides(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
    """As both kernels take them. Keys without pages are [tokens, heads, dim]."""
    page = (key.stride(0), value.stride(0)) if key.dim() == 4 else (0, 0)
    return (*query.stride()[:2], page[0], *key.stride()[-3:-1], page[1], *value.stride()[-3:-1], *output.stride()[:2])


@operator(("output", "lse", "partial", "sums", "counters"))
def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, items: torch.Tensor,
    partial: torch.Tensor, sums: torch.Tensor, counters: torch.Tensor, slopes: torch.Tensor | None,
    sinks: torch.Tensor | None, scale: float, value_scale: float, soft_cap: float, how: list[int],
) -> None:  # fmt: skip
    causal, window, chunk, alibi, has_sinks, want_lse, *shape, stages, warps = how
    _page_size, num_kv_heads, _group, tiles = shape[:4]
    decode_kernel[len(items) * num_kv_heads * tiles,](
        query, key, value, output, output if lse is None else lse, page_table, seq_lens, query_start_loc, items,
        partial, sums, counters, query if slopes is None else slopes, query if sinks is None else sinks,
        scale, value_scale, page_table.stride(0), *_strides(query, key, value, output), output.shape[1],
        causal, window, chunk, soft_cap, alibi, has_sinks, want_lse, *shape, stages, query.dtype is torch.float32,
        num_warps=warps,
    )  # fmt: skip


@operator(("output", "lse"))
def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    page_table: torch.Tensor | None, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor, slopes: torch.Tensor | None, sinks: torch.Tensor | None, scale: float,
    value_scale: float, soft_cap: float, first_row: int, num_tokens: int, how: list[int],
) -> None:  # fmt: skip
    causal, window, chunk, alibi, has_sinks, want_lse, *shape, stages, warps = how
    _page_size, num_kv_heads, _group, tile_tokens = shape[:4]
    num_rows = len(seq_lens) - first_row
    table, stride = (seq_lens, 0) if page_table is None else (page_table, page_table.stride(0))
    prefill_kernel[num_tokens // tile_tokens + num_rows, num_kv_heads](
        query, key, value, output, output if lse is None else lse, table, seq_lens, query_start_loc, key_start_loc,
        query if slopes is None else slopes, query if sinks is None else sinks,
        scale, value_scale, first_row, num_rows, stride, *_strides(query, key, value, output), output.shape[1],
        causal, window, chunk, soft_cap, alibi, has_sinks, want_lse, *shape, stages, query.dtype is torch.float32,
        num_warps=warps,
    )  # fmt: skip

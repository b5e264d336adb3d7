"""How many bytes FlashInfer's schedulers take, so that no plan within the limits can fail for want of them.

From `DecodePlan`, `PrefillPlan` and `PrefillSM90Plan` of FlashInfer's attention/scheduler.cuh. A split row leaves a
partial output and an LSE, both float32, for every tile of its queries:

    floats = num_qo_heads · tiles · rows of a tile · (head_dim_vo + 1)

Without a graph, rows are split only while their tiles are fewer than what the GPU runs at once. In a graph they always
are, and the tiles are as many as its size allows. `plan_need` says what one plan takes: workspaces are sized so that
none takes more, and every plan is held against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from attn_backends.spec import AttentionSpec, Limits

CTAS_PER_SM = 2  # of the fa2 kernels
DECODE_CTAS_PER_SM = 16  # at most: 128 threads a block, 2048 a multiprocessor
FA3_TILE = 128
SAME_SCHEDULE_TILES = 4096  # of fa3: above, one schedule serves all heads
ALIGNMENT = 256  # bytes, of a schedule's place in a workspace that plans share
SLACK_BYTES = 4096  # alignment of a plan's dozen arrays

Kernels = Literal["cuda_cores", "fa2", "fa3"]


@dataclass(frozen=True)
class Need:
    """Bytes of the two workspaces."""

    float_bytes: int
    int_bytes: int

    def __or__(self, other: Need) -> Need:
        """Enough for either."""
        return Need(max(self.float_bytes, other.float_bytes), max(self.int_bytes, other.int_bytes))

    def fits(self, other: Need) -> bool:
        """Whether workspaces of the other's bytes hold it."""
        return self.float_bytes <= other.float_bytes and self.int_bytes <= other.int_bytes


def plan_need(
    kernels: Kernels, spec: AttentionSpec, num_rows: int, num_tokens: int, num_sms: int, *,
    in_graph: bool = False, num_splits: int | None = None,
) -> Need:  # fmt: skip
    """What a plan of so many rows and query tokens takes at most, whatever the lengths of each row.

    Args:
        num_splits: of a row's keys, at most, where their size is chosen; None: as many as FlashInfer finds best.
    """
    if kernels == "cuda_cores":
        return _decode_need(spec, num_rows, num_sms)
    if kernels == "fa3":
        return _fa3_need(spec, num_rows, num_tokens)
    tile = graph_tile(spec, num_rows, num_tokens) if in_graph else _mean_tile(spec, num_rows, num_tokens)
    query_tiles = _num_tiles(spec, num_tokens, num_rows, tile)
    split = tiles_at_once(spec, num_sms)
    if num_splits is not None:
        split = query_tiles * num_splits
    elif in_graph:
        split = max(split, query_tiles)
    return Need(_partials(spec, split, tile), _fa2_ints(max(split, query_tiles), num_rows, num_tokens))


def eager_need(spec: AttentionSpec, limits: Limits, num_sms: int, split_size: int | None, page_size: int) -> Need:
    """The need of any plan within the limits without a graph, whichever kernels run it."""
    num_rows, num_tokens = limits.max_num_requests, limits.max_num_tokens
    num_splits = 0 if split_size is None else -(-limits.max_model_len // (split_size * page_size))
    need = _decode_need(spec, num_rows, num_sms) | _fa3_need(spec, num_rows, num_tokens)
    for tile in (16, 64) if spec.head_dim >= 256 else (16, 64, 128):  # which one a step has, its lengths say
        query_tiles = _num_tiles(spec, num_tokens, num_rows, tile)
        split = query_tiles * num_splits or tiles_at_once(spec, num_sms)
        need |= Need(_partials(spec, split, tile), _fa2_ints(max(split, query_tiles), num_rows, num_tokens))
    return need


def graph_need(spec: AttentionSpec, num_rows: int, query_len: int, num_sms: int) -> Need:
    """The need of a graph of `num_rows` rows of `query_len` tokens, decoded by either kernel or prefilled by fa2."""
    need = plan_need("fa2", spec, num_rows, num_rows * query_len, num_sms, in_graph=True)
    return need | _decode_need(spec, num_rows, num_sms)


def most_parts(spec: AttentionSpec, num_rows: int, num_sms: int, float_bytes: int) -> int:
    """Query tiles of a decode, each over a part of a row's keys, that a graph of so many rows has room for, and that a
    workspace of so many bytes holds the results of."""
    tile = _mean_tile(spec, num_rows, num_rows)
    held = (float_bytes - SLACK_BYTES) // _partial_bytes(spec, tile)
    return min(graph_tiles(spec, num_rows, 1, num_sms), held)


def graph_tiles(spec: AttentionSpec, num_rows: int, query_len: int, num_sms: int) -> int:
    """Query tiles, each over a part of a row's keys, that a graph of this size has room for, a KV head."""
    num_tokens = num_rows * query_len
    tile = graph_tile(spec, num_rows, num_tokens)
    return max(tiles_at_once(spec, num_sms), _num_tiles(spec, num_tokens, num_rows, tile))


def tiles_at_once(spec: AttentionSpec, num_sms: int) -> int:
    """Tiles that the GPU runs at once, a KV head."""
    return CTAS_PER_SM * num_sms // spec.num_kv_heads


def fa2_tile(packed_len: int, head_dim: int) -> int:
    """Query tokens times query heads of a KV head that one fa2 block takes (`FA2DetermineCtaTileQ`)."""
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


def _num_tiles(spec: AttentionSpec, num_tokens: int, num_rows: int, tile: int) -> int:
    return -(-num_tokens * spec.group_size // tile) + num_rows - 1


def graph_tile(spec: AttentionSpec, num_rows: int, num_tokens: int) -> int:
    """The tile of a graph: one row may have all tokens but one for each other row."""
    return fa2_tile((num_tokens - num_rows + 1) * spec.group_size, spec.head_dim)


def _mean_tile(spec: AttentionSpec, num_rows: int, num_tokens: int) -> int:
    return fa2_tile(num_tokens * spec.group_size // num_rows, spec.head_dim)


def _partial_bytes(spec: AttentionSpec, tile: int) -> int:
    return spec.num_qo_heads * tile * (spec.head_dim_vo + 1) * 4


def _partials(spec: AttentionSpec, tiles: int, tile: int) -> int:
    return tiles * _partial_bytes(spec, tile) + SLACK_BYTES


def _fa2_ints(tiles: int, num_rows: int, num_tokens: int) -> int:
    """Three indices and a flag a tile, and the starts of rows and of each token's parts."""
    return 13 * tiles + 4 * (num_rows + num_tokens) + SLACK_BYTES


def _decode_need(spec: AttentionSpec, num_rows: int, num_sms: int) -> Need:
    blocks = DECODE_CTAS_PER_SM * num_sms // spec.num_kv_heads
    floats = spec.num_qo_heads * blocks * (spec.head_dim_vo + 1) * 4 + SLACK_BYTES
    return Need(floats, 13 * max(blocks, num_rows) + SLACK_BYTES)


def _fa3_need(spec: AttentionSpec, num_rows: int, num_tokens: int) -> Need:
    """Seven indices a tile and head, partial results none. One schedule serves all heads where there are many tiles: so
    a smaller step may take more than a larger one, and this is for any up to this size."""
    tiles = -(-num_tokens // FA3_TILE) + num_rows - 1
    works = max(tiles, min(tiles, SAME_SCHEDULE_TILES) * spec.num_qo_heads)
    return Need(0, 28 * works + 4 * 1024 + SLACK_BYTES)


def check_workspace(name: str, given: torch.Tensor, needed_bytes: int, device: torch.device) -> None:
    """A workspace that a caller brings holds what plans take.

    Raises:
        ValueError: it is too small, on another device, or does not lie in one piece.
    """
    held_bytes = given.numel() * given.itemsize
    if held_bytes < needed_bytes:
        raise ValueError(f"{name} has {held_bytes} bytes; these limits need {needed_bytes}")
    if given.device.type != device.type or not given.is_contiguous() or given.data_ptr() % 16:
        raise ValueError(
            f"{name} is on {given.device} with strides {given.stride()}; the state is on {device}, and needs it in one "
            "piece from a multiple of 16 bytes on"
        )

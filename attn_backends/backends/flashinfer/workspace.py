"""How many bytes FlashInfer's schedulers take, so that no plan within the limits can fail for want of them.

From `DecodePlan`, `PrefillPlan` and `PrefillSM90Plan` of FlashInfer's attention/scheduler.cuh. A split row leaves a
partial output and an LSE, both float32, for every tile of its queries:

    floats = num_qo_heads · tiles · rows of a tile · (head_dim_vo + 1)

Without a graph, rows are split only while their tiles are fewer than what the GPU runs at once. In a graph they always
are, and the tiles are as many as its size allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_backends.spec import AttentionSpec, Limits

CTAS_PER_SM = 2  # of the fa2 kernels
DECODE_CTAS_PER_SM = 16  # at most: 128 threads a block, 2048 a multiprocessor
FA3_TILE = 128
SAME_SCHEDULE_TILES = 4096  # of fa3: above, one schedule serves all heads
SLACK_BYTES = 4096  # alignment of a plan's dozen arrays


@dataclass(frozen=True)
class Need:
    """Bytes of the two workspaces."""

    float_bytes: int
    int_bytes: int

    def __or__(self, other: Need) -> Need:
        """Enough for either."""
        return Need(max(self.float_bytes, other.float_bytes), max(self.int_bytes, other.int_bytes))


def eager_need(spec: AttentionSpec, limits: Limits, num_sms: int, split_size: int | None, page_size: int) -> Need:
    """Of any batch within the limits, planned without a graph, whichever kernels run it."""
    ctas = tiles_at_once(spec, num_sms)
    tiles = _num_tiles(spec, limits.max_num_tokens, limits.max_num_requests, 16)
    if split_size is not None:  # every tile may be split, into as many parts as its keys need
        ctas = tiles = tiles * -(-limits.max_model_len // (split_size * page_size))
    largest_tile = 64 if spec.head_dim >= 256 else 128
    need = Need(_partials(spec, ctas, largest_tile), _fa2_ints(max(ctas, tiles), limits))
    return need | _decode_need(spec, limits.max_num_requests, num_sms) | _fa3_need(spec, limits)


def graph_need(spec: AttentionSpec, num_rows: int, query_len: int, num_sms: int) -> Need:
    """Of a graph of `num_rows` rows of `query_len` tokens, decoded by either kernel or prefilled by fa2."""
    num_tokens = num_rows * query_len
    tile = _tile((num_tokens - num_rows + 1) * spec.group_size, spec.head_dim)
    tiles = graph_tiles(spec, num_rows, query_len, num_sms)
    need = Need(_partials(spec, tiles, tile), _fa2_ints(tiles, Limits(num_rows, num_tokens, 1)))
    return need | _decode_need(spec, num_rows, num_sms)


def graph_tiles(spec: AttentionSpec, num_rows: int, query_len: int, num_sms: int) -> int:
    """Query tiles, each over a part of a row's keys, that a graph of this size has room for, a KV head."""
    num_tokens = num_rows * query_len
    tile = _tile((num_tokens - num_rows + 1) * spec.group_size, spec.head_dim)
    return max(tiles_at_once(spec, num_sms), _num_tiles(spec, num_tokens, num_rows, tile))


def tiles_at_once(spec: AttentionSpec, num_sms: int) -> int:
    """Those that the GPU runs at once, a KV head."""
    return CTAS_PER_SM * num_sms // spec.num_kv_heads


def _tile(packed_len: int, head_dim: int) -> int:
    """Query tokens times query heads of a KV head that one fa2 block takes (`FA2DetermineCtaTileQ`)."""
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


def _num_tiles(spec: AttentionSpec, num_tokens: int, num_rows: int, tile: int) -> int:
    return -(-num_tokens * spec.group_size // tile) + num_rows - 1


def _partials(spec: AttentionSpec, tiles: int, tile: int) -> int:
    return spec.num_qo_heads * tiles * tile * (spec.head_dim_vo + 1) * 4 + SLACK_BYTES


def _fa2_ints(tiles: int, limits: Limits) -> int:
    """Three indices and a flag a tile, and the starts of rows and of each token's parts."""
    return 13 * tiles + 4 * (limits.max_num_requests + limits.max_num_tokens) + SLACK_BYTES


def _decode_need(spec: AttentionSpec, num_rows: int, num_sms: int) -> Need:
    blocks = DECODE_CTAS_PER_SM * num_sms // spec.num_kv_heads
    floats = spec.num_qo_heads * blocks * (spec.head_dim_vo + 1) * 4 + SLACK_BYTES
    return Need(floats, 13 * max(blocks, num_rows) + SLACK_BYTES)


def _fa3_need(spec: AttentionSpec, limits: Limits) -> Need:
    """Seven indices a tile and head; partial results there are none."""
    tiles = -(-limits.max_num_tokens // FA3_TILE) + limits.max_num_requests - 1
    works = tiles if tiles > SAME_SCHEDULE_TILES else tiles * spec.num_qo_heads
    return Need(0, 28 * works + 4 * 1024 + SLACK_BYTES)

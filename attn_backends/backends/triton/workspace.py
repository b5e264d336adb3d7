"""The workspace of TRITON's kernels: what one launch needs of it, and how large it has to be for every launch.

`decode_need` and `prefill_need` alone know: the state sizes the workspace by them, and every schedule is checked
against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attn_backends.backends.triton.schedule import SplitPlan
from attn_backends.backends.triton.tuning import DecodeTile, TritonOptions, decode_tiles
from attn_backends.kernels.prefill.splits import most_queries
from attn_backends.kernels.tiles import block_dims
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits

DECODE_TOKENS = 16  # most query tokens of a row that the decode kernel can serve, and a graph
# Of a row and a KV head, up to which decode is the faster way where prefill's kernels can serve: a small tile, or over
# 8 bits several, as keys that are made 16 bits are not soon read.
_DECODE_QUERIES, _DECODE_QUERIES_OF_8_BITS = 16, 48


def least_decode_tokens(spec: AttentionSpec) -> int:
    """Most query tokens of a row that the decode kernel serves wherever another one can."""
    queries = _DECODE_QUERIES_OF_8_BITS if spec.cache_dtype.itemsize == 1 else _DECODE_QUERIES
    return max(1, min(DECODE_TOKENS, queries // spec.group_size))


def mixed_decode_tokens(spec: AttentionSpec) -> int:
    """Most query tokens of a row that the decode kernel serves in a graph of mixed batches: as many as one small tile
    takes, since a row of one token there reads its keys as often as there are tiles."""
    return max(1, min(DECODE_TOKENS, _DECODE_QUERIES // spec.group_size))


class LaunchNeed(NamedTuple):
    """What one launch writes of a workspace, in elements."""

    partial_acc: int  # f32, accumulators of partial results
    partial_ml: int  # f32, their maximum and sum
    counters: int  # i32

    def or_more(self, other: LaunchNeed) -> LaunchNeed:
        """The larger of each."""
        return LaunchNeed(*map(max, self, other))


NOTHING = LaunchNeed(0, 0, 0)


def decode_need(spec: AttentionSpec, tile: DecodeTile, query_len: int, num_sms: int) -> LaunchNeed:
    """What a decode launch over rows of up to `query_len` tokens writes, whatever their number and lengths.

    A partial result has [num_kv_heads, tiles, lanes] queries of the padded head_dim_vo, and 2 numbers a query.
    """
    plan = SplitPlan.of(spec, query_len)
    heads = spec.num_kv_heads * plan.tiles
    slots = plan.num_partial_slots(spec, tile, num_sms)
    queries = slots * heads * plan.used_m
    return LaunchNeed(queries * block_dims(spec)[1], queries * 2, plan.num_counters(spec, tile, num_sms))


def prefill_need(spec: AttentionSpec, num_sms: int) -> LaunchNeed:
    """What a prefill launch writes, whatever its rows are: so many queries of splits, none of which has a counter."""
    queries = most_queries(num_sms)
    return LaunchNeed(queries * block_dims(spec)[1], queries * 2, 0)


def largest_need(
    specs: Iterable[AttentionSpec], cache: KVCacheSpec, limits: Limits, options: TritonOptions | None, num_sms: int,
    shared_memory: int,
) -> LaunchNeed:  # fmt: skip
    """What suffices for every launch within the limits: of decodes over all numbers of rows and all query lengths.

    The need peaks between the ends of both ranges: queries are padded to tiles, and a tile of more queries is cut for
    fewer programs.
    """
    need, most_rows = NOTHING, limits.max_num_requests
    for spec in specs:
        for query_len in range(1, min(DECODE_TOKENS, limits.max_num_tokens) + 1):
            query_rows = SplitPlan.of(spec, query_len).block_m
            for tile in decode_tiles(spec, cache, most_rows, query_rows, options, shared_memory):
                need = need.or_more(decode_need(spec, tile, query_len, num_sms))
        can_prefill = limits.max_num_tokens > least_decode_tokens(spec)
        if can_prefill or spec.attention_type is not AttentionType.DECODER:
            need = need.or_more(prefill_need(spec, num_sms))
    return need


@dataclass(frozen=True, eq=False)
class Workspace:
    """Where the parts of split rows meet, and where programs count. All layers of a step share it, as they run one
    after the other, and so do a layer's decode and a prefill that splits keys; steps on other streams have another."""

    partial_acc: torch.Tensor  # [partial slots * heads * lanes * head_dim_vo] f32
    partial_ml: torch.Tensor  # [partial slots * heads * lanes * 2] f32: highest logit in base 2, sum of weights
    counters: torch.Tensor  # i32, see `kernels.decode`; a step's schedule sets them to 0
    tiles: torch.Tensor  # [2] i32, of prefill, zeros between launches; a step with prefills clears them
    upcast_kv: torch.Tensor  # u8, keys and values of a cache of 8 bits, made 16 bits for prefills

    @staticmethod
    def of(need: LaunchNeed, upcast_bytes: int, device: torch.device) -> Workspace:
        return Workspace(
            torch.empty(need.partial_acc, dtype=torch.float32, device=device),
            torch.empty(need.partial_ml, dtype=torch.float32, device=device),
            torch.zeros(need.counters, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
            torch.empty(upcast_bytes, dtype=torch.uint8, device=device),
        )

    def check(self, need: LaunchNeed, num_rows: int, query_len: int) -> None:
        """Refuse a launch that would write beyond the end.

        Raises:
            ValueError: the batch is above the limits that the workspace was sized from.
        """
        has = LaunchNeed(self.partial_acc.numel(), self.partial_ml.numel(), self.counters.numel())
        if any(need > size for need, size in zip(need, has, strict=True)):
            raise ValueError(
                f"a step of {num_rows} rows of up to {query_len} tokens needs {need} elements of TRITON's workspace, "
                f"which has {has}: make the state with Limits that hold the batch"
            )

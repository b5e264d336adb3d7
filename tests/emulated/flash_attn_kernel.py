"""The arithmetic of the emulated FlashAttention: attention over ragged rows, in float32, without reading the device.

As in `flashinfer_kernel`, every query meets every key slot of the batch, and a mask keeps those of its own row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tests.emulated.flash_attn_blocks import Blocks
from tests.emulated.flashinfer_kernel import place, select_pages, weighted

FP8 = torch.float8_e4m3fn
OVERFLOWS = math.log(torch.finfo(torch.float32).max)
FP8_WEIGHT_SCALE = 256.0  # weights are rounded to fp8 after the largest of them was brought to this


@dataclass(frozen=True)
class Rules:
    """What a call asks for."""

    scale: float
    causal: bool
    window: tuple[int, int]  # -1: unlimited
    soft_cap: float  # 0: none
    alibi_slopes: torch.Tensor | None = None  # [num_qo_heads] f32
    sinks: torch.Tensor | None = None  # [num_qo_heads]
    empty_lse: float = -math.inf


@dataclass(frozen=True)
class Keys:
    """Key slots of all rows, one row's behind the other's."""

    key: torch.Tensor  # [num_slots, num_kv_heads, head_dim] f32
    value: torch.Tensor  # [num_slots, num_kv_heads, head_dim_vo] f32
    starts: torch.Tensor  # [R + 1] i64, of each row's slots
    lens: torch.Tensor  # [R] i64, how many hold keys
    is_fp8: bool = False


def paged_keys(
    key_cache: torch.Tensor, value_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor
) -> Keys:
    """Rows' pages, gathered. What a table holds past a row's own pages is not looked up."""
    (num_rows, width), page_size = page_table.shape, key_cache.shape[1]
    columns = torch.arange(width, device=page_table.device)
    used = (seq_lens[:, None] + (page_size - 1)).div(page_size, rounding_mode="floor")
    pages = page_table.long().masked_fill(columns >= used, 0).flatten()
    starts = torch.arange(num_rows + 1, device=page_table.device) * (width * page_size)
    key, value = (select_pages(cache, pages) for cache in (key_cache, value_cache))
    return Keys(key, value, starts, seq_lens.long(), key_cache.dtype is FP8)


def own_keys(key: torch.Tensor, value: torch.Tensor, cu_seqlens_k: torch.Tensor) -> Keys:
    """Keys that lie together."""
    starts = cu_seqlens_k.long()
    return Keys(key.float(), value.float(), starts, starts[1:] - starts[:-1])


def attend(
    query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
    cu_seqlens_q: torch.Tensor,  # [R + 1]
    keys: Keys,
    rules: Rules,
    planned: tuple[torch.Tensor, torch.Tensor] | None = None,
    blocks: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of every row, bottom right aligned: query i of q stands at key i + k - q of k.

    Args:
        planned: [R] queries and [R] keys of each row, as a schedule has them; None: as many as there are.
        blocks: queries see what it shows them as well.

    Returns:
        out [num_tokens, num_qo_heads, head_dim_vo] f32, zeros where no key is seen; lse [num_tokens, num_qo_heads] f32,
        natural, sinks included, `rules.empty_lse` there; covered [num_tokens] bool, the tokens that a schedule knows.
    """
    starts = cu_seqlens_q.long()
    query_lens = starts[1:] - starts[:-1]
    planned_queries, planned_keys = (query_lens, keys.lens) if planned is None else planned
    row, index, covered = place(len(query), starts, torch.minimum(query_lens, planned_queries.long()))
    key_row, key_index, is_key = place(len(keys.key), keys.starts, torch.minimum(keys.lens, planned_keys.long()))
    position = ((keys.lens - query_lens)[row] + index)[:, None]
    seen = there = (row[:, None] == key_row) & is_key & covered[:, None]
    left, right = rules.window[0], 0 if rules.causal else rules.window[1]
    if right >= 0:
        seen = seen & (key_index <= position + right)
    if left >= 0:
        seen = seen & (key_index >= position - left)
    by_head = seen[:, None]  # [num_tokens, 1 or group_size, num_slots]
    if blocks is not None:
        group_size = query.shape[1] // keys.key.shape[1]
        shown = blocks.shown(row, index, query_lens, keys.lens, key_index, group_size)
        by_head = by_head | (shown & there[:, None])
    logits = _logits(query, keys, rules, position, key_index, by_key=left < 0 and right == 0)
    logits = logits.masked_fill(~by_head, -math.inf)  # [num_kv_heads, num_tokens, group_size, num_slots]
    lse = torch.logsumexp(logits, -1)  # [num_kv_heads, num_tokens, group_size]
    empty = lse == -math.inf
    top = logits.amax(-1).masked_fill(empty, 0.0)[..., None]
    if rules.sinks is not None:
        lse = torch.logaddexp(lse, rules.sinks.float().view(len(lse), 1, -1))
        lse = lse.masked_fill(lse - top[..., 0] > OVERFLOWS, math.inf)  # as exp(sink - top) does
    weights = torch.exp(logits - top)
    if keys.is_fp8:
        weights = (weights * FP8_WEIGHT_SCALE).to(FP8).float() / FP8_WEIGHT_SCALE
    weights = weights * torch.exp(top - lse.masked_fill(empty, 0.0)[..., None])
    out = weighted(weights, keys.value, by_head.any(1)).permute(1, 0, 2, 3).reshape(len(query), -1, keys.value.shape[2])
    return out, lse.masked_fill(empty, rules.empty_lse).transpose(0, 1).reshape(len(query), -1), covered


def _logits(
    query: torch.Tensor, keys: Keys, rules: Rules, position: torch.Tensor, key_index: torch.Tensor, by_key: bool
) -> torch.Tensor:
    """[num_kv_heads, num_tokens, group_size, num_slots]. With `by_key` ALiBi's bias is of the key's position alone, as
    causal kernels add it: that moves all logits of a query, and with them its LSE, by one amount."""
    num_tokens, num_kv_heads = len(query), keys.key.shape[1]
    grouped = query.float().reshape(num_tokens, num_kv_heads, -1, query.shape[2]).transpose(0, 1)
    logits = torch.matmul(grouped.flatten(1, 2) * rules.scale, keys.key.permute(1, 2, 0))
    logits = logits.view(num_kv_heads, num_tokens, -1, len(keys.key))
    if rules.soft_cap > 0:
        logits = rules.soft_cap * torch.tanh(logits / rules.soft_cap)
    if rules.alibi_slopes is not None:
        distance = key_index.expand(num_tokens, -1) if by_key else -(position - key_index).abs()
        logits = logits + rules.alibi_slopes.view(num_kv_heads, 1, -1, 1) * distance[:, None]
    return logits

"""The arithmetic of the emulated FlashInfer: attention over ragged rows, in float32, without reading the device.

All shapes come from the arguments' shapes, so that an operation recorded in a graph is the one that replay needs. Every
query meets every key slot of the batch in one product, and a mask keeps those of its own row: for small batches that is
faster than a gather a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

LOG2E = math.log2(math.e)
# `math::inf` of the real package is 5e4, and running maxima begin at minus that. A query all of whose logits lie below
# comes back as one that sees no key: with zeros, and that number as its lse.
EMPTY_LSE = -5e4


@dataclass(frozen=True)
class Rules:
    """What an attention variant does, as baked in at plan."""

    scale: float
    causal: bool
    window_left: int  # -1: unlimited
    soft_cap: float  # 0: none
    # What kernels compare with `EMPTY_LSE`: products of queries and keys, or logits of base 2. None: neither.
    compares: Literal["products", "logits", None] = None
    rope: tuple[float, float] | None = None  # scale and theta of the rotation of queries and keys
    alibi: torch.Tensor | None = None  # [num_qo_heads] f32, of distances from a query's index among its row's queries
    hidden: int = 0  # of the keys that a causal query would see, the last so many are not shown to it


@dataclass(frozen=True)
class Rows:
    """Where each row's queries and keys are. On the device; int64."""

    qo_indptr: torch.Tensor  # [batch_size + 1]
    key_indptr: torch.Tensor  # [batch_size + 1], in key slots: pages times page size
    kv_lens: torch.Tensor  # [batch_size]: how many of its slots hold keys now
    planned_kv_lens: torch.Tensor  # [batch_size]: how many the plan's work list reaches
    planned_qo_lens: torch.Tensor  # [batch_size]


def attend(
    query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim_qk]
    key: torch.Tensor,  # [num_slots, num_kv_heads, head_dim_qk] f32
    value: torch.Tensor,  # [num_slots, num_kv_heads, head_dim_vo] f32
    rows: Rows,
    rules: Rules,
    reached: torch.Tensor | None = None,  # [num_tokens, num_slots] bool: what a work list has tiles for; None: all
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of every row, over its first min(length now, length planned) keys.

    A row's query i of qo_len sees key j of kv_len if j + qo_len + window_left >= kv_len + i (with a window) and
    j + qo_len <= kv_len + i (if causal), as in FlashInfer's `variants.cuh` and `prefill.cuh`.

    Returns:
        out [num_tokens, num_qo_heads, head_dim_vo] f32, zeros where no key is seen or all lie too low; lse
        [num_tokens, num_qo_heads] f32, log2, `EMPTY_LSE` there; covered [num_tokens] bool, the tokens that the plan
        knows of.
    """
    seen, covered = _seen(len(query), len(key), rows, rules)
    if reached is not None:
        seen = seen & reached
    if rules.rope is not None:
        query, key = _rotate_all(query, key, rows, rules.rope)
    num_tokens, num_kv_heads, group_size = len(query), key.shape[1], query.shape[1] // key.shape[1]
    grouped = query.float().reshape(num_tokens, num_kv_heads, group_size, -1).transpose(0, 1).flatten(1, 2)
    products = torch.matmul(grouped, key.permute(1, 2, 0))  # [num_kv_heads, num_tokens * group_size, slots]
    logits = products * rules.scale
    if rules.soft_cap > 0:
        logits = rules.soft_cap * torch.tanh(logits / rules.soft_cap)
    shape = (num_kv_heads, num_tokens, group_size, -1)
    logits = logits.view(shape)
    if rules.alibi is not None:
        slopes = rules.alibi.view(num_kv_heads, 1, group_size, 1)
        logits = logits + slopes * _distances(num_tokens, len(key), rows)[None, :, None]
    hidden = -math.inf if rules.scale > 0 else math.nan  # keys are hidden before the kernel scales
    logits = logits.masked_fill(~seen[:, None], hidden)
    lse = torch.logsumexp(logits, -1)  # [num_kv_heads, num_tokens, group_size]
    if rules.compares is not None and rules.soft_cap == 0:
        scaled = rules.compares == "logits" or rules.alibi is not None
        compared = logits * (LOG2E if rules.compares == "logits" else 1.0) if scaled else products.view(shape)
        lse = lse.masked_fill(~(seen[:, None] & (compared >= EMPTY_LSE)).any(-1), -math.inf)
    empty = lse == -math.inf
    weights = torch.exp(logits - lse.masked_fill(empty, math.inf)[..., None])
    out = weighted(weights, value, seen)
    out = out.permute(1, 0, 2, 3).reshape(num_tokens, -1, value.shape[2])
    lse = (lse * LOG2E).masked_fill(empty, EMPTY_LSE).transpose(0, 1).reshape(num_tokens, -1)
    return out, lse, covered


def _rotate_all(
    query: torch.Tensor, key: torch.Tensor, rows: Rows, rope: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries at their positions among the keys of their rows, and keys at theirs, as `kRoPELlama` rotates them."""
    row, index, _ = place(len(query), rows.qo_indptr, rows.planned_qo_lens)
    positions = (rows.kv_lens - (rows.qo_indptr[1:] - rows.qo_indptr[:-1]))[row] + index
    _, key_positions, _ = place(len(key), rows.key_indptr, rows.kv_lens)
    return _rotate(query, positions, rope, query.dtype), _rotate(key, key_positions, rope, query.dtype)


def _rotate(
    heads: torch.Tensor, positions: torch.Tensor, rope: tuple[float, float], dtype: torch.dtype
) -> torch.Tensor:
    """`k_frag_apply_llama_rope` of `prefill.cuh`: number i turns with i + head_dim / 2, in float32, and is rounded."""
    scale, theta = rope
    dim = heads.shape[-1]
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=heads.device) / dim
    angles = positions.float()[:, None] * ((1 / scale) * (1 / theta) ** exponents)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(dtype).float()


def get_alibi_slopes(num_heads: int) -> torch.Tensor:
    """As the function of this name in the real `utils.py`."""
    n = 2 ** math.floor(math.log2(num_heads))
    exponents = torch.arange(1, 1 + n, device="cpu")
    slopes = torch.tensor(2.0 ** (-8.0 / n), dtype=torch.float32, device="cpu").pow(exponents)
    if n < num_heads:
        exponents = torch.arange(1, 1 + 2 * (num_heads - n), 2, device="cpu")
        further = torch.tensor(2.0 ** (-4.0 / n), dtype=torch.float32, device="cpu").pow(exponents)
        slopes = torch.cat([slopes, further])
    return slopes


def _distances(num_tokens: int, num_slots: int, rows: Rows) -> torch.Tensor:
    """[num_tokens, num_slots] f32: a key's place in its row, less the query's among its row's queries."""
    _, index, _ = place(num_tokens, rows.qo_indptr, rows.planned_qo_lens)
    _, key_index, _ = place(num_slots, rows.key_indptr, rows.kv_lens)
    return (key_index[None, :] - index[:, None]).float()


def weighted(weights: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Sum of values by weight. One that is not finite reaches the queries that see it, as NaN, and no other."""
    sums = torch.matmul(weights.flatten(1, 2), torch.nan_to_num(value, 0.0, 0.0, 0.0).transpose(0, 1))
    not_finite = (~torch.isfinite(value)).any(-1).float()  # [num_slots, num_kv_heads]
    reached = torch.matmul(seen.float(), not_finite).t() > 0  # [num_kv_heads, num_tokens]
    return sums.view(*weights.shape[:3], -1).masked_fill(reached[..., None, None], math.nan)


def _seen(num_tokens: int, num_slots: int, rows: Rows, rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """seen [num_tokens, num_slots] bool, and covered [num_tokens] bool."""
    row, index, in_row = place(num_tokens, rows.qo_indptr, rows.planned_qo_lens)
    reached = torch.minimum(rows.kv_lens, rows.planned_kv_lens)
    key_row, key_index, is_key = place(num_slots, rows.key_indptr, reached)
    qo_lens = rows.qo_indptr[1:] - rows.qo_indptr[:-1]
    position = ((rows.kv_lens - qo_lens)[row] + index)[:, None]  # of each query among the keys of its row
    owner, _, _ = place_slots(rows.key_indptr[row], rows.key_indptr, reached)  # of rows that begin at one key, the last
    seen = (owner[:, None] == key_row) & is_key & in_row[:, None] & (key_index < reached[row][:, None])
    if rules.causal:
        seen = seen & (key_index + rules.hidden <= position)
    if rules.window_left >= 0:
        seen = seen & (key_index + rules.window_left >= position)
    return seen, in_row


def place(count: int, indptr: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each of `count` slots its row, its place in that row, and whether the row reaches so far. [count] each."""
    return place_slots(torch.arange(count, dtype=torch.int64, device=indptr.device), indptr, lens)


def place_slots(
    slots: torch.Tensor, indptr: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of given slots, [count] i64."""
    last = len(indptr) - 2
    found = torch.searchsorted(indptr[1:], slots, right=True)
    row = found.clamp(max=last)
    index = slots - indptr[row]
    return row, index, (found <= last) & (index >= 0) & (index < lens[row])


def gather_pages(
    cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim], any strides
    indices: torch.Tensor,  # [num_indices] i32; behind the last row's pages anything may stand
    indptr: torch.Tensor,  # [batch_size + 1] i64, in pages
    lens: torch.Tensor | None = None,  # [batch_size] i64, keys: pages behind them are not read; None: all are
) -> torch.Tensor:
    """The pages of all rows one after the other: [num_indices * page_size, num_kv_heads, head_dim] f32.

    Raises:
        IndexError: a page that a row owns is not in the pool.
    """
    slots = torch.arange(len(indices), dtype=torch.int64, device=indices.device)
    owned = (slots >= indptr[0]) & (slots < indptr[-1])
    if lens is not None:
        owned &= place_slots(slots, indptr, -(-lens // cache.shape[1]))[2]
    return select_pages(cache, indices.long().masked_fill(~owned, 0))


def select_pages(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Pages one after the other: [len(pages) * page_size, num_kv_heads, head_dim] f32."""
    if cache.itemsize == 1:  # fp8 is moved as bytes, and read as the value that it is
        return cache.view(torch.uint8).index_select(0, pages).view(cache.dtype).float().flatten(0, 1)
    return cache.index_select(0, pages).float().flatten(0, 1)

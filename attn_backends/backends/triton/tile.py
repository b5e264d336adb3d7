"""What decode and prefill kernels share: a tile of queries that attends to a run of keys.

The online softmax is that of FlashAttention (Dao et al., 2022), in powers of two. Rows of a tile are pairs of a query
token and a query head of one KV head, so that every key is read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.triton_split import LOG2_E


@triton.jit  # type: ignore[untyped-decorator]
def attend_keys(  # type: ignore[no-untyped-def]
    queries, sums, top, total, start, stop, num_keys, positions, slopes, key, value, pages, scale,
    key_page, key_slot, value_page, value_slot,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to keys `start` to `stop`, in blocks of KEYS from a multiple of it on.

    Args:
        queries: [ROWS, D] of the layer's dtype.
        sums, top, total: what was attended before: weighted values [ROWS, DV] f32, the highest logit and the sum of
            weights [ROWS] f32, logits in base 2.
        num_keys: from there on nothing is a key; blocks reach beyond `stop` only where they reach beyond it.
        positions: [ROWS] i32 of the queries.
        slopes: [ROWS] f32, of ALiBi.
        key, value: the KV head's first element.
        pages: the row's page ids; PAGE_SIZE 0: keys lie one behind the other from `key` on.
        scale: softmax scale; without a soft cap times log2(e).
        MASKED: whether some query may not see some key of these blocks, or a block ends beyond the keys.
        EXACT: float32 products in float32, not tf32.

    Returns:
        sums, top, total.
    """
    lane = tl.arange(0, KEYS)
    dims = tl.arange(0, queries.shape[1])
    dims_vo = tl.arange(0, sums.shape[1])
    for first in tl.range(start, stop, KEYS, num_stages=STAGES):
        keys = first + lane
        live = keys < num_keys
        if PAGE_SIZE == 0:
            key_at = keys.to(tl.int64) * key_slot
            value_at = keys.to(tl.int64) * value_slot
        elif PAGE_SIZE % KEYS == 0:  # a block lies in one page
            page = tl.load(pages + first // PAGE_SIZE).to(tl.int64)
            offset = first % PAGE_SIZE + lane
            key_at = page * key_page + offset * key_slot
            value_at = page * value_page + offset * value_slot
        else:
            page = tl.load(pages + keys // PAGE_SIZE, mask=live if MASKED else None).to(tl.int64)
            offset = keys % PAGE_SIZE
            key_at = page * key_page + offset * key_slot
            value_at = page * value_page + offset * value_slot
        k = _load(key + key_at[:, None] + dims[None], live[:, None], dims[None] < DIM, MASKED, queries.shape[1] == DIM)
        k = k.to(queries.dtype)
        if EXACT:
            logits = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        else:
            logits = tl.dot(queries, tl.trans(k)) * scale
        if SOFT_CAP > 0:  # cap * tanh(logit / cap), where tanh(x) = 1 - 2 / (exp(2x) + 1)
            e = tl.exp2(logits * (2 * LOG2_E / SOFT_CAP))
            logits = (SOFT_CAP * LOG2_E) * (1 - 2 / (e + 1))
        if ALIBI:
            logits += slopes[:, None] * LOG2_E * (keys[None] - positions[:, None]).to(tl.float32)
        if MASKED:
            seen = live[None]
            if CAUSAL:
                seen = seen & (keys[None] <= positions[:, None])
            if WINDOW >= 0:
                seen = seen & (keys[None] >= positions[:, None] - WINDOW)
            if CHUNK > 0:
                seen = seen & (keys[None] // CHUNK == positions[:, None] // CHUNK)
            logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = new_top
        if MASKED:  # a row that has seen nothing yet
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - base[:, None])
        shrunk = tl.exp2(top - base)
        total = total * shrunk + tl.sum(weights, 1)
        sums = sums * shrunk[:, None]
        v = _load(value + value_at[:, None] + dims_vo[None], live[:, None], dims_vo[None] < DIM_VO, MASKED,
                  sums.shape[1] == DIM_VO).to(queries.dtype)  # fmt: skip
        if EXACT:
            sums = tl.dot(weights.to(v.dtype), v, sums, input_precision="ieee")
        else:
            sums = tl.dot(weights.to(v.dtype), v, sums)
        top = new_top
    return sums, top, total


@triton.jit  # type: ignore[untyped-decorator]
def _load(at, live, within, MASKED: tl.constexpr, FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros where nothing is to be read; without a mask where all is, as masks make loads narrow."""
    if MASKED:
        loaded = tl.load(at, mask=live & within, other=0.0) if not FULL else tl.load(at, mask=live, other=0.0)
    else:
        loaded = tl.load(at, mask=within, other=0.0) if not FULL else tl.load(at)
    return loaded

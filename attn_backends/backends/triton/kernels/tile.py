"""What decode and prefill kernels share: a tile of queries that attends to a run of keys, and how its sums end.

The online softmax is that of FlashAttention (Dao et al., 2022), in powers of two. Rows of a tile are pairs of a query
token and a query head of one KV head, so that every key is read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.fp8 import add_values, columns_of
from attn_backends.kernels.split_kv import LN_2, LOG2_E, first_key, load_block


@triton.jit  # type: ignore[untyped-decorator]
def attend_keys(  # type: ignore[no-untyped-def]
    queries, stretch, sums, top, total, start, stop, num_keys, positions, slopes, key, value, pages, blocks, scale,
    soft_cap, ahead, behind, chunk, key_page, key_slot, value_page, value_slot,
    MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, EARLY: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to keys `start` to `stop`, in blocks of KEYS from a multiple of it on.

    Args:
        queries: [ROWS, D] of the layer's dtype, or shares of `stretch`.
        stretch: [ROWS] f32 (see `triton_fp8`), or None.
        sums, top, total: what was attended before: weighted values as `no_sums` has them, the highest logit and the sum
            of weights [ROWS] f32.
        num_keys: from there on nothing is a key; blocks reach beyond `stop` only where they reach beyond it.
        positions: [ROWS] i32 of the queries.
        slopes: [ROWS] f32, of ALiBi.
        key, value: the KV head's first element; the latter as pairs where `sums` are two.
        pages: the row's page ids; PAGE_SIZE 0: keys lie one behind the other from `key` on.
        blocks: descriptors of keys and of values for blocks of KEYS (see `launch.row_blocks`), the row of the first key
            in pages or of all, and the first column of both; else None, as where MASKED: what lies behind the last key
            may be NaN, which a mask keeps out and a descriptor does not.
        scale: what makes logits of products; in base 2, unless a soft cap comes between.
        ahead, behind: how many positions after and before its own a query sees.
        chunk: positions of a chunk; a query sees its own alone.
        MASKED: whether some query may not see some key of these blocks, or they reach beyond the keys.
        EARLY: whether logits are scaled before they are compared: where something comes between, or `scale` is not
            positive. It saves a multiplication a key not to.
        EXACT: float32 products as three of tf32, which is float32's precision but for a bit or two, and not as one.
            Products of float32 itself hold whole rows and columns in a thread's registers, far more than it has.

    Returns:
        sums, top, total; `top` times `factor(scale, EARLY)` is a logit in base 2.
    """
    lane = tl.arange(0, KEYS)
    dims = tl.arange(0, queries.shape[1])
    dims_vo = tl.arange(0, sums[0].shape[1])
    PRECISION: tl.constexpr = "tf32x3" if EXACT else None
    after = factor(scale, EARLY)
    # Where a block's keys lie within their pages is the same for every block: only the pages move.
    inside = lane * 0
    if PAGE_SIZE == 0 or PAGE_SIZE % KEYS == 0:
        inside = lane
    elif KEYS % PAGE_SIZE == 0:
        inside = lane % PAGE_SIZE
    key_rows = key + inside[:, None] * key_slot + dims[None]
    value_rows = value + inside[:, None] * value_slot + dims_vo[None]
    if MASKED:  # of the keys that each query sees
        low = first_key(positions, behind, chunk)
        chunk_end = tl.maximum(positions, 0) // chunk * chunk + (chunk - 1)
        high = tl.minimum(tl.minimum(positions + ahead, chunk_end), num_keys - 1)
    for first in tl.range(start, stop, KEYS, num_stages=STAGES):
        keys = first + lane
        live = keys < num_keys
        key_move, value_move = 0, 0
        if blocks is not None:
            at_row = blocks[2] + first
            if PAGE_SIZE != 0:
                at_row += tl.load(pages + first // PAGE_SIZE) * (key_page // key_slot) - first // PAGE_SIZE * PAGE_SIZE
        elif PAGE_SIZE == 0:
            key_move = tl.cast(first, tl.int64) * key_slot
            value_move = tl.cast(first, tl.int64) * value_slot
        elif PAGE_SIZE % KEYS == 0:  # a block lies in one page
            page = tl.load(pages + first // PAGE_SIZE).to(tl.int64)
            key_move = page * key_page + first % PAGE_SIZE * key_slot
            value_move = page * value_page + first % PAGE_SIZE * value_slot
        else:
            at = pages + first // PAGE_SIZE + lane // PAGE_SIZE if KEYS % PAGE_SIZE == 0 else pages + keys // PAGE_SIZE
            page = (tl.load(at, mask=live, other=0) if MASKED else tl.load(at)).to(tl.int64)
            key_move, value_move = page[:, None] * key_page, page[:, None] * value_page
            if KEYS % PAGE_SIZE != 0:
                key_move += (keys % PAGE_SIZE)[:, None] * key_slot
                value_move += (keys % PAGE_SIZE)[:, None] * value_slot
        if blocks is not None:
            k = blocks[0].load([at_row, blocks[3]])
        else:
            k = load_block(key_rows + key_move, live[:, None], dims[None] < DIM, MASKED, queries.shape[1] == DIM)
        k = k.to(queries.dtype)
        logits = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        if stretch is not None:
            logits *= stretch[:, None]
        if SOFT_CAP:  # cap * tanh(logit / cap), where tanh(x) = 1 - 2 / (exp(2x) + 1)
            e = tl.exp2(logits * (scale * 2 * LOG2_E / soft_cap))
            logits = (soft_cap * LOG2_E) * (1 - 2 / (e + 1))
        elif EARLY:
            logits *= scale
        if ALIBI:
            logits += slopes[:, None] * LOG2_E * (keys[None] - positions[:, None]).to(tl.float32)
        if MASKED:
            logits = tl.where((keys[None] >= low[:, None]) & (keys[None] <= high[:, None]), logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = new_top * after
        if MASKED:  # a row that has seen nothing yet
            base = tl.where(new_top == float("-inf"), 0.0, base)
        weights = tl.exp2(logits * after - base[:, None])
        shrunk = tl.exp2(top * after - base)
        total = total * shrunk + tl.sum(weights, 1)
        if blocks is not None:
            v = blocks[1].load([at_row, blocks[4]])
        else:
            width: tl.constexpr = DIM_VO // len(sums)
            v = load_block(
                value_rows + value_move, live[:, None], dims_vo[None] < width, MASKED, sums[0].shape[1] == width
            )
        v = columns_of(v, key.dtype.element_ty, queries.dtype, len(sums) == 2)
        sums = add_values(sums, weights.to(queries.dtype), shrunk, v, PRECISION)
        top = new_top
    return sums, top, total


@triton.jit  # type: ignore[untyped-decorator]
def factor(scale, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What makes logits in base 2 of those that `attend_keys` compares."""
    if EARLY:
        return scale * 0 + 1
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def write_rows(  # type: ignore[no-untyped-def]
    output, lse, sinks, sums, top, total, lane, head, first_token, query_len, value_scale,
    out_token, out_head, lse_token, has_sinks, want_lse,
    GROUP: tl.constexpr, DIM_VO: tl.constexpr,
):  # fmt: skip
    """Outputs and natural LSEs of a KV head's queries; zeros and -inf for one that saw no key.

    Args:
        sums, top, total: as `attend_keys` returns them, `top` in base 2.
        lane: [ROWS], token times GROUP plus query head, from the row's first token on; tokens end at `query_len`.
        sinks: [num_qo_heads] logits. One takes its share of the softmax and gives nothing.
    """
    token = lane // GROUP
    q_head = head * GROUP + lane % GROUP
    live = token < query_len
    at = (first_token + token).to(tl.int64)
    dims = tl.arange(0, sums.shape[1])
    saw = total > 0
    # Compared as a block: of one number, Triton 3.9's interpreter makes a mask that is none.
    sink = tl.load(sinks + q_head, mask=live & (q_head * 0 + has_sinks != 0), other=float("-inf")) * LOG2_E
    higher = tl.maximum(top, sink)
    shrunk = tl.exp2(top - higher)
    sums *= shrunk[:, None]
    total = total * shrunk + tl.exp2(sink - higher)
    out = tl.where(saw[:, None], sums * (value_scale / tl.where(saw, total, 1.0))[:, None], 0.0)
    to = output + at[:, None] * out_token + q_head[:, None] * out_head + dims[None]
    tl.store(to, out.to(output.dtype.element_ty), mask=live[:, None] & (dims[None] < DIM_VO))
    if want_lse != 0:
        log_sum = (higher + tl.log2(tl.where(saw, total, 1.0))) * LN_2
        tl.store(lse + at * lse_token + q_head, tl.where(saw, log_sum, float("-inf")), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(program, num_tiles, section, KV_HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A prefill program's KV head and tile. The last tiles, which see the most keys where attention is causal, come
    first. Heads come in sections, whose keys and values fit the L2: within one, tiles are the outer order."""
    first_head = program // (num_tiles * section) * section
    heads = tl.minimum(section, KV_HEADS - first_head)
    program -= first_head * num_tiles
    return first_head + program % heads, num_tiles - 1 - program // heads


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(tile, query_start_loc, first_row, num_rows, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whose tile it is: the row, its first query token, their number, and which of them is the tile's first; it may lie
    behind the last.

    The ith row's tiles are those from (its first token + i * (TOKENS - 1)) // TOKENS on, counted from `first_row`: as
    many as it needs, or one more.
    """
    before = tl.load(query_start_loc + first_row)
    low, high = 0, num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(query_start_loc + first_row + middle) - before + middle * (TOKENS - 1)) // TOKENS
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle - 1)
    row = first_row + low
    first_token = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - first_token
    return row, first_token, query_len, (tile - (first_token - before + low * (TOKENS - 1)) // TOKENS) * TOKENS

"""Paged attention of rows with few query tokens: keys split over the GPU as evenly as their lengths ask for it.

The device itself cuts the work into items (see `triton_split`), and the last of a row's items to end joins them all:
there is no second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.backends.triton.tile import attend_keys
from attn_backends.triton_split import finish, join


@triton.jit(do_not_specialize=["table_row"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, output, lse, page_table, seq_lens, query_start_loc, items, partial, partial_sums,
    counters, slopes, sinks, scale, value_scale, table_row,
    query_token, query_head, key_page, key_slot, key_head, value_page, value_slot, value_head, out_token, out_head,
    lse_token,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, WANT_LSE: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program an item, KV head and tile of ROWS of its queries; items of a row's heads lie side by side."""
    program = tl.program_id(0)
    tile = program % TILES
    head = program // TILES % KV_HEADS
    item = items + program // TILES // KV_HEADS * 8
    row = tl.load(item)
    if row >= 0:
        start, stop, count = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        place, nth = tl.load(item + 4), tl.load(item + 5)
        seq_len = tl.load(seq_lens + row)
        first_token = tl.load(query_start_loc + row)
        query_len = tl.load(query_start_loc + row + 1) - first_token

        lane = tile * ROWS + tl.arange(0, ROWS)
        token = lane // GROUP
        q_head = head * GROUP + lane % GROUP
        live = token < query_len
        positions = seq_len - query_len + token
        at = (first_token + token).to(tl.int64)
        dims = tl.arange(0, BLOCK_DIM)
        queries = tl.load(query + at[:, None] * query_token + q_head[:, None] * query_head + dims[None],
                          mask=live[:, None] & (dims[None] < DIM), other=0.0)  # fmt: skip
        slope = tl.load(slopes + q_head, mask=live, other=0.0) if ALIBI else tl.zeros([ROWS], tl.float32)

        sums = tl.zeros([ROWS, BLOCK_DIM_VO], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        key = key_cache + head.to(tl.int64) * key_head
        value = value_cache + head.to(tl.int64) * value_head
        pages = page_table + row.to(tl.int64) * table_row
        # Blocks that all queries see whole need no mask.
        whole = stop // KEYS * KEYS
        if CAUSAL:
            whole = tl.minimum(whole, (seq_len - query_len + 1) // KEYS * KEYS)
        whole = tl.maximum(whole, start)
        if WINDOW >= 0 or CHUNK > 0:
            whole = start
        else:
            sums, top, total = attend_keys(
                queries, sums, top, total, start, whole, seq_len, positions, slope, key, value, pages, scale,
                key_page, key_slot, value_page, value_slot,
                False, CAUSAL, WINDOW, CHUNK, SOFT_CAP, ALIBI, PAGE_SIZE, KEYS, DIM, DIM_VO, STAGES, EXACT,
            )  # fmt: skip
        sums, top, total = attend_keys(
            queries, sums, top, total, whole, stop, seq_len, positions, slope, key, value, pages, scale,
            key_page, key_slot, value_page, value_slot,
            True, CAUSAL, WINDOW, CHUNK, SOFT_CAP, ALIBI, PAGE_SIZE, KEYS, DIM, DIM_VO,
            STAGES if WINDOW >= 0 or CHUNK > 0 else 1, EXACT,
        )  # fmt: skip

        is_last = count == 1
        if count > 1:
            # [places, KV_HEADS, TILES * ROWS, ...]
            mine = ((place + nth) * KV_HEADS + head) * (TILES * ROWS) + lane
            dims_vo = tl.arange(0, BLOCK_DIM_VO)
            tl.store(partial + mine[:, None].to(tl.int64) * BLOCK_DIM_VO + dims_vo[None], sums, mask=live[:, None])
            tl.store(partial_sums + mine * 2, top, mask=live)
            tl.store(partial_sums + mine * 2 + 1, total, mask=live)
            tl.debug_barrier()  # all of the program's stores come before its count
            counter = counters + (row * KV_HEADS + head) * TILES + tile
            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
            if is_last:
                tl.debug_barrier()
                tl.store(counter, 0)  # for the next launch
                sums, top, total = join(partial, partial_sums, place, count, head, lane, live, dims_vo,
                                        KV_HEADS, TILES * ROWS, BLOCK_DIM_VO, ROWS)  # fmt: skip
        if is_last:
            sink = tl.load(sinks + q_head, mask=live, other=0.0).to(tl.float32) if SINKS else top
            out, log_sum = finish(sums, top, total, sink, value_scale, SINKS)
            dims_vo = tl.arange(0, BLOCK_DIM_VO)
            to = output + at[:, None] * out_token + q_head[:, None] * out_head + dims_vo[None]
            tl.store(to, out.to(output.dtype.element_ty), mask=live[:, None] & (dims_vo[None] < DIM_VO))
            if WANT_LSE:
                tl.store(lse + at * lse_token + q_head, log_sum, mask=live)

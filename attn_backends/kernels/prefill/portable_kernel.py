"""Paged attention of rows of any number of query tokens: prompts, chunks of them, and whatever comes between."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.fp8 import interleave_columns, row_amax, scale_to_fp16, zero_acc
from attn_backends.kernels.pdl import grid_wait
from attn_backends.kernels.split_kv import first_key, seen_by_all, store_partial
from attn_backends.kernels.tile_kernels import (
    attend_keys,
    logit_scale,
    once_loaded,
    rows_of,
    scale_logits,
    tile_of,
    write_rows,
)

_NOT_CONSTANT = ["first_row", "num_rows", "num_tiles", "section", "table_row", "table_width", "window_right",
                 "window_left", "chunk", "has_sinks", "want_lse", "lse_token"]  # fmt: skip
# No code depends on whether these are aligned.
_ANYWHERE = ["lse", "page_table", "seq_lens", "query_start_loc", "key_start_loc", "sinks", "work_items", "partial_acc",
             "partial_ml"]  # fmt: skip


@triton.jit(
    do_not_specialize=_NOT_CONSTANT,
    do_not_specialize_on_alignment=_ANYWHERE,
)  # type: ignore[untyped-decorator]
def prefill_kernel(  # type: ignore[no-untyped-def]
    key_desc,  # descriptor of key_cache for blocks of [BLOCK_N, DIM], see `row_layout.kv_descriptors`; or None
    value_desc,  # descriptor of value_cache for blocks of [BLOCK_N, DIM_VO]; or None
    query,  # [num_tokens, KV_HEADS * GROUP, DIM]
    key_cache,  # [num_pages, PAGE_SIZE, KV_HEADS, DIM], or [num_keys, KV_HEADS, DIM] if PAGE_SIZE is 0
    value_cache,  # [num_pages, PAGE_SIZE, KV_HEADS, DIM_VO], or [num_keys, KV_HEADS, DIM_VO]
    output,  # [num_tokens, KV_HEADS * GROUP, DIM_VO]
    lse,  # [num_tokens, KV_HEADS * GROUP] f32, natural log, if want_lse
    page_table,  # [rows, max_pages] i32, if PAGE_SIZE
    seq_lens,  # [rows] i32
    query_start_loc,  # [rows + 1] i32
    key_start_loc,  # [rows] i32, if PAGE_SIZE is 0
    slopes,  # [KV_HEADS * GROUP] f32, if ALIBI
    sinks,  # [KV_HEADS * GROUP] f32 logits, if has_sinks
    work_items,  # [programs / KV_HEADS, 8] i32, if SPLIT, see `list_kernel.list_kernel`
    partial_acc,  # [partial slots, KV_HEADS, BLOCK_M, BLOCK_DIM_VO] f32, if SPLIT
    partial_ml,  # [partial slots, KV_HEADS, BLOCK_M, 2] f32, if SPLIT: m_i in base 2, l_i
    first_row,  # rows before it are left alone
    num_rows,  # rows from there on
    num_tiles,  # of all these rows, for one KV head
    section,  # KV heads whose keys and values fit the L2 cache
    table_row,  # elements from row to row of the page table
    table_width,  # page ids that a row of it has room for
    scale,  # f32, of logits, in base 2 unless SOFT_CAP
    value_scale,  # f32, of cached values
    soft_cap,  # f32, if SOFT_CAP
    window_right,  # positions after its own that a query sees
    window_left,  # positions before its own that a query sees
    chunk,  # positions in a chunk; a query sees its own chunk alone
    has_sinks,  # 0 or 1
    want_lse,  # 0 or 1
    query_token,  # elements from token to token, as all strides
    query_head,
    key_page,
    key_slot,
    key_head,
    value_page,
    value_slot,
    value_head,
    out_token,
    out_head,
    lse_token,
    SOFT_CAP: tl.constexpr,  # 0 or 1: logits are capped
    ALIBI: tl.constexpr,  # 0 or 1
    SCALE_FIRST: tl.constexpr,  # 0 or 1, see `attend_keys`
    ALIKE: tl.constexpr,  # 0 or 1: keys and values have the same strides
    PAGE_SIZE: tl.constexpr,  # slots; 0: keys lie as they came
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_M: tl.constexpr,  # queries of a tile
    BLOCK_N: tl.constexpr,  # keys of a block
    DIM: tl.constexpr,
    DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # DIM, padded
    BLOCK_DIM_VO: tl.constexpr,  # DIM_VO, padded
    STAGES: tl.constexpr,  # blocks under way in the loop without masks
    LOCAL: tl.constexpr,  # 0 or 1: there is a window, or chunks
    EXACT: tl.constexpr,  # 0 or 1, see `attend_keys`
    SPLIT: tl.constexpr,  # 0 or 1: tiles are listed, and keys of some are split
    ONE_BLOCK: tl.constexpr,  # 0 or 1: a block holds all keys of a tile, without ALIBI and SPLIT
    USE_PDL: tl.constexpr,  # 0 or 1: it starts before the kernel in front of it has ended, and waits for it
):
    """One program attends for a tile: BLOCK_M queries of one row and one KV head, which are query tokens times GROUP
    heads; it may begin and end within a token. With SPLIT it does for an item of a list, whose part of the keys gives
    what `join_kernel` joins."""
    if ALIKE:
        value_page, value_slot, value_head = key_page, key_slot, key_head
    if USE_PDL:
        grid_wait()
    if SPLIT:
        head = tl.program_id(0) % KV_HEADS
        at_item = work_items + tl.program_id(0) // KV_HEADS * 8
        row, first_token, first = tl.load(at_item), tl.load(at_item + 1), tl.load(at_item + 3)
        query_len = tl.where(row >= 0, tl.load(at_item + 2), 0)  # or there is nothing to do
        num_splits, split, first_slot = tl.load(at_item + 5), tl.load(at_item + 6), tl.load(at_item + 7)
    else:
        head, tile = tile_of(tl.program_id(0), num_tiles, section, KV_HEADS)
        row, first_token, query_len, first = rows_of(tile, query_start_loc, first_row, num_rows, GROUP, BLOCK_M)
    if ONE_BLOCK:
        if first < query_len * GROUP:
            _attend_block(
                query, key_cache + head.to(tl.int64) * key_head, value_cache + head.to(tl.int64) * value_head, output,
                lse, page_table, seq_lens, key_start_loc, sinks, row, first_token, query_len, first, head, table_row,
                table_width, scale, value_scale, soft_cap, window_right, window_left, chunk, has_sinks, want_lse,
                query_token, query_head, key_page, key_slot, value_page, value_slot, out_token, out_head, lse_token,
                SOFT_CAP, SCALE_FIRST, ALIKE, PAGE_SIZE, GROUP, BLOCK_M, BLOCK_N, DIM, DIM_VO, BLOCK_DIM, BLOCK_DIM_VO,
                LOCAL, USE_PDL,
            )  # fmt: skip
    elif first < query_len * GROUP:
        seq_len = tl.load(at_item + 4) if SPLIT else tl.load(seq_lens + row)  # a list has tokens behind all rows too
        lane = first + tl.arange(0, BLOCK_M)
        token = lane // GROUP
        q_head = head * GROUP + lane % GROUP
        live = token < query_len
        positions = seq_len - query_len + token
        at = (first_token + token).to(tl.int64)
        dims = tl.arange(0, BLOCK_DIM)
        queries = tl.load(query + at[:, None] * query_token + q_head[:, None] * query_head + dims[None],
                          mask=live[:, None] & (dims[None] < DIM), other=0.0)  # fmt: skip
        q_scale = None
        if key_cache.dtype.element_ty.primitive_bitwidth == 8 and query.dtype.element_ty == tl.bfloat16:
            q_scale = row_amax(queries)
            queries = scale_to_fp16(queries, q_scale)
        slope = tl.load(slopes + q_head, mask=live, other=0.0) if ALIBI else tl.zeros([BLOCK_M], tl.float32)

        key = key_cache + head.to(tl.int64) * key_head
        value = value_cache + head.to(tl.int64) * value_head
        pages = page_table
        kv_tma = None
        if key_desc is not None:
            first_row_of = head * (key_head // key_slot)
            if PAGE_SIZE == 0:
                first_row_of += tl.load(key_start_loc + row)
            kv_tma = (
                key_desc,
                value_desc,
                first_row_of,
                head * (key_head % key_slot),
                head * (value_head % value_slot),
            )
        if PAGE_SIZE == 0:
            key_first = tl.load(key_start_loc + row).to(tl.int64)
            key += key_first * key_slot
            value += key_first * value_slot
        else:
            pages += row.to(tl.int64) * table_row
        context = seq_len - query_len
        oldest, newest = context + first // GROUP, context + (first + (BLOCK_M - 1)) // GROUP  # positions
        start = first_key(oldest, window_left, chunk) // BLOCK_N * BLOCK_N
        stop = tl.minimum(seq_len, newest + 1 + window_right)
        # Blocks that all queries see whole need no mask.
        seen = tl.minimum(seq_len, oldest + 1 + window_right)
        begin = start
        if SPLIT:  # this one's blocks of all
            num_blocks = tl.maximum(stop - start + BLOCK_N - 1, 0) // BLOCK_N
            begin += num_blocks * split // num_splits * BLOCK_N
            end = start + num_blocks * (split + 1) // num_splits * BLOCK_N
            stop = tl.minimum(stop, end)
        acc = zero_acc(BLOCK_M, BLOCK_DIM_VO, False)
        m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        if LOCAL:
            newest = tl.minimum(newest, seq_len - 1)
            seen_from, seen = seen_by_all(oldest, newest, seq_len, window_right, window_left, chunk)
            first_seen = first_key(oldest, window_left, chunk)
            local = begin
            start = (seen_from + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            local_end = start
            if SPLIT:
                local_end = tl.minimum(start, end)
            acc, m_i, l_i = attend_keys(
                queries, q_scale, acc, m_i, l_i, local, local_end, seq_len, first_seen, positions, slope, key, value,
                pages, None, scale, soft_cap, window_right, window_left, chunk, key_page, key_slot, value_page,
                value_slot, True, SOFT_CAP, ALIBI, SCALE_FIRST, PAGE_SIZE, BLOCK_N, DIM, DIM_VO, 1, EXACT,
            )  # fmt: skip
        whole = tl.maximum(seen // BLOCK_N * BLOCK_N, start)
        if SPLIT:
            start = tl.maximum(start, begin)
            whole = tl.maximum(tl.minimum(whole, end), start)
        acc, m_i, l_i = attend_keys(
            queries, q_scale, acc, m_i, l_i, start, whole, seq_len, None, positions, slope, key, value, pages, kv_tma,
            scale, soft_cap, window_right, window_left, chunk, key_page, key_slot, value_page, value_slot,
            False, SOFT_CAP, ALIBI, SCALE_FIRST, PAGE_SIZE, BLOCK_N, DIM, DIM_VO, STAGES, EXACT,
        )  # fmt: skip
        # The first block's values come with its keys: there may be no other.
        MASKED_STAGES: tl.constexpr = 2 if STAGES > 2 else STAGES
        acc, m_i, l_i = attend_keys(
            queries, q_scale, acc, m_i, l_i, whole, stop, seq_len, None, positions, slope, key, value, pages, None,
            scale, soft_cap, window_right, window_left, chunk, key_page, key_slot, value_page, value_slot,
            True, SOFT_CAP, ALIBI, SCALE_FIRST, PAGE_SIZE, BLOCK_N, DIM, DIM_VO, MASKED_STAGES, EXACT,
        )  # fmt: skip
        m_i *= logit_scale(scale, SCALE_FIRST)
        acc = interleave_columns(acc)
        if SPLIT:  # noqa: SIM102 (a constant on its own leaves out what is not there)
            if num_splits > 1:
                slot = (first_slot + split) * KV_HEADS + head
                used = tl.minimum(query_len * GROUP - first, BLOCK_M)
                store_partial(partial_acc, partial_ml, slot, acc, m_i, l_i, used, BLOCK_M)
                query_len *= 0  # nothing is written below
        write_rows(output, lse, sinks, acc, m_i, l_i, lane, head, first_token, query_len, value_scale,
                   out_token, out_head, lse_token, has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _attend_block(  # type: ignore[no-untyped-def]
    query, key, value, output, lse, page_table, seq_lens, key_start_loc, sinks, row, first_token, query_len, first,
    head, table_row, table_width, scale, value_scale, soft_cap, window_right, window_left, chunk, has_sinks, want_lse,
    query_token, query_head, key_page, key_slot, value_page, value_slot, out_token, out_head, lse_token,
    SOFT_CAP: tl.constexpr, SCALE_FIRST: tl.constexpr, ALIKE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, LOCAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Attend for a tile of a row that sees no more than BLOCK_N keys, and write what `prefill_kernel` does, which has
    these arguments; `key` and `value` point to the KV head's first element."""
    seq_len = tl.load(seq_lens + row)
    context = seq_len - query_len
    oldest, newest = context + first // GROUP, context + (first + (BLOCK_M - 1)) // GROUP  # positions
    start = first_key(oldest, window_left, chunk) if LOCAL else 0
    stop = tl.minimum(seq_len, newest + 1 + window_right)
    keys = start + tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        page, slot = tl.load(key_start_loc + row).to(tl.int64) + keys, 0
        key_page, value_page = key_slot, value_slot
    else:  # ids come with the row's length where that does not say which: some may be behind its last page
        at = keys.to(tl.uint32)  # which is divided by fewer instructions
        nth, slot = (at // PAGE_SIZE).to(tl.int32), (at % PAGE_SIZE).to(tl.int32)
        in_table = page_table + row.to(tl.int64) * table_row + nth
        page = tl.load(in_table, mask=nth < table_width, other=0).to(tl.int64)
    lane = first + tl.arange(0, BLOCK_M)
    acc, m_i = tl.zeros([BLOCK_M, BLOCK_DIM_VO], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if start < stop:
        there = (keys < stop)[:, None]
        dims, dims_vo = tl.arange(0, BLOCK_DIM)[None], tl.arange(0, BLOCK_DIM_VO)[None]
        k_rows = (page * key_page + slot * key_slot)[:, None]
        v_rows = k_rows
        if not ALIKE:
            v_rows = (page * value_page + slot * value_slot)[:, None]
        # All are asked for before queries are waited for: compilers put no load behind the barrier below, nor a
        # volatile one behind what is made of another, as where queries are scaled first.
        IS_SCALED: tl.constexpr = key.dtype.element_ty.primitive_bitwidth == 8 and query.dtype.element_ty == tl.bfloat16
        k = tl.load(key + k_rows + dims, mask=there & (dims < DIM), other=0.0, volatile=IS_SCALED)
        v = tl.load(value + v_rows + dims_vo, mask=there & (dims_vo < DIM_VO), other=0.0, volatile=IS_SCALED)
        token = lane // GROUP
        q_at = query + (first_token + token).to(tl.int64)[:, None] * query_token
        q_at += (head * GROUP + lane % GROUP)[:, None] * query_head + dims
        queries = tl.load(q_at, mask=(token < query_len)[:, None] & (dims < DIM), other=0.0, volatile=IS_SCALED)
        if USE_PDL:
            tl.debug_barrier()
        queries, k, v = once_loaded(queries, USE_PDL), once_loaded(k, USE_PDL), once_loaded(v, USE_PDL)
        if IS_SCALED:
            q_scale = row_amax(queries)
            queries = scale_to_fp16(queries, q_scale)
        logits = tl.dot(queries, tl.trans(k.to(queries.dtype)))
        if IS_SCALED:
            logits *= q_scale[:, None]
        logits = scale_logits(logits, scale, soft_cap, SOFT_CAP, SCALE_FIRST)
        positions = context + token
        high = tl.minimum(positions + window_right, stop - 1)
        if LOCAL:
            high = tl.minimum(high, tl.maximum(positions, 0) // chunk * chunk + (chunk - 1))
            low = first_key(positions, window_left, chunk)
            logits = tl.where(keys[None] >= low[:, None], logits, float("-inf"))
        logits = tl.where(keys[None] <= high[:, None], logits, float("-inf"))
        logits *= logit_scale(scale, SCALE_FIRST)
        m_i = tl.max(logits, 1)
        p = tl.exp2(logits - tl.where(m_i == float("-inf"), 0.0, m_i)[:, None])
        l_i = tl.sum(p, 1)
        acc = tl.dot(p.to(queries.dtype), v.to(queries.dtype))
    write_rows(output, lse, sinks, acc, m_i, l_i, lane, head, first_token, query_len, value_scale, out_token, out_head,
               lse_token, has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip

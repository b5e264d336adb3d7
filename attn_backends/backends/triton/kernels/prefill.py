"""Paged attention of rows of any number of query tokens: prompts, chunks of them, and whatever comes between."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.backends.triton.kernels.tile import attend_keys, factor, rows_of, tile_of, write_rows
from attn_backends.kernels.fp8 import all_columns, largest_of, no_sums, shares_of
from attn_backends.kernels.split_kv import first_key, seen_by_all

_NOT_CONSTANT = ["first_row", "num_rows", "num_tiles", "section", "table_row", "ahead", "behind", "chunk", "has_sinks",
                 "want_lse", "lse_token"]  # fmt: skip
# No code depends on whether these are aligned.
_ANYWHERE = ["lse", "page_table", "seq_lens", "query_start_loc", "key_start_loc", "sinks"]


@triton.jit(do_not_specialize=_NOT_CONSTANT, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def prefill_kernel(  # type: ignore[no-untyped-def]
    key_blocks, value_blocks, query, key_cache, value_cache, output, lse, page_table, seq_lens, query_start_loc,
    key_start_loc, slopes, sinks, first_row, num_rows, num_tiles, section, table_row,
    scale, value_scale, soft_cap, ahead, behind, chunk, has_sinks, want_lse,
    query_token, query_head, key_page, key_slot, key_head, value_page, value_slot, value_head, out_token, out_head,
    lse_token,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, EARLY: tl.constexpr, ALIKE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, STAGES: tl.constexpr, LOCAL: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One program a tile of TOKENS query tokens of one row, times the GROUP heads of one KV head. ALIKE: keys and
    values have the same strides. LOCAL: there is a window, or chunks."""
    if ALIKE:
        value_page, value_slot, value_head = key_page, key_slot, key_head
    head, tile = tile_of(tl.program_id(0), num_tiles, section, KV_HEADS)
    row, first_token, query_len, first = rows_of(tile, query_start_loc, first_row, num_rows, TOKENS)
    if first < query_len:
        seq_len = tl.load(seq_lens + row)
        lane = tl.arange(0, ROWS)
        token = first + lane // GROUP
        q_head = head * GROUP + lane % GROUP
        live = (token < query_len) & (lane < TOKENS * GROUP)
        positions = seq_len - query_len + token
        at = (first_token + token).to(tl.int64)
        dims = tl.arange(0, BLOCK_DIM)
        queries = tl.load(query + at[:, None] * query_token + q_head[:, None] * query_head + dims[None],
                          mask=live[:, None] & (dims[None] < DIM), other=0.0)  # fmt: skip
        stretch = None
        if key_cache.dtype.element_ty.primitive_bitwidth == 8 and query.dtype.element_ty == tl.bfloat16:
            stretch = largest_of(queries)
            queries = shares_of(queries, stretch)
        slope = tl.load(slopes + q_head, mask=live, other=0.0) if ALIBI else tl.zeros([ROWS], tl.float32)

        key = key_cache + head.to(tl.int64) * key_head
        value = value_cache + head.to(tl.int64) * value_head
        pages = page_table
        blocks = None
        if key_blocks is not None:
            first_row_of = head * (key_head // key_slot)
            if PAGE_SIZE == 0:
                first_row_of += tl.load(key_start_loc + row)
            blocks = (
                key_blocks,
                value_blocks,
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
        oldest = seq_len - query_len + first  # position of the tile's first query
        start = first_key(oldest, behind, chunk) // KEYS * KEYS
        stop = tl.minimum(seq_len, oldest + TOKENS + ahead)
        # Blocks that all queries see whole need no mask.
        seen = tl.minimum(seq_len, oldest + 1 + ahead)
        sums = no_sums(ROWS, BLOCK_DIM_VO, False)
        top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        if LOCAL:
            newest = tl.minimum(oldest + TOKENS, seq_len) - 1
            seen_from, seen = seen_by_all(oldest, newest, seq_len, ahead, behind, chunk)
            local = start
            start = (seen_from + KEYS - 1) // KEYS * KEYS
            sums, top, total = attend_keys(
                queries, stretch, sums, top, total, local, start, seq_len, positions, slope, key, value, pages, None,
                scale, soft_cap, ahead, behind, chunk, key_page, key_slot, value_page, value_slot,
                True, SOFT_CAP, ALIBI, EARLY, PAGE_SIZE, KEYS, DIM, DIM_VO, 1, EXACT,
            )  # fmt: skip
        whole = tl.maximum(seen // KEYS * KEYS, start)
        sums, top, total = attend_keys(
            queries, stretch, sums, top, total, start, whole, seq_len, positions, slope, key, value, pages, blocks,
            scale, soft_cap, ahead, behind, chunk, key_page, key_slot, value_page, value_slot,
            False, SOFT_CAP, ALIBI, EARLY, PAGE_SIZE, KEYS, DIM, DIM_VO, STAGES, EXACT,
        )  # fmt: skip
        sums, top, total = attend_keys(
            queries, stretch, sums, top, total, whole, stop, seq_len, positions, slope, key, value, pages, None, scale,
            soft_cap, ahead, behind, chunk, key_page, key_slot, value_page, value_slot,
            True, SOFT_CAP, ALIBI, EARLY, PAGE_SIZE, KEYS, DIM, DIM_VO, 1, EXACT,
        )  # fmt: skip
        top *= factor(scale, EARLY)
        write_rows(output, lse, sinks, all_columns(sums), top, total, first * GROUP + lane, head, first_token,
                   tl.minimum(query_len, first + TOKENS), value_scale, out_token, out_head, lse_token,
                   has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip

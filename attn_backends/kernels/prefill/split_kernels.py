"""The kernel that joins the splits of a prefill's tiles, which `list_kernel` lists."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.pdl import grid_wait
from attn_backends.kernels.split_kv import combine_splits
from attn_backends.kernels.tile_kernels import write_rows

FEW_SPLITS = tl.constexpr(8)  # of a tile


@triton.jit(
    do_not_specialize=["spread", "has_sinks", "want_lse", "lse_token"],
    do_not_specialize_on_alignment=["lse", "sinks", "work_items"],
)  # type: ignore[untyped-decorator]
def join_kernel(  # type: ignore[no-untyped-def]
    output,  # [num_tokens, KV_HEADS * GROUP, DIM_VO]
    lse,  # [num_tokens, KV_HEADS * GROUP] f32, natural log, if want_lse
    sinks,  # [KV_HEADS * GROUP] f32 logits, if has_sinks
    work_items,  # [programs / KV_HEADS / spread or more, 8] i32, from the first split on, see `list_kernel`
    partial_acc,  # [partial slots, KV_HEADS, BLOCK_M, BLOCK_DIM_VO] f32
    partial_ml,  # [partial slots, KV_HEADS, BLOCK_M, 2] f32: m_i in base 2, l_i
    spread,  # programs for each split
    value_scale,  # f32, of cached values
    has_sinks,  # 0 or 1
    want_lse,  # 0 or 1
    out_token,  # elements from token to token, as all strides
    out_head,
    lse_token,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_M: tl.constexpr,  # queries of a tile and a slot, a multiple of QUERIES
    DIM_VO: tl.constexpr,
    BLOCK_DIM_VO: tl.constexpr,  # a power of two
    QUERIES: tl.constexpr,  # that are joined at a time, where they have few splits
    BLOCK_SPLITS: tl.constexpr,  # of a query's whole columns that are loaded at a time, a multiple of QUERIES
    COLUMNS: tl.constexpr,  # of a query that are joined at a time, where it has many splits
    PDL: tl.constexpr,  # 0 or 1: the kernel in front lets this one start
):
    """The programs of a tile's splits take its queries in turn, and join all splits of each: several queries at a time
    where those are few, and some columns of one where they are many, so that as much is under way."""
    program = tl.program_id(0)
    head, work_item = program // spread % KV_HEADS, program // spread // KV_HEADS
    at = work_items + work_item * 8
    row, first_token, query_len, first = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    num_splits, split, first_slot = tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    if PDL:  # the list was there before that one was launched
        grid_wait()
    if (row >= 0) & (num_splits > 1):
        used = tl.minimum(query_len * GROUP - first, BLOCK_M)
        slot = first_slot.to(tl.int64) * KV_HEADS + head
        part, num_parts = split * spread + program % spread, num_splits * spread
        if num_splits <= FEW_SPLITS:
            for query in range(part * QUERIES, used, num_parts * QUERIES):
                _join_queries(partial_acc, partial_ml, slot, query, 0, num_splits, output, lse, sinks, head,
                              first_token, query_len, first, used, value_scale, out_token, out_head, lse_token,
                              has_sinks, want_lse, KV_HEADS, GROUP, BLOCK_M, DIM_VO, BLOCK_DIM_VO, QUERIES,
                              BLOCK_SPLITS // QUERIES, BLOCK_DIM_VO)  # fmt: skip
        else:
            PARTS: tl.constexpr = BLOCK_DIM_VO // COLUMNS
            for nth in range(part, used * PARTS, num_parts):
                _join_queries(partial_acc, partial_ml, slot, nth // PARTS, nth % PARTS * COLUMNS, num_splits, output,
                              lse, sinks, head, first_token, query_len, first, used, value_scale, out_token, out_head,
                              lse_token, has_sinks, want_lse, KV_HEADS, GROUP, BLOCK_M, DIM_VO, BLOCK_DIM_VO, 1,
                              BLOCK_SPLITS * PARTS, COLUMNS)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _join_queries(  # type: ignore[no-untyped-def]
    partial_acc,
    partial_ml,
    slot,  # of a tile's first split and the head
    query,  # of the tile
    column,  # of the query
    num_splits,
    output,
    lse,
    sinks,
    head,
    first_token,
    query_len,
    first,  # of the row's queries, which is the tile's first
    used,  # queries of the tile
    value_scale,
    out_token,
    out_head,
    lse_token,
    has_sinks,
    want_lse,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM_VO: tl.constexpr,
    BLOCK_DIM_VO: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Join COLUMNS of QUERIES of a tile's queries, from `column` and `query` on, and write what they give."""
    at = slot * (BLOCK_M // QUERIES) + query // QUERIES  # in blocks of so many queries
    acc, m_i, l_i = combine_splits(
        partial_acc + column, partial_ml, at, KV_HEADS * (BLOCK_M // QUERIES), num_splits, used - query, QUERIES,
        BLOCK_DIM_VO, BLOCK_SPLITS, COLUMNS,
    )  # fmt: skip
    lane = first + query + tl.arange(0, QUERIES)
    write_rows(output + column, lse, sinks, acc, m_i, l_i, lane, head, first_token, query_len, value_scale, out_token,
               out_head, lse_token, has_sinks, want_lse, GROUP, DIM_VO - column)  # fmt: skip

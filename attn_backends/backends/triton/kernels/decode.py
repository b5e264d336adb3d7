"""Paged attention of rows with few query tokens: keys split over the GPU as evenly as their lengths ask for it.

The device itself splits the work into items (see `split_kv`), and the last of a row's items to end combines them all:
there is no second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.fp8 import as_pairs, interleave_columns, row_amax, scale_to_fp16, zero_acc
from attn_backends.kernels.launch import WAIT_FIRST, WAIT_LAST, acquire_fence, grid_wait
from attn_backends.kernels.split_kv import FAR, MAX_SPLITS, combine_splits
from attn_backends.kernels.tile_kernels import attend_keys, logit_scale, write_rows

_NOT_CONSTANT = ["table_row", "window_right", "window_left", "chunk", "has_sinks", "want_lse", "lse_token"]
_ANYWHERE = ["lse", "page_table", "sinks"]  # no code depends on whether these are aligned


@triton.jit(
    do_not_specialize=_NOT_CONSTANT,
    do_not_specialize_on_alignment=_ANYWHERE,
)  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    query,  # [num_tokens, KV_HEADS * GROUP, DIM]
    key_cache,  # [num_pages, PAGE_SIZE, KV_HEADS, DIM], the last dimension contiguous
    value_cache,  # [num_pages, PAGE_SIZE, KV_HEADS, DIM_VO]
    output,  # [num_tokens, KV_HEADS * GROUP, DIM_VO]
    lse,  # [num_tokens, KV_HEADS * GROUP] f32, natural log, written if want_lse
    page_table,  # [num_rows, max_pages] i32
    work_items,  # [max_work_items, 8] i32, see `schedule_kernel`
    partial_acc,  # [partial slots, KV_HEADS, TILES, USED_M, BLOCK_DIM_VO] f32
    partial_ml,  # [partial slots, KV_HEADS, TILES, USED_M, 2] f32: m_i in base 2, l_i
    counters,  # [num_rows, KV_HEADS, TILES] i32, zeros between launches
    slopes,  # [KV_HEADS * GROUP] f32, if ALIBI
    sinks,  # [KV_HEADS * GROUP] f32 logits, if has_sinks
    table_row,  # elements from row to row of the page table
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
    PAIRS: tl.constexpr,  # 0 or 1: values of 8 bits are read two by two
    PAGE_SIZE: tl.constexpr,  # slots
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    TILES: tl.constexpr,  # tiles of a row's queries
    BLOCK_M: tl.constexpr,  # queries of a tile: token times query head
    BLOCK_N: tl.constexpr,  # keys of a block
    DIM: tl.constexpr,
    DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # DIM, padded
    BLOCK_DIM_VO: tl.constexpr,  # DIM_VO, padded
    STAGES: tl.constexpr,  # blocks under way in the loop without masks
    MASKED_STAGES: tl.constexpr,  # blocks under way in the loop with masks
    EXACT: tl.constexpr,  # 0 or 1, see `attend_keys`
    USED_M: tl.constexpr,  # queries of a tile that exist at most, a power of two
    BLOCK_SPLITS: tl.constexpr,  # splits that are combined at a time
    PDL: tl.constexpr,  # when this kernel starts, see `kernels.launch.Pdl`
):
    """One program attends for a work item, a KV head and a tile of BLOCK_M of the row's queries.

    The programs of an item's heads lie side by side.
    """
    if ALIKE:
        value_page, value_slot, value_head = key_page, key_slot, key_head
    if PDL == WAIT_LAST:
        acquire_fence()
    program = tl.program_id(0)
    tile = program % TILES
    head = program // TILES % KV_HEADS
    work_item = work_items + program // TILES // KV_HEADS * 8
    row = tl.load(work_item)
    start, stop = tl.load(work_item + 1), tl.load(work_item + 2)
    first_slot, split_info = tl.load(work_item + 3), tl.load(work_item + 4)
    seq_len, first_token, query_len = tl.load(work_item + 5), tl.load(work_item + 6), tl.load(work_item + 7)
    if PDL == WAIT_FIRST:  # its item was there before that one was launched, or lets this one start
        grid_wait()
    if row >= 0:
        num_splits, split = split_info // MAX_SPLITS, split_info % MAX_SPLITS
        lane = tile * BLOCK_M + tl.arange(0, BLOCK_M)
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
        # Blocks that all queries see whole need no mask.
        whole = tl.minimum(stop, seq_len - query_len + 1 + window_right) // BLOCK_N * BLOCK_N
        if tl.minimum(window_left, chunk) < FAR:
            whole = start
        whole = tl.maximum(whole, start)
        key, value = key_cache + head.to(tl.int64) * key_head, value_cache + head.to(tl.int64) * value_head
        if PAIRS:
            value, value_page, value_slot = as_pairs(value), value_page // 2, value_slot // 2
        pages = page_table + row.to(tl.int64) * table_row
        acc, m_i, l_i = attend_keys(
            queries, q_scale, zero_acc(BLOCK_M, BLOCK_DIM_VO, PAIRS), tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32), start, whole, seq_len, positions, slope, key, value, pages, None, scale,
            soft_cap, window_right, window_left, chunk, key_page, key_slot, value_page, value_slot,
            False, SOFT_CAP, ALIBI, SCALE_FIRST, PAGE_SIZE, BLOCK_N, DIM, DIM_VO, STAGES, EXACT,
        )  # fmt: skip
        acc, m_i, l_i = attend_keys(
            queries, q_scale, acc, m_i, l_i, whole, stop, seq_len, positions, slope, key, value, pages, None, scale,
            soft_cap, window_right, window_left, chunk, key_page, key_slot, value_page, value_slot,
            True, SOFT_CAP, ALIBI, SCALE_FIRST, PAGE_SIZE, BLOCK_N, DIM, DIM_VO, MASKED_STAGES, EXACT,
        )  # fmt: skip
        acc = interleave_columns(acc)
        m_i *= logit_scale(scale, SCALE_FIRST)
        if num_splits == 1:
            write_rows(output, lse, sinks, acc, m_i, l_i, lane, head, first_token, query_len, value_scale,
                       out_token, out_head, lse_token, has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip
        else:
            # Partial results are [partial slots, KV_HEADS, TILES, USED_M, ...]
            inner = tl.arange(0, BLOCK_M)
            slot = (((first_slot + split) * KV_HEADS + head) * TILES + tile).to(tl.int64) * USED_M + inner
            live = live & (inner < USED_M)
            dims_vo = tl.arange(0, BLOCK_DIM_VO)
            tl.store(partial_acc + slot[:, None] * BLOCK_DIM_VO + dims_vo[None], acc, mask=live[:, None])
            tl.store(partial_ml + slot * 2, m_i, mask=live)
            tl.store(partial_ml + slot * 2 + 1, l_i, mask=live)
            tl.debug_barrier()  # all of the program's stores come before its count
            counter = counters + (row * KV_HEADS + head) * TILES + tile
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                tl.debug_barrier()
                tl.store(counter, 0)  # for the next launch
                # The last to end combines all, in the used queries alone: unused ones would take its registers.
                first_row_of_slots = (first_slot * KV_HEADS + head) * TILES + tile
                row_acc, row_m, row_l = combine_splits(
                    partial_acc, partial_ml, first_row_of_slots, KV_HEADS * TILES, num_splits,
                    query_len * GROUP - tile * BLOCK_M, USED_M, BLOCK_DIM_VO, BLOCK_SPLITS,
                )  # fmt: skip
                write_rows(output, lse, sinks, row_acc, row_m, row_l, tile * BLOCK_M + tl.arange(0, USED_M),
                           head, first_token, query_len, value_scale, out_token, out_head, lse_token,
                           has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip
    if PDL == WAIT_LAST:  # noqa: SIM102 (a constant on its own leaves out what some GPUs do not have)
        if program == tl.num_programs(0) - 1:
            grid_wait()

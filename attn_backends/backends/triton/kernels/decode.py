"""Paged attention of rows with few query tokens: all rows' keys cut into parts of one size, one a program.

The device itself cuts (see `equal_cuts`), so that a program may attend for one row after the other. There is no second
launch: the last of the programs that have a row's few splits combines them. Of many splits that would be most of the
time, as one program reads little at once: all those stay that need not wait for one that has not begun, and each
combines some of the columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.backends.triton.kernels.split_joins import HAVE_BEGUN, JOIN_WORDS, LAUNCHES, arrive
from attn_backends.kernels.equal_cuts import HALF, LISTED_PAGES
from attn_backends.kernels.fp8 import as_pairs, interleave_columns, row_amax, scale_to_fp16, zero_acc
from attn_backends.kernels.pdl import WAIT_AT_ONCE, WAIT_FIRST, WAIT_LAST, acquire_fence, grid_wait
from attn_backends.kernels.split_kv import MAX_SPLITS, combine_splits, first_key, store_partial
from attn_backends.kernels.tile_kernels import (
    attend_keys,
    logit_scale,
    once_loaded,
    prefetch_keys,
    scale_logits,
    write_rows,
)

_PREFETCHED_KEYS = tl.constexpr(16)  # the first of a work item: a block of the smallest tile
HALF_ROWS = tl.constexpr(8)  # queries of a half of a row's
_FEW_ROUNDS = tl.constexpr(2)  # in which a program combines few splits
_NOT_CONSTANT = ["table_row", "most_short", "window_right", "window_left", "chunk", "has_sinks", "want_lse",
                 "lse_token"]  # fmt: skip
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
    work_items,  # [max_work_items, 8] i32, see `equal_cuts.cut_kernel`
    more_items,  # [programs of a head, 2] i32, see `cut_kernel`; zeros where each has one work item
    item_pages,  # [max_work_items, LISTED_PAGES] i32, if LISTED: ids of an item's first pages
    partial_acc,  # [partial slots, KV_HEADS, TILES, USED_M, BLOCK_DIM_VO] f32
    partial_ml,  # [partial slots, KV_HEADS, TILES, USED_M, 2] f32: m_i in base 2, l_i
    counters,  # [partial slots, KV_HEADS, TILES, JOIN_WORDS] i32, see `arrive`; of the splits' first slot
    slopes,  # [KV_HEADS * GROUP] f32, if ALIBI
    sinks,  # [KV_HEADS * GROUP] f32 logits, if has_sinks
    table_row,  # elements from row to row of the page table
    most_short,  # keys of a row that `_attend_short` attends for, at most
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
    LISTED: tl.constexpr,  # 0 or 1: page ids are listed with work items, for `_at_once`; pages are of a multiple
    # of 16 slots
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    TILES: tl.constexpr,  # tiles of a row's queries
    BLOCK_M: tl.constexpr,  # queries of a tile: token times query head
    BLOCK_N: tl.constexpr,  # keys of a block
    DIM: tl.constexpr,
    DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # DIM, padded
    BLOCK_DIM_VO: tl.constexpr,  # DIM_VO, padded
    LOCAL: tl.constexpr,  # 0 or 1: there is a window or chunks
    MASKED: tl.constexpr,  # 0 or 1: all blocks are in the loop with masks; 1 where LOCAL
    STAGES: tl.constexpr,  # blocks under way in the loop without masks
    MASKED_STAGES: tl.constexpr,  # blocks under way in the loop with masks
    EXACT: tl.constexpr,  # 0 or 1, see `attend_keys`
    USED_M: tl.constexpr,  # queries of a tile that exist at most, a power of two
    JOINED: tl.constexpr,  # splits up to which one program combines all
    BLOCK_SPLITS: tl.constexpr,  # of these, that are combined at a time
    JOIN_SIZE: tl.constexpr,  # numbers of more splits that a program combines at a time, a power of two
    WIDE: tl.constexpr,  # of a query's columns that it combines at a time where these are still few
    NARROW: tl.constexpr,  # the same where they are many
    THREADS: tl.constexpr,  # of a program
    SHORT: tl.constexpr,  # keys of a block of `_attend_short`; 0: none are attended for at once
    LONGER: tl.constexpr,  # of its block for rows of more keys; SHORT: there is no such
    PART: tl.constexpr,  # of a block of `_attend_part`
    PDL: tl.constexpr,  # when this kernel starts, see `kernels.pdl.Pdl`
):
    """One program attends for a cut of all rows' keys, a KV head and a tile of BLOCK_M of a row's queries.

    The programs of a cut's heads lie side by side.
    """
    if ALIKE:
        value_page, value_slot, value_head = key_page, key_slot, key_head
    if PDL == WAIT_AT_ONCE:
        grid_wait()
    elif PDL == WAIT_LAST:
        acquire_fence()
    program = tl.program_id(0)
    tile = program % TILES
    head = program // TILES % KV_HEADS
    cut = program // TILES // KV_HEADS
    row, start, stop, first_slot, split_info, seq_len, first_token, query_len = _load_item(work_items, cut, True)
    half, query_len = query_len // HALF, query_len % HALF  # 0: all of the row's queries
    page_ids = ()
    if LISTED:  # they come with the item; of the page table they would come after it
        for i in tl.static_range(LISTED_PAGES):
            page_id = tl.load(item_pages + cut * LISTED_PAGES + i)
            page_ids = page_ids + (page_id,)  # type: ignore[assignment]  # noqa: RUF005
    next_item, end_item = tl.load(more_items + cut * 2), tl.load(more_items + cut * 2 + 1)
    if PDL == WAIT_FIRST:  # its items were there before that one was launched, or lets this one start
        grid_wait()
    key, value = key_cache + head.to(tl.int64) * key_head, value_cache + head.to(tl.int64) * value_head
    values, values_page, values_slot = value, value_page, value_slot  # as `_attend_item` reads them
    if PAIRS:
        values, values_page, values_slot = as_pairs(value), value_page // 2, value_slot // 2
    has_others = next_item < end_item
    if has_others:  # it waits for nobody before its last item: who waits for that need not see it begin
        last_slot, last_info = tl.load(work_items + end_item * 8 - 5), tl.load(work_items + end_item * 8 - 4)
        if last_info // MAX_SPLITS > JOINED:
            last_words = _words_of(counters, last_slot, head, tile, KV_HEADS, TILES)
            tl.atomic_add(last_words + HAVE_BEGUN, 1, sem="relaxed")
    if SHORT > 0:
        num_keys, pages = stop - start, page_table + row.to(tl.int64) * table_row
        is_whole = split_info == MAX_SPLITS
        of_part = PART if USED_M <= HALF_ROWS else tl.where(half > 0, PART, 0)
        is_short = (has_others == 0) & (num_keys > 0) & (num_keys <= tl.where(is_whole, most_short, of_part))
        if (half > 1) & ((is_short == 0) | (query_len * GROUP <= HALF_ROWS)):  # the first half's program does all
            row = row * 0 - 1
        elif is_short:
            given = (
                query, key, value, output, lse, pages, page_ids, sinks, start, stop, seq_len, first_token, query_len,
                head, scale, value_scale, soft_cap, window_right, window_left, chunk, has_sinks, want_lse, query_token,
                query_head, key_page, key_slot, value_page, value_slot, out_token, out_head, lse_token, partial_acc,
                partial_ml, counters, first_slot, split_info,
            )  # fmt: skip
            if USED_M > HALF_ROWS and half > 0:
                _attend_few(*given, half - 1, SOFT_CAP, SCALE_FIRST, ALIKE, LOCAL, PAGE_SIZE, LISTED, KV_HEADS, GROUP,
                            2, HALF_ROWS, HALF_ROWS, SHORT, LONGER, PART, DIM, DIM_VO, BLOCK_DIM, BLOCK_DIM_VO,
                            2 * JOINED, 2 * BLOCK_SPLITS, JOIN_SIZE, WIDE, NARROW, THREADS, PDL)  # fmt: skip
            else:
                _attend_few(*given, 0, SOFT_CAP, SCALE_FIRST, ALIKE, LOCAL, PAGE_SIZE, LISTED, KV_HEADS, GROUP, 1,
                            BLOCK_M, USED_M, SHORT, LONGER, PART if USED_M <= HALF_ROWS else 0, DIM, DIM_VO, BLOCK_DIM,
                            BLOCK_DIM_VO, JOINED, BLOCK_SPLITS, JOIN_SIZE, WIDE, NARROW, THREADS, PDL)  # fmt: skip
            row = row * 0 - 1  # it has nothing more to do
    while row >= 0:
        _attend_item(
            query, key, values, output, lse, page_table + row.to(tl.int64) * table_row, partial_acc, partial_ml,
            counters, slopes, sinks, scale, value_scale, soft_cap, window_right, window_left, chunk, has_sinks,
            want_lse, query_token, query_head, key_page, key_slot, values_page, values_slot, out_token, out_head,
            lse_token, start, stop, first_slot, split_info, seq_len, first_token, query_len, next_item, end_item,
            has_others, head, tile, SOFT_CAP, ALIBI, SCALE_FIRST, ALIKE, PAIRS, PAGE_SIZE, KV_HEADS, GROUP, TILES,
            BLOCK_M, BLOCK_N, DIM, DIM_VO, BLOCK_DIM, BLOCK_DIM_VO, LOCAL, MASKED, STAGES, MASKED_STAGES, EXACT, USED_M,
            JOINED, BLOCK_SPLITS, JOIN_SIZE, WIDE, NARROW, THREADS, PDL,
        )  # fmt: skip
        row, start, stop, first_slot, split_info, seq_len, first_token, query_len = _load_item(
            work_items, next_item, next_item < end_item
        )
        next_item += 1
    if PDL == WAIT_LAST:  # noqa: SIM102 (a constant on its own leaves out what some GPUs do not have)
        if program == tl.num_programs(0) - 1:
            grid_wait()


@triton.jit(noinline=True)  # type: ignore[untyped-decorator]
def _attend_item(  # type: ignore[no-untyped-def]
    query, key, value, output, lse, pages, partial_acc, partial_ml, counters, slopes, sinks, scale, value_scale,
    soft_cap, window_right, window_left, chunk, has_sinks, want_lse, query_token, query_head, key_page, key_slot,
    value_page, value_slot, out_token, out_head, lse_token, start, stop, first_slot, split_info, seq_len, first_token,
    query_len, next_item, end_item, has_others, head, tile, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    SCALE_FIRST: tl.constexpr, ALIKE: tl.constexpr, PAIRS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_VO: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, LOCAL: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr, EXACT: tl.constexpr,
    USED_M: tl.constexpr, JOINED: tl.constexpr, BLOCK_SPLITS: tl.constexpr, JOIN_SIZE: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend for a work item, and write what `decode_kernel` does, which has these arguments, or combine the row's
    splits; `key` and `value` point to the KV head's first element, values to pairs with PAIRS, `pages` to the row's
    first page id.

    A function of its own: where compilers see a loop around it, they work out all that stays the same from item to item
    before they ask for the first one's queries, some hundreds of instructions, and few programs have a second item.
    """
    if ALIKE and not PAIRS:
        value_page, value_slot = key_page, key_slot
    num_splits, split = split_info // MAX_SPLITS, split_info % MAX_SPLITS
    words = _words_of(counters, first_slot, head, tile, KV_HEADS, TILES)
    if (num_splits > JOINED) & ((next_item < end_item) | (has_others == 0)):
        tl.atomic_add(words + HAVE_BEGUN, 1, sem="relaxed")
    lane = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = lane // GROUP
    q_head = head * GROUP + lane % GROUP
    live = token < query_len
    positions = seq_len - query_len + token
    first_seen = first_key(seq_len - query_len, window_left, chunk) if LOCAL else None
    dims = tl.arange(0, BLOCK_DIM)[None]
    q_at = _query_rows(query, lane, head, first_token, query_token, query_head, GROUP) + dims
    # Volatile, so that they are asked for before what follows waits for page ids.
    queries = tl.load(q_at, mask=live[:, None] & (dims < DIM), other=0.0, volatile=True)
    if PDL:  # a GPU on which it is faster; the loop below asks for keys once it has the queries
        first = tl.maximum(start, first_seen) if LOCAL else start
        prefetch_keys(key, value, pages, first, stop, key_page, key_slot, value_page, value_slot, PAGE_SIZE,
                      _PREFETCHED_KEYS, DIM, DIM_VO // (1 + PAIRS), BLOCK_DIM,
                      BLOCK_DIM_VO // (1 + PAIRS))  # fmt: skip
    q_scale = None
    if key.dtype.element_ty.primitive_bitwidth == 8 and query.dtype.element_ty == tl.bfloat16:
        q_scale = row_amax(queries)
        queries = scale_to_fp16(queries, q_scale)
    slope = tl.load(slopes + q_head, mask=live, other=0.0) if ALIBI else tl.zeros([BLOCK_M], tl.float32)
    acc, m_i = zero_acc(BLOCK_M, BLOCK_DIM_VO, PAIRS), tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    masked = start
    if not MASKED:  # blocks that all queries see whole need no mask
        whole = tl.minimum(stop, seq_len - query_len + 1 + window_right)
        masked = tl.maximum(whole // BLOCK_N * BLOCK_N, start)
        acc, m_i, l_i = attend_keys(
            queries, q_scale, acc, m_i, l_i, start, masked, seq_len, None, positions, slope, key, value, pages, None,
            scale, soft_cap, window_right, window_left, chunk, key_page, key_slot, value_page, value_slot,
            False, SOFT_CAP, ALIBI, SCALE_FIRST, PAGE_SIZE, BLOCK_N, DIM, DIM_VO, STAGES, EXACT,
        )  # fmt: skip
    acc, m_i, l_i = attend_keys(
        queries, q_scale, acc, m_i, l_i, masked, stop, seq_len, first_seen, positions, slope, key, value, pages, None,
        scale, soft_cap, window_right, window_left, chunk, key_page, key_slot, value_page, value_slot, True,
        SOFT_CAP, ALIBI, SCALE_FIRST, PAGE_SIZE, BLOCK_N, DIM, DIM_VO, MASKED_STAGES, EXACT,
    )  # fmt: skip
    acc = interleave_columns(acc)
    m_i *= logit_scale(scale, SCALE_FIRST)
    if num_splits == 1:
        write_rows(output, lse, sinks, acc, m_i, l_i, lane, head, first_token, query_len, value_scale,
                   out_token, out_head, lse_token, has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip
    else:
        _store_split(
            acc, m_i, l_i, next_item >= end_item, words, num_splits, split, first_slot, output, lse, partial_acc,
            partial_ml, sinks, head, tile, first_token, query_len, value_scale, out_token, out_head, lse_token,
            has_sinks, want_lse, KV_HEADS, GROUP, TILES, BLOCK_M, DIM_VO, BLOCK_DIM_VO, USED_M, JOINED, BLOCK_SPLITS,
            JOIN_SIZE, WIDE, NARROW, THREADS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _store_split(  # type: ignore[no-untyped-def]
    acc, m_i, l_i, is_free, words, num_splits, split, first_slot, output, lse, partial_acc, partial_ml, sinks, head,
    tile, first_token, query_len, value_scale, out_token, out_head, lse_token, has_sinks, want_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, DIM_VO: tl.constexpr,
    BLOCK_DIM_VO: tl.constexpr, USED_M: tl.constexpr, JOINED: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    JOIN_SIZE: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Store what one of a row's splits gave, [queries, BLOCK_DIM_VO], and combine all of them, or a part of their
    columns, if that is this program's. It may wait for others only if it is free, with no more to attend for."""
    # Partial results are [partial slots, KV_HEADS, TILES, USED_M, ...]
    used = query_len * GROUP - tile * BLOCK_M  # unused queries would take registers where splits are combined
    first = (first_slot * KV_HEADS + head) * TILES + tile
    step = KV_HEADS * TILES
    # Before the store, which takes longer than to find out.
    have_begun = _same_for_all(words + HAVE_BEGUN, num_splits > JOINED, THREADS)
    launches = tl.load(words + LAUNCHES, volatile=True)
    store_partial(partial_acc, partial_ml, first + split * step, acc, m_i, l_i, used, USED_M)
    tl.debug_barrier()  # all of the program's stores come before its count
    if num_splits > JOINED:
        stays = (have_begun == num_splits) & is_free
        part, num_parts = arrive(words, num_splits, launches, stays.to(tl.int32))
        if num_parts > 0:
            tl.debug_barrier()
            if num_splits <= _FEW_ROUNDS * (JOIN_SIZE // WIDE):  # of few splits whole rows are sooner read
                _combine_part(
                    partial_acc, partial_ml, first, step, num_splits, part, num_parts, used, output, lse,
                    sinks, tile, head, first_token, query_len, value_scale, out_token, out_head, lse_token,
                    has_sinks, want_lse, GROUP, BLOCK_M, USED_M, DIM_VO, BLOCK_DIM_VO, JOIN_SIZE, WIDE,
                )  # fmt: skip
            else:  # of many splits more programs share a query's columns
                _combine_part(
                    partial_acc, partial_ml, first, step, num_splits, part, num_parts, used, output, lse,
                    sinks, tile, head, first_token, query_len, value_scale, out_token, out_head, lse_token,
                    has_sinks, want_lse, GROUP, BLOCK_M, USED_M, DIM_VO, BLOCK_DIM_VO, JOIN_SIZE, NARROW,
                )  # fmt: skip
    elif tl.atomic_add(words, 1, sem="acq_rel") == num_splits - 1:
        tl.debug_barrier()
        tl.store(words, 0)  # for the next launch
        row_acc, row_m, row_l = combine_splits(
            partial_acc, partial_ml, first, step, num_splits, used, USED_M, BLOCK_DIM_VO, BLOCK_SPLITS,
            BLOCK_DIM_VO,
        )  # fmt: skip
        write_rows(output, lse, sinks, row_acc, row_m, row_l, tile * BLOCK_M + tl.arange(0, USED_M), head,
                   first_token, query_len, value_scale, out_token, out_head, lse_token, has_sinks, want_lse,
                   GROUP, DIM_VO)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _attend_few(  # type: ignore[no-untyped-def]
    query, key, value, output, lse, pages, page_ids, sinks, start, stop, seq_len, first_token, query_len, head, scale,
    value_scale, soft_cap, window_right, window_left, chunk, has_sinks, want_lse, query_token, query_head, key_page,
    key_slot, value_page, value_slot, out_token, out_head, lse_token, partial_acc, partial_ml, counters, first_slot,
    split_info, tile, SOFT_CAP: tl.constexpr, SCALE_FIRST: tl.constexpr, ALIKE: tl.constexpr, LOCAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LISTED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, USED_M: tl.constexpr, SHORT: tl.constexpr, LONGER: tl.constexpr, PART: tl.constexpr,
    DIM: tl.constexpr, DIM_VO: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr,
    JOINED: tl.constexpr, BLOCK_SPLITS: tl.constexpr, JOIN_SIZE: tl.constexpr, WIDE: tl.constexpr,
    NARROW: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend at once for a program's only work item, a whole row or one of its splits, and one of the row's TILES of
    BLOCK_M queries; all else is as `decode_kernel` has it. Of tiles without a PART there are no splits."""
    given = (
        query, key, value, output, lse, pages, page_ids, sinks, start, stop, seq_len, first_token, query_len,
        head, scale, value_scale, soft_cap, window_right, window_left, chunk, has_sinks, want_lse, query_token,
        query_head, key_page, key_slot, value_page, value_slot, out_token, out_head, lse_token, tile,
    )  # fmt: skip
    if PART > 0 and split_info != MAX_SPLITS:
        _attend_part(*given, partial_acc, partial_ml, counters, first_slot, split_info, SOFT_CAP, SCALE_FIRST,
                     ALIKE, LOCAL, PAGE_SIZE, LISTED, KV_HEADS, GROUP, TILES, BLOCK_M, USED_M, PART, DIM, DIM_VO,
                     BLOCK_DIM, BLOCK_DIM_VO, JOINED, BLOCK_SPLITS, JOIN_SIZE, WIDE, NARROW, THREADS, PDL)  # fmt: skip
        tl.debug_barrier()  # in front of other items' results, of which this program has none
    elif (stop - start <= SHORT) | (LONGER == SHORT):  # a constant, where there is no other block to compile
        _attend_short(*given, SOFT_CAP, SCALE_FIRST, ALIKE, LOCAL, PAGE_SIZE, LISTED, GROUP, BLOCK_M, USED_M, SHORT,
                      DIM, DIM_VO, BLOCK_DIM, BLOCK_DIM_VO, THREADS, PDL)  # fmt: skip
    else:
        _attend_short(*given, SOFT_CAP, SCALE_FIRST, ALIKE, LOCAL, PAGE_SIZE, LISTED, GROUP, BLOCK_M, USED_M, LONGER,
                      DIM, DIM_VO, BLOCK_DIM, BLOCK_DIM_VO, THREADS, PDL)  # fmt: skip


@triton.jit(noinline=True)  # type: ignore[untyped-decorator]
def _attend_short(  # type: ignore[no-untyped-def]
    query, key, value, output, lse, pages, page_ids, sinks, start, stop, seq_len, first_token, query_len, head, scale,
    value_scale, soft_cap, window_right, window_left, chunk, has_sinks, want_lse, query_token, query_head, key_page,
    key_slot, value_page, value_slot, out_token, out_head, lse_token, tile, SOFT_CAP: tl.constexpr,
    SCALE_FIRST: tl.constexpr, ALIKE: tl.constexpr, LOCAL: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LISTED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, USED_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_VO: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend to all of a row's keys `start` to `stop`, no more than a block of BLOCK_N, and write what `decode_kernel`
    does, which has these arguments; `key` and `value` point to the KV head's first element, `pages` to the row's first
    page id, and `page_ids` are those of its first pages with keys, if LISTED."""
    lane, acc, m_i, l_i = _at_once(
        query, key, value, pages, page_ids, start, stop, seq_len, first_token, query_len, head, tile, scale, soft_cap,
        window_right, window_left, chunk, query_token, query_head, key_page, key_slot, value_page, value_slot, SOFT_CAP,
        SCALE_FIRST, ALIKE, LOCAL, LOCAL, PAGE_SIZE, LISTED, GROUP, BLOCK_M, USED_M, BLOCK_N, DIM, DIM_VO, BLOCK_DIM,
        BLOCK_DIM_VO, THREADS, PDL,
    )  # fmt: skip
    write_rows(output, lse, sinks, acc, m_i, l_i, lane, head, first_token, query_len, value_scale, out_token, out_head,
               lse_token, has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip


@triton.jit(noinline=True)  # type: ignore[untyped-decorator]
def _attend_part(  # type: ignore[no-untyped-def]
    query, key, value, output, lse, pages, page_ids, sinks, start, stop, seq_len, first_token, query_len, head, scale,
    value_scale, soft_cap, window_right, window_left, chunk, has_sinks, want_lse, query_token, query_head, key_page,
    key_slot, value_page, value_slot, out_token, out_head, lse_token, tile, partial_acc, partial_ml, counters,
    first_slot, split_info, SOFT_CAP: tl.constexpr, SCALE_FIRST: tl.constexpr, ALIKE: tl.constexpr, LOCAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LISTED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, USED_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, JOINED: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    JOIN_SIZE: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for one of a row's splits, the only one of its program."""
    num_splits, split = split_info // MAX_SPLITS, split_info % MAX_SPLITS
    words = _words_of(counters, first_slot, head, tile, KV_HEADS, TILES)
    if num_splits > JOINED:
        tl.atomic_add(words + HAVE_BEGUN, 1, sem="relaxed")
    _lane, acc, m_i, l_i = _at_once(
        query, key, value, pages, page_ids, start, stop, seq_len, first_token, query_len, head, tile, scale, soft_cap,
        window_right, window_left, chunk, query_token, query_head, key_page, key_slot, value_page, value_slot, SOFT_CAP,
        SCALE_FIRST, ALIKE, LOCAL, 1, PAGE_SIZE, LISTED, GROUP, BLOCK_M, USED_M, BLOCK_N, DIM, DIM_VO, BLOCK_DIM,
        BLOCK_DIM_VO, THREADS, PDL,
    )  # fmt: skip
    _store_split(acc, m_i, l_i, True, words, num_splits, split, first_slot, output, lse, partial_acc, partial_ml, sinks,
                 head, tile, first_token, query_len, value_scale, out_token, out_head, lse_token, has_sinks, want_lse,
                 KV_HEADS, GROUP, TILES, BLOCK_M, DIM_VO, BLOCK_DIM_VO, USED_M, JOINED, BLOCK_SPLITS, JOIN_SIZE, WIDE,
                 NARROW, THREADS)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _at_once(  # type: ignore[no-untyped-def]
    query, key, value, pages, page_ids, start, stop, seq_len, first_token, query_len, head, tile, scale, soft_cap,
    window_right, window_left, chunk, query_token, query_head, key_page, key_slot, value_page, value_slot,
    SOFT_CAP: tl.constexpr, SCALE_FIRST: tl.constexpr, ALIKE: tl.constexpr, LOCAL: tl.constexpr,
    ANYWHERE: tl.constexpr, PAGE_SIZE: tl.constexpr, LISTED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    USED_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_VO: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What keys `start` to `stop` of a row give, no more than BLOCK_N: its queries' numbers [QUERIES], sums
    [QUERIES, BLOCK_DIM_VO], the highest logits in base 2, and sums of weights. The arguments are `_attend_short`'s, and
    ANYWHERE: keys begin at any multiple of 16, or else at the row's first.

    A program that reads so little takes most of its time to fetch its code, and to wait. So nothing loops here, keys
    and values are asked for at once, and a function of its own takes no registers of the rest. Products are
    [keys, queries], where 8 queries take no more than they need.
    """
    if ALIKE:
        value_page, value_slot = key_page, key_slot
    QUERIES: tl.constexpr = USED_M if USED_M > 8 else 8
    COLUMNS: tl.constexpr = 64 if BLOCK_DIM > 64 else BLOCK_DIM  # of a piece
    COLUMNS_VO: tl.constexpr = 64 if BLOCK_DIM_VO > 64 else BLOCK_DIM_VO
    NUM_PIECES: tl.constexpr = (DIM_VO + COLUMNS_VO - 1) // COLUMNS_VO
    # Columns of values that are asked for with the keys; of the largest blocks others are once these left registers.
    IS_LARGE: tl.constexpr = BLOCK_N * (BLOCK_DIM + BLOCK_DIM_VO) > 384 * THREADS
    FIRST_VO: tl.constexpr = NUM_PIECES // 2 * COLUMNS_VO if IS_LARGE else DIM_VO
    IS_SCALED: tl.constexpr = key.dtype.element_ty.primitive_bitwidth == 8 and query.dtype.element_ty == tl.bfloat16
    of_dtype: tl.constexpr = tl.float16 if IS_SCALED else query.dtype.element_ty  # of products
    lane = tile * BLOCK_M + tl.arange(0, QUERIES)
    token = lane // GROUP
    keys = start + tl.arange(0, BLOCK_N)
    there = tl.minimum(keys, stop - 1)  # no query sees what is read twice: for finite values as good as a mask
    if LOCAL:
        there = tl.maximum(there, first_key(seq_len - query_len, window_left, chunk))
    at = there.to(tl.uint32)  # which is divided by fewer instructions
    if LISTED:
        first = start % PAGE_SIZE if ANYWHERE else 0
        MOST_PAGES: tl.constexpr = (BLOCK_N - 1 + (PAGE_SIZE - 16 if ANYWHERE else 0)) // PAGE_SIZE + 1
        tl.static_assert(MOST_PAGES <= LISTED_PAGES)
        lanes = tl.maximum(there, keys) - start if LOCAL else tl.arange(0, BLOCK_N)
        nth = (first + lanes) // PAGE_SIZE
        page = nth * 0 + page_ids[0]
        for i in tl.static_range(1, MOST_PAGES):
            page = tl.where(nth >= i, page_ids[i], page)
    else:
        page = tl.load(pages + at // PAGE_SIZE)
    page, slot = page.to(tl.int64), (at % PAGE_SIZE).to(tl.int32)
    k = _load_pieces(key + (page * key_page + slot * key_slot)[:, None], None, 0, DIM, COLUMNS)
    v_rows = value + (page * value_page + slot * value_slot)[:, None]
    v = _load_pieces(v_rows, None, 0, FIRST_VO, COLUMNS_VO)
    if PDL and IS_SCALED and THREADS == 32 and BLOCK_DIM >= 128:
        tl.debug_barrier()  # all of these are asked for before queries are waited for, which are scaled first
    q_rows = _query_rows(query, lane, head, first_token, query_token, query_head, GROUP)
    queries = _load_pieces(q_rows, token < query_len, 0, DIM, COLUMNS)
    if IS_SCALED:
        queries, q_scale = _pieces_to_fp16(queries)
    logits = tl.zeros([BLOCK_N, QUERIES], tl.float32)
    for i in tl.static_range((DIM + COLUMNS - 1) // COLUMNS):
        some_queries = tl.trans(once_loaded(queries[i], PDL))
        logits = tl.dot(once_loaded(k[i], PDL).to(of_dtype), some_queries, logits)
    if IS_SCALED:
        logits *= q_scale[None]
    v = v + _load_pieces(v_rows, None, FIRST_VO, DIM_VO, COLUMNS_VO)
    positions = seq_len - query_len + token
    high = tl.minimum(positions + window_right, stop - 1)
    logits = scale_logits(logits, scale, soft_cap, SOFT_CAP, SCALE_FIRST)
    if LOCAL:
        high = tl.minimum(high, tl.maximum(positions, 0) // chunk * chunk + (chunk - 1))
        low = first_key(positions, window_left, chunk)
        logits = tl.where(keys[:, None] >= low[None], logits, float("-inf"))
    logits = tl.where(keys[:, None] <= high[None], logits, float("-inf"))
    logits *= logit_scale(scale, SCALE_FIRST)
    m_i = tl.max(logits, 0)
    p = tl.exp2(logits - tl.where(m_i == float("-inf"), 0.0, m_i)[None])
    pieces = ()
    for i in tl.static_range(NUM_PIECES):
        some_values = tl.trans(once_loaded(v[i], PDL).to(of_dtype))
        pieces = pieces + (tl.dot(some_values, p.to(of_dtype)),)  # type: ignore[assignment]  # noqa: RUF005
    return lane, tl.trans(_below_one_another(pieces, NUM_PIECES)), m_i, tl.sum(p, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _load_pieces(  # type: ignore[no-untyped-def]
    rows, live, FIRST: tl.constexpr, NUM_COLS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Columns FIRST to NUM_COLS of where `rows` [rows, 1] point, in pieces [rows, COLUMNS], whose addresses differ by
    a constant; zeros behind the last column, and where `live` [rows], if there is such, is not."""
    columns = tl.arange(0, COLUMNS)[None]
    pieces = ()
    for i in tl.static_range((FIRST + COLUMNS - 1) // COLUMNS, (NUM_COLS + COLUMNS - 1) // COLUMNS):
        at = rows + columns + i * COLUMNS
        if live is not None:
            piece = tl.load(at, mask=live[:, None] & (columns < NUM_COLS - i * COLUMNS), other=0.0)
        elif (i + 1) * COLUMNS <= NUM_COLS:
            piece = tl.load(at)
        else:
            piece = tl.load(at, mask=columns < NUM_COLS - i * COLUMNS, other=0.0)
        pieces = pieces + (piece,)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def _pieces_to_fp16(queries):  # type: ignore[no-untyped-def]
    """Pieces [rows, columns] of bfloat16 queries as float16, each row divided by its scale, and the scales [rows] f32;
    see `fp8.scale_to_fp16`."""
    q_scale = row_amax(queries[0])
    for i in tl.static_range(1, len(queries)):
        q_scale = tl.maximum(q_scale, row_amax(queries[i]))
    scaled = ()
    for i in tl.static_range(len(queries)):
        scaled = scaled + (scale_to_fp16(queries[i], q_scale),)  # type: ignore[assignment]  # noqa: RUF005
    return scaled, q_scale


@triton.jit  # type: ignore[untyped-decorator]
def _below_one_another(pieces, NUM_PIECES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pieces [rows, columns] as one, [rows of all, columns], in a power of two of them: the last ones may be zeros."""
    LEVELS: tl.constexpr = 0 if NUM_PIECES == 1 else 1 if NUM_PIECES == 2 else 2 if NUM_PIECES <= 4 else 3
    for _ in tl.static_range(NUM_PIECES, 1 << LEVELS):
        pieces = pieces + (tl.zeros_like(pieces[0]),)  # noqa: RUF005
    for level in tl.static_range(LEVELS):
        pairs = ()
        for i in tl.static_range(1 << (LEVELS - 1 - level)):
            upper, lower = pieces[2 * i], pieces[2 * i + 1]
            both = tl.permute(tl.join(upper, lower), (2, 0, 1))
            pairs = pairs + (tl.reshape(both, (2 * upper.shape[0], upper.shape[1])),)  # type: ignore[assignment]  # noqa: RUF005
        pieces = pairs
    return pieces[0]


@triton.jit  # type: ignore[untyped-decorator]
def _query_rows(  # type: ignore[no-untyped-def]
    query, lane, head, first_token, query_token, query_head, GROUP: tl.constexpr
):
    """[lanes, 1]: where a KV head's queries of a row begin, `lane` is token times GROUP plus query head."""
    first_query = query + (first_token.to(tl.int64) * query_token + head * GROUP * query_head)
    return first_query + ((lane // GROUP).to(tl.int64) * query_token + (lane % GROUP) * query_head)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _words_of(counters, first_slot, head, tile, KV_HEADS: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the splits of a row, a KV head and a tile meet, see `arrive`."""
    return counters + ((first_slot * KV_HEADS + head) * TILES + tile) * JOIN_WORDS


@triton.jit
def _load_item(work_items, work_item, exists):  # type: ignore[no-untyped-def]
    """A work item's numbers, see `CutList`; a row of -1 where there is none."""
    at = work_items + work_item * 8
    row = tl.load(at, mask=exists, other=-1)
    start, stop = tl.load(at + 1, mask=exists, other=0), tl.load(at + 2, mask=exists, other=0)
    first_slot, split_info = tl.load(at + 3, mask=exists, other=0), tl.load(at + 4, mask=exists, other=0)
    seq_len, first_token = tl.load(at + 5, mask=exists, other=0), tl.load(at + 6, mask=exists, other=0)
    return row, start, stop, first_slot, split_info, seq_len, first_token, tl.load(at + 7, mask=exists, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _same_for_all(word, is_read, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number that changes while it is read, or 0: all warps of a program go by what any of them has read, as they
    would never meet again where they went apart.

    Whether it is read is a mask and no branch: CUDA 12.8's ptxas makes a predicate of that, and puts another number
    there in its place before the warp's maximum is taken.
    """
    same = tl.arange(0, THREADS) * 0
    return tl.max(tl.load(word + same, mask=same < is_read.to(tl.int32), other=0, volatile=True), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_part(  # type: ignore[no-untyped-def]
    partial_acc,
    partial_ml,
    first,  # of the row's partial results
    step,  # from one split's to the next one's
    num_splits,
    part,
    num_parts,  # that the row's columns are combined in
    used,  # queries of the tile that exist
    output,
    lse,
    sinks,
    tile,
    head,
    first_token,
    query_len,
    value_scale,
    out_token,
    out_head,
    lse_token,
    has_sinks,
    want_lse,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    USED_M: tl.constexpr,
    DIM_VO: tl.constexpr,
    BLOCK_DIM_VO: tl.constexpr,
    JOIN_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Combine and write every `num_parts`-th run of COLUMNS of a query from `part` on."""
    RUNS: tl.constexpr = BLOCK_DIM_VO // COLUMNS
    for run in range(part, tl.minimum(used, USED_M) * RUNS, num_parts):
        query, column = run // RUNS, run % RUNS * COLUMNS
        at = first.to(tl.int64) * USED_M + query
        acc, m_i, l_i = combine_splits(partial_acc + column, partial_ml, at, step * USED_M, num_splits, 1, 1,
                                       BLOCK_DIM_VO, JOIN_SIZE // COLUMNS, COLUMNS)  # fmt: skip
        write_rows(output + column, lse, sinks, acc, m_i, l_i, tile * BLOCK_M + query + tl.arange(0, 1), head,
                   first_token, query_len, value_scale, out_token, out_head, lse_token, has_sinks, want_lse, GROUP,
                   DIM_VO - column)  # fmt: skip

"""Paged attention of rows with few query tokens: keys split over the GPU as evenly as their lengths ask for it.

The device itself cuts the work into items (see `split_kv`), and the last of a row's items to end joins them all:
there is no second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.backends.triton.kernels.tile import attend_keys, factor, write_rows
from attn_backends.kernels.fp8 import all_columns, as_pairs, largest_of, no_sums, shares_of
from attn_backends.kernels.launch import BESIDE, EARLY_START, see_all, wait_for_last
from attn_backends.kernels.split_kv import FAR, MOST_ITEMS, join

_NOT_CONSTANT = ["table_row", "ahead", "behind", "chunk", "has_sinks", "want_lse", "lse_token"]
_ANYWHERE = ["lse", "page_table", "sinks"]  # no code depends on whether these are aligned


@triton.jit(do_not_specialize=_NOT_CONSTANT, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, output, lse, page_table, items, partial, partial_sums, counters, slopes, sinks,
    table_row, scale, value_scale, soft_cap, ahead, behind, chunk, has_sinks, want_lse,
    query_token, query_head, key_page, key_slot, key_head, value_page, value_slot, value_head, out_token, out_head,
    lse_token,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, EARLY: tl.constexpr, ALIKE: tl.constexpr, PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """One program an item, KV head and tile of ROWS of its queries; items of a row's heads lie side by side.

    Of a tile LANES are queries at most; PARTS are joined at a time. ALIKE: keys and values have the same strides.
    PAIRS: values of 8 bits come two by two. START: see `triton_launch.Start`.
    """
    if ALIKE:
        value_page, value_slot, value_head = key_page, key_slot, key_head
    if START == BESIDE:
        see_all()
    program = tl.program_id(0)
    tile = program % TILES
    head = program // TILES % KV_HEADS
    item = items + program // TILES // KV_HEADS * 8
    row = tl.load(item)
    start, stop, place, parts = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    seq_len, first_token, query_len = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    if START == EARLY_START:  # its item was there before that one was launched, or lets this one start
        wait_for_last()
    if row >= 0:
        count, nth = parts // MOST_ITEMS, parts % MOST_ITEMS
        lane = tile * ROWS + tl.arange(0, ROWS)
        token = lane // GROUP
        q_head = head * GROUP + lane % GROUP
        live = token < query_len
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
        # Blocks that all queries see whole need no mask.
        whole = tl.minimum(stop, seq_len - query_len + 1 + ahead) // KEYS * KEYS
        if tl.minimum(behind, chunk) < FAR:
            whole = start
        whole = tl.maximum(whole, start)
        key, value = key_cache + head.to(tl.int64) * key_head, value_cache + head.to(tl.int64) * value_head
        if PAIRS:
            value, value_page, value_slot = as_pairs(value), value_page // 2, value_slot // 2
        pages = page_table + row.to(tl.int64) * table_row
        sums, top, total = attend_keys(
            queries, stretch, no_sums(ROWS, BLOCK_DIM_VO, PAIRS), tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32), start, whole, seq_len, positions, slope, key, value, pages, None, scale,
            soft_cap, ahead, behind, chunk, key_page, key_slot, value_page, value_slot,
            False, SOFT_CAP, ALIBI, EARLY, PAGE_SIZE, KEYS, DIM, DIM_VO, STAGES, EXACT,
        )  # fmt: skip
        sums, top, total = attend_keys(
            queries, stretch, sums, top, total, whole, stop, seq_len, positions, slope, key, value, pages, None, scale,
            soft_cap, ahead, behind, chunk, key_page, key_slot, value_page, value_slot,
            True, SOFT_CAP, ALIBI, EARLY, PAGE_SIZE, KEYS, DIM, DIM_VO, MASKED_STAGES, EXACT,
        )  # fmt: skip
        sums = all_columns(sums)
        top *= factor(scale, EARLY)
        if count == 1:
            write_rows(output, lse, sinks, sums, top, total, lane, head, first_token, query_len, value_scale,
                       out_token, out_head, lse_token, has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip
        else:
            # Parts are [places, KV_HEADS, TILES, LANES, ...]
            inner = tl.arange(0, ROWS)
            mine = (((place + nth) * KV_HEADS + head) * TILES + tile).to(tl.int64) * LANES + inner
            live = live & (inner < LANES)
            dims_vo = tl.arange(0, BLOCK_DIM_VO)
            tl.store(partial + mine[:, None] * BLOCK_DIM_VO + dims_vo[None], sums, mask=live[:, None])
            tl.store(partial_sums + mine * 2, top, mask=live)
            tl.store(partial_sums + mine * 2 + 1, total, mask=live)
            tl.debug_barrier()  # all of the program's stores come before its count
            counter = counters + (row * KV_HEADS + head) * TILES + tile
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                tl.debug_barrier()
                tl.store(counter, 0)  # for the next launch
                # The last to end joins all, in lanes alone: the tile's unused rows would take its registers.
                first = (place * KV_HEADS + head) * TILES + tile
                joined, joined_top, joined_total = join(
                    partial, partial_sums, first, KV_HEADS * TILES, count, query_len * GROUP - tile * ROWS,
                    LANES, BLOCK_DIM_VO, PARTS,
                )  # fmt: skip
                write_rows(output, lse, sinks, joined, joined_top, joined_total, tile * ROWS + tl.arange(0, LANES),
                           head, first_token, query_len, value_scale, out_token, out_head, lse_token,
                           has_sinks, want_lse, GROUP, DIM_VO)  # fmt: skip
    if START == BESIDE:  # noqa: SIM102 (a constant on its own leaves out what some GPUs do not have)
        if program == tl.num_programs(0) - 1:
            wait_for_last()

"""Prefill on Hopper: loads, products and softmax where they are to be, by Triton's Gluon.

Two groups of warps, or one or three, have 64 queries each and share the keys. A group asks for the next block's
logits, then for the values that the last block's weights give, and works out its weights while the latter are under
way, as FlashAttention-3 does (Shah et al., 2024). As there, two groups may ask in turns. A warp that does nothing else
loads keys and values by the tensor memory accelerator, out of pages of any multiple of 16 slots. Of 8 bits four more
warps make 16 of what it loads. A program for each multiprocessor, or two of one group, goes from tile to tile until
none is left: one more warp takes them shortly before the last one's end, and publishes what the others need, so that
nobody waits for what is in memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_backends.kernels.fp8 import row_amax, scale_to_fp16
from attn_backends.kernels.hopper import (
    BLOCK_LAYOUT,
    BYTE_LAYOUT,
    HEAD_LAYOUT,
    LANE_LAYOUT,
    TMA_COLS,
    WARP_SIZE,
    acc_width,
    as_operand,
    as_words,
    barrier,
    barriers,
    clear_rows,
    column_tiles,
    lane_sums,
    nth_of,
    num_accs,
    num_pieces,
    of_words,
    online_softmax,
    page_ids,
    pass_turn,
    piece_start,
    piece_width,
    row_sums,
    take_turn,
    times_rows,
)
from attn_backends.kernels.hopper_writes import write_rows, write_rows_by_shuffles, write_rows_by_smem
from attn_backends.kernels.pdl import grid_wait, launch_dependents
from attn_backends.kernels.split_kv import FAR, LN_2, LOG2_E, first_key, seen_by_all
from attn_backends.kernels.tile_kernels import tile_of

BLOCK_M = gl.constexpr(64)  # queries of a group of warps
NUM_FIELDS = gl.constexpr(10)  # numbers of a tile_info
SHORT_TILE = gl.constexpr(2)  # blocks
LEAD = gl.constexpr(3)  # blocks of a tile that are still to be asked for when the next tile is taken
BEHIND, BEFORE = gl.constexpr(1), gl.constexpr(2)  # keys that a block's mask hides
BATCH = gl.constexpr(4)  # loads of keys or values that code is written out for
GROUP_WARPS = 4

_NOT_CONSTANT = ["first_row", "num_rows", "section", "table_row", "window_right", "window_left", "has_sinks",
                 "want_lse", "lse_token", "page_rows", "head_rows", "num_batches", "max_items"]  # fmt: skip
# No code depends on whether these are aligned.
_ANYWHERE = ["lse", "page_table", "seq_lens", "query_start_loc", "key_start_loc", "sinks", "work_items", "partial_acc",
             "partial_ml"]  # fmt: skip


@gluon.jit(do_not_specialize=_NOT_CONSTANT, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def prefill_hopper_kernel(  # type: ignore[no-untyped-def]
    key_desc,  # TMA descriptor of keys as rows, tiles of [TMA_ROWS, TMA_COLS]; see `_load_block` for other head dims;
    # of a cache of 8 bits two by two
    value_desc,  # TMA descriptor of values, the same
    query,  # [num_tokens, KV_HEADS * GROUP, DIM], aligned to 16 bytes
    output,  # [num_tokens, KV_HEADS * GROUP, DIM_VO]
    lse,  # [num_tokens, KV_HEADS * GROUP] f32, natural log, if want_lse
    page_table,  # [rows, max_pages] i32, if PAGE_SIZE
    seq_lens,  # [rows] i32
    query_start_loc,  # [rows + 1] i32
    key_start_loc,  # [rows] i32, if PAGE_SIZE is 0
    sinks,  # [KV_HEADS * GROUP] f32 logits, if has_sinks
    counters,  # [2] i32, zeros between launches: tiles that were taken, and programs that are done
    work_items,  # [max_items, 8] i32, if SPLIT, see `list_kernel.list_kernel`
    partial_acc,  # [partial slots, GROUPS * BLOCK_M, columns] f32, if SPLIT, see `_store_partial`
    partial_ml,  # [partial slots, GROUPS * BLOCK_M, 2] f32, if SPLIT: m_i in base 2, l_i
    first_row,  # rows before it are left alone
    num_rows,  # rows from there on
    section,  # KV heads whose keys and values fit the L2 cache
    table_row,  # elements from row to row of the page table
    max_items,  # at least 1, if SPLIT
    scale,  # f32, of logits in base 2, positive
    value_scale,  # f32, of cached values
    window_right,  # positions after its own that a query sees
    window_left,  # positions before its own that a query sees
    has_sinks,  # 0 or 1
    want_lse,  # 0 or 1
    page_rows,  # rows of the descriptors from page to page
    head_rows,  # rows of the descriptors from head to head
    num_batches,  # batches of a block's TMA tiles, BATCH each or as many as there are; see below
    key_head,  # from head to head in the keys' descriptor: columns, or heads where it has them
    value_head,  # the same of values
    query_token,  # elements from token to token, a multiple of 16
    query_head,  # elements, a multiple of 16
    out_token,  # elements, as all strides
    out_head,
    lse_token,
    CHUNK: gl.constexpr,  # positions in a chunk, FAR where there are none: a known one needs no divisions
    LOCAL: gl.constexpr,  # 0: no windows or chunks; 1: with which all blocks have masks; 2: some need none, and of a
    # window no block hides keys on both sides
    PAGE_SIZE: gl.constexpr,  # slots; 0: keys lie as they came
    TMA_ROWS: gl.constexpr,  # rows of a TMA tile
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # query heads of a KV head
    BLOCK_N: gl.constexpr,  # keys of a block
    DIM: gl.constexpr,
    DIM_VO: gl.constexpr,
    GROUPS: gl.constexpr,  # of warps that attend, 1 to 3
    IN_TURNS: gl.constexpr,  # 0 or 1: two groups ask for products in turns
    K_STAGES: gl.constexpr,  # blocks of keys in shared memory
    V_STAGES: gl.constexpr,  # blocks of values there
    Q_STAGES: gl.constexpr,  # tiles of queries in shared memory, 1 or 2
    USE_PDL: gl.constexpr,  # 0 or 1: it starts before the kernel in front of it has ended, and waits for it
    LAUNCH_DEPENDENTS: gl.constexpr,  # 0 or 1: the next kernel runs beside this one, see below
    SPLIT: gl.constexpr,  # 0 or 1: tiles are listed, and keys of some are split
    RAW_STAGES: gl.constexpr,  # blocks of 8 bits in shared memory, which are made 16 bits there; 0: the cache has 16
    E5M2: gl.constexpr,  # 0 or 1: those are e5m2, not e4m3
):
    """Persistent programs attend for tiles of GROUPS * BLOCK_M queries: the first by number, then whichever is next.

    `num_batches` is not a constant: a compiler that writes all of them out has too few registers left, for the other
    warps too.

    With LAUNCH_DEPENDENTS the next kernel runs where this one leaves multiprocessors free, and waits for it.

    With SPLIT an item of a list is taken in a tile's place, and what splits of a tile's keys give is for
    `join_kernel`.
    """
    gl.static_assert(IN_TURNS == 0 or GROUPS == 2)
    if USE_PDL:  # the next one may take what was there before this one for granted
        grid_wait()
    if LAUNCH_DEPENDENTS:
        launch_dependents()
    of_dtype: gl.constexpr = query.dtype.element_ty
    q_0 = gl.allocate_shared_memory(of_dtype, [Q_STAGES * column_tiles(DIM), BLOCK_M, TMA_COLS], BLOCK_LAYOUT)
    if GROUPS > 1:
        q_1 = gl.allocate_shared_memory(of_dtype, [Q_STAGES * column_tiles(DIM), BLOCK_M, TMA_COLS], BLOCK_LAYOUT)
    if GROUPS == 3:
        q_2 = gl.allocate_shared_memory(of_dtype, [Q_STAGES * column_tiles(DIM), BLOCK_M, TMA_COLS], BLOCK_LAYOUT)
    kv_dtype: gl.constexpr = gl.float16 if RAW_STAGES else of_dtype  # which 8 bits are sooner made than bfloat16
    keys = gl.allocate_shared_memory(kv_dtype, [K_STAGES * column_tiles(DIM), BLOCK_N, TMA_COLS], BLOCK_LAYOUT)
    values = gl.allocate_shared_memory(kv_dtype, [V_STAGES * column_tiles(DIM_VO), BLOCK_N, TMA_COLS], BLOCK_LAYOUT)
    info_smem = gl.allocate_shared_memory(gl.int32, [NUM_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ids_smem = gl.allocate_shared_memory(gl.int32, [1, WARP_SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = (barriers(K_STAGES, 1), barriers(V_STAGES, 1))  # of keys, of values
    empty = (barriers(K_STAGES, GROUPS), barriers(V_STAGES, GROUPS))  # by all groups
    info_full, info_empty = barriers(1, 1), barriers(1, GROUPS + 1 + (RAW_STAGES > 0))
    kv_pipeline = (keys, values, full, empty)
    loaded = kv_pipeline  # by the tensor memory accelerator
    if RAW_STAGES:
        raw_keys = gl.allocate_shared_memory(
            of_dtype, [RAW_STAGES * column_tiles(DIM // 2), BLOCK_N, TMA_COLS], BLOCK_LAYOUT
        )
        raw_values = gl.allocate_shared_memory(
            of_dtype, [RAW_STAGES * column_tiles(DIM_VO // 2), BLOCK_N, TMA_COLS], BLOCK_LAYOUT
        )
        raw_full = (barriers(RAW_STAGES, 1), barriers(RAW_STAGES, 1))
        raw_empty = (barriers(RAW_STAGES, 1), barriers(RAW_STAGES, 1))
        loaded = (raw_keys, raw_values, raw_full, raw_empty)
    fence_async_shared()

    tile_channel = (info_smem, ids_smem, info_full, info_empty)
    tensors = (query, output, lse, sinks, partial_acc, partial_ml)
    strides = (query_token, query_head, out_token, out_head, lse_token)
    scales = (scale, value_scale)
    window, flags = (window_right, window_left), (has_sinks, want_lse)
    rows = (seq_lens, query_start_loc, key_start_loc, page_table, table_row)
    spans, listed = (first_row, num_rows, section), (work_items, max_items)
    steps = (page_rows, head_rows, key_head, value_head, num_batches)
    SPLIT_HEADS: gl.constexpr = KV_HEADS if SPLIT else 0
    if GROUPS == 1 and RAW_STAGES > 0:
        gl.warp_specialize(
            [
                (_attend, (tensors, strides, scales, window, flags, q_0, kv_pipeline, tile_channel, 0, GROUPS,
                           IN_TURNS, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES, SPLIT_HEADS)),
                (_make_16_bits, (loaded, kv_pipeline, tile_channel, BLOCK_N, DIM, DIM_VO, E5M2)),
                (_load, (key_desc, value_desc, rows, steps, loaded, tile_channel, PAGE_SIZE, TMA_ROWS, BLOCK_N, DIM,
                         DIM_VO, SPLIT_HEADS, RAW_STAGES)),
                (_take_tiles, (rows, spans, listed, window, counters, tile_channel, CHUNK, LOCAL, PAGE_SIZE, TMA_ROWS,
                               KV_HEADS, GROUP, GROUPS, BLOCK_N, SPLIT)),
            ],
            [4, 1, 1],
            [232, 24, 24],
        )  # fmt: skip
    elif GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend, (tensors, strides, scales, window, flags, q_0, kv_pipeline, tile_channel, 0, GROUPS,
                           IN_TURNS, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES, SPLIT_HEADS)),
                (_load, (key_desc, value_desc, rows, steps, loaded, tile_channel, PAGE_SIZE, TMA_ROWS, BLOCK_N, DIM,
                         DIM_VO, SPLIT_HEADS, RAW_STAGES)),
                (_take_tiles, (rows, spans, listed, window, counters, tile_channel, CHUNK, LOCAL, PAGE_SIZE, TMA_ROWS,
                               KV_HEADS, GROUP, GROUPS, BLOCK_N, SPLIT)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    elif RAW_STAGES:
        gl.warp_specialize(
            [
                (_attend, (tensors, strides, scales, window, flags, q_0, kv_pipeline, tile_channel, 0, GROUPS,
                           IN_TURNS, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES, SPLIT_HEADS)),
                (_attend, (tensors, strides, scales, window, flags, q_1, kv_pipeline, tile_channel, 1, GROUPS,
                           IN_TURNS, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES, SPLIT_HEADS)),
                (_make_16_bits, (loaded, kv_pipeline, tile_channel, BLOCK_N, DIM, DIM_VO, E5M2)),
                (_load, (key_desc, value_desc, rows, steps, loaded, tile_channel, PAGE_SIZE, TMA_ROWS, BLOCK_N, DIM,
                         DIM_VO, SPLIT_HEADS, RAW_STAGES)),
                (_take_tiles, (rows, spans, listed, window, counters, tile_channel, CHUNK, LOCAL, PAGE_SIZE, TMA_ROWS,
                               KV_HEADS, GROUP, GROUPS, BLOCK_N, SPLIT)),
            ],
            [4, 4, 1, 1],
            [216, 56, 24, 24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (tensors, strides, scales, window, flags, q_0, kv_pipeline, tile_channel, 0, GROUPS,
                           IN_TURNS, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES, SPLIT_HEADS)),
                (_attend, (tensors, strides, scales, window, flags, q_1, kv_pipeline, tile_channel, 1, GROUPS,
                           IN_TURNS, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES, SPLIT_HEADS)),
                (_load, (key_desc, value_desc, rows, steps, loaded, tile_channel, PAGE_SIZE, TMA_ROWS, BLOCK_N, DIM,
                         DIM_VO, SPLIT_HEADS, RAW_STAGES)),
                (_take_tiles, (rows, spans, listed, window, counters, tile_channel, CHUNK, LOCAL, PAGE_SIZE, TMA_ROWS,
                               KV_HEADS, GROUP, GROUPS, BLOCK_N, SPLIT)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (tensors, strides, scales, window, flags, q_0, kv_pipeline, tile_channel, 0, GROUPS,
                           IN_TURNS, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES, SPLIT_HEADS)),
                (_attend, (tensors, strides, scales, window, flags, q_1, kv_pipeline, tile_channel, 1, GROUPS,
                           IN_TURNS, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES, SPLIT_HEADS)),
                (_attend, (tensors, strides, scales, window, flags, q_2, kv_pipeline, tile_channel, 2, GROUPS,
                           IN_TURNS, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES, SPLIT_HEADS)),
                (_load, (key_desc, value_desc, rows, steps, loaded, tile_channel, PAGE_SIZE, TMA_ROWS, BLOCK_N, DIM,
                         DIM_VO, SPLIT_HEADS, RAW_STAGES)),
                (_take_tiles, (rows, spans, listed, window, counters, tile_channel, CHUNK, LOCAL, PAGE_SIZE, TMA_ROWS,
                               KV_HEADS, GROUP, GROUPS, BLOCK_N, SPLIT)),
            ],
            [4, 4, 1, 1],
            [160, 160, 24, 24],
        )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _span(  # type: ignore[no-untyped-def]
    query_len,
    first,
    seq_len,
    window,
    CHUNK: gl.constexpr,
    LOCAL: gl.constexpr,
    GROUP: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """The blocks of a tile of TILE queries from a row's query `first` on, token times group plus query head.

    Returns the first key of its blocks, how many blocks there are, and, as they are taken from the last on, which is
    the first that all queries see whole, and which the first after those."""
    window_right, window_left = window
    context = seq_len - query_len
    oldest, newest = context + first // GROUP, context + (first + (TILE - 1)) // GROUP  # positions
    start = first_key(oldest, window_left, CHUNK) // BLOCK_N * BLOCK_N
    stop = gl.minimum(seq_len, newest + 1 + window_right)
    if first >= query_len * GROUP:
        stop = start
    num_blocks = gl.maximum(stop - start + BLOCK_N - 1, 0) // BLOCK_N
    upper, lower = num_blocks, num_blocks
    if LOCAL == 2:
        newest = gl.minimum(newest, seq_len - 1)
        seen_from, seen_to = seen_by_all(oldest, newest, seq_len, window_right, window_left, CHUNK)
        upper -= gl.maximum(seen_to - start, 0) // BLOCK_N
        lower = gl.maximum(upper, num_blocks - (gl.maximum(seen_from - start, 0) + BLOCK_N - 1) // BLOCK_N)
    elif LOCAL == 0:
        upper -= gl.maximum(gl.minimum(seq_len, oldest + 1 + window_right) - start, 0) // BLOCK_N
    return start, num_blocks, upper, lower


@gluon.jit  # type: ignore[untyped-decorator]
def _take_tiles(  # type: ignore[no-untyped-def]
    rows,
    spans,
    listed,
    window,
    counters,
    tile_channel,
    CHUNK: gl.constexpr,
    LOCAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    TMA_ROWS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """One warp takes a tile once the one before is nearly loaded, and publishes it.

    Taken sooner, tiles would go to programs that are busy with a long one as often as to others. Behind a tile of few
    blocks, which takes no longer than it takes to look up another, it does not wait to take it.
    """
    TILE: gl.constexpr = GROUPS * BLOCK_M
    _info_smem, _ids_smem, _info_full, info_empty = tile_channel
    num_programs = gl.num_programs(0)
    if SPLIT == 0:
        num_tiles = _count_tiles(rows, spans, GROUP, TILE)
    tile, nth, head, begin, before = gl.program_id(0), 0, 0, 0, 0
    was_short = tile < 0
    while head >= 0:
        if SPLIT:
            at, part = _load_item(tile, listed, KV_HEADS)
        else:
            at, begin, before = _look_up(tile, num_tiles, begin, before, rows, spans, KV_HEADS, GROUP, TILE)
        row, head, first_token, query_len, first, seq_len = at
        span = _span(query_len, first, seq_len, window, CHUNK, LOCAL, GROUP, TILE, BLOCK_N)
        if SPLIT:
            span = _part_of(span, part, BLOCK_N)
        start, num_blocks, upper, lower = span
        ids = _page_ids(rows, row, start + (num_blocks - 1) * BLOCK_N, seq_len, PAGE_SIZE, TMA_ROWS)
        if PAGE_SIZE == 0:
            row = gl.load(rows[2] + row)
        tile_info = (head, row, start, num_blocks, seq_len, upper, lower, first_token, query_len, first)
        if was_short:
            mbarrier.wait(info_empty.index(0), (nth - 1) & 1)
        _publish(tile_channel, tile_info, ids, PAGE_SIZE)
        was_short = num_blocks <= SHORT_TILE
        if not was_short:
            mbarrier.wait(info_empty.index(0), nth & 1)
        nth += 1
        tile = gl.atomic_add(counters, 1, sem="relaxed") + num_programs
    if gl.atomic_add(counters + 1, 1, sem="relaxed") == num_programs - 1:  # for the next launch
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    key_desc,
    value_desc,
    rows,
    steps,
    kv_pipeline,
    tile_channel,
    PAGE_SIZE: gl.constexpr,
    TMA_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    DIM_VO: gl.constexpr,
    SPLIT_HEADS: gl.constexpr,
    RAW_STAGES: gl.constexpr,
):
    """One warp asks for every block's keys and values once their stage is empty.

    It tells that it has consumed a tile once it has LEAD of its blocks still to ask for: then the next one is taken.
    """
    info_empty = tile_channel[3]
    tile_info, ids = _read_info(tile_channel, 0, PAGE_SIZE)
    num_tiles, done = 0, 0
    COLUMNS: gl.constexpr = 2 if RAW_STAGES else 1  # of the head that one of the descriptor has
    APART: gl.constexpr = 0 if RAW_STAGES else num_accs(DIM_VO) - 1
    while tile_info[0] >= 0:
        _load_blocks(tile_info, ids, done, key_desc, value_desc, rows, steps, kv_pipeline, info_empty, PAGE_SIZE,
                     TMA_ROWS, BLOCK_N, DIM // COLUMNS, DIM_VO // COLUMNS, APART, SPLIT_HEADS)  # fmt: skip
        done += tile_info[3]
        num_tiles += 1
        tile_info, ids = _read_info(tile_channel, num_tiles, PAGE_SIZE)
    mbarrier.arrive(info_empty.index(0))


@gluon.jit  # type: ignore[untyped-decorator]
def _load_item(program, listed, KV_HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """What `_look_up` finds for a tile, of an item of a list; and which of its tile's splits it is, and their number.

    The head of one of several splits comes with its partial slot: KV_HEADS are added once for each slot up to there.
    """
    work_items, max_items = listed
    work_item = program // KV_HEADS
    at = work_items + gl.minimum(work_item, max_items - 1) * 8
    row, num_splits, split, first_slot = gl.load(at), gl.load(at + 5), gl.load(at + 6), gl.load(at + 7)
    head = program % KV_HEADS + gl.where(num_splits > 1, first_slot + split + 1, 0) * KV_HEADS
    head = gl.where((work_item < max_items) & (row >= 0), head, -1)
    row = gl.maximum(row, 0)  # whose page ids are loaded, whether anything is attended or not
    return (row, head, gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)), (split, num_splits)


@gluon.jit  # type: ignore[untyped-decorator]
def _part_of(span, part, BLOCK_N: gl.constexpr):  # type: ignore[no-untyped-def]
    """A split's blocks of a tile's span, as `_span` has them."""
    start, num_blocks, upper, lower = span
    split, num_splits = part
    begin, end = num_blocks * split // num_splits, num_blocks * (split + 1) // num_splits
    count, after = end - begin, num_blocks - end
    upper = gl.minimum(gl.maximum(upper - after, 0), count)
    lower = gl.minimum(gl.maximum(lower - after, 0), count)
    return start + begin * BLOCK_N, count, upper, lower


@gluon.jit  # type: ignore[untyped-decorator]
def _look_up(  # type: ignore[no-untyped-def]
    program, num_tiles, begin, before, rows, spans, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr
):
    """A tile's row and head, the row's first query token and their number, which of its queries is the tile's first,
    and the row's length; a head of -1 behind the last tile. It looks among WARP_SIZE rows at a time, first among those
    from the `begin`th on, which have `before` tiles in front; also returns where it found the tile."""
    seq_lens, query_start_loc, _, _, _ = rows
    first_row, num_rows, section = spans
    last = num_tiles * KV_HEADS - 1
    head, tile = tile_of(gl.minimum(program, last), gl.maximum(num_tiles, 1), section, KV_HEADS)
    if tile < before:
        begin, before = begin * 0, before * 0
    counts = _tile_counts(rows, spans, begin, GROUP, TILE)
    while (begin + WARP_SIZE < num_rows) & (before + gl.sum(counts, 0) <= tile):
        before += gl.sum(counts, 0)
        begin += WARP_SIZE
        counts = _tile_counts(rows, spans, begin, GROUP, TILE)
    ends = before + gl.associative_scan(counts, 0, _add)
    row = first_row + gl.minimum(begin + gl.sum((ends <= tile).to(gl.int32), 0), num_rows - 1)
    first_of_row = gl.max(gl.where(ends <= tile, ends, before), 0)
    first_token = gl.load(query_start_loc + row)
    query_len = gl.load(query_start_loc + row + 1) - first_token
    head = gl.where(program > last, -1, head)
    at = (row, head, first_token, query_len, (tile - first_of_row) * TILE, gl.load(seq_lens + row))
    return at, begin, before


@gluon.jit  # type: ignore[untyped-decorator]
def _count_tiles(rows, spans, GROUP: gl.constexpr, TILE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Number of tiles of all rows, for one KV head."""
    l_i = 0
    for begin in range(0, spans[1], WARP_SIZE):
        l_i += gl.sum(_tile_counts(rows, spans, begin, GROUP, TILE), 0)
    return l_i


@gluon.jit  # type: ignore[untyped-decorator]
def _tile_counts(  # type: ignore[no-untyped-def]
    rows, spans, begin, GROUP: gl.constexpr, TILE: gl.constexpr
):
    """Number of tiles [WARP_SIZE] i32 of rows from the `begin`th on; 0 after the last."""
    nth = begin + gl.arange(0, WARP_SIZE, LANE_LAYOUT)
    starts, there = rows[1] + spans[0] + nth, nth < spans[1]
    lens = gl.load(starts + 1, mask=there, other=0) - gl.load(starts, mask=there, other=0)
    return (lens * GROUP + (TILE - 1)) // TILE


@gluon.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit  # type: ignore[untyped-decorator]
def _publish(tile_channel, tile_info, ids, PAGE_SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Publish a tile's NUM_FIELDS numbers and its first page ids, once all have consumed the one before."""
    info_smem, ids_smem, info_full, _info_empty = tile_channel
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(NUM_FIELDS):
        info_smem.index(i).store(gl.full([1], 0, gl.int32, ONE) + tile_info[i])
    if PAGE_SIZE != 0:
        ids_smem.index(0).store(ids)
    barrier()
    mbarrier.arrive(info_full.index(0))


@gluon.jit  # type: ignore[untyped-decorator]
def _consume(tile_channel, nth, PAGE_SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Read the program's nth tile, and tell that this is done."""
    tile_info, ids = _read_info(tile_channel, nth, PAGE_SIZE)
    mbarrier.arrive(tile_channel[3].index(0))
    return tile_info, ids


@gluon.jit  # type: ignore[untyped-decorator]
def _read_info(tile_channel, nth, PAGE_SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the program's nth tile, and return its `tile_info` and, for one warp, its first page ids.

    A `tile_info` is the tile's head, its row or, without pages, where its keys start, its span (see `_span`) with the
    row's length between, the row's first query token and their number, and which query is the tile's first: token times
    group plus query head. With SPLIT the first number is what `_load_item` makes of the head.
    """
    info_smem, ids_smem, info_full, _info_empty = tile_channel
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(info_full.index(0), nth & 1)
    tile_info = ()
    for i in gl.static_range(NUM_FIELDS):
        tile_info = tile_info + (gl.sum(info_smem.index(i).load(ONE), 0),)  # type: ignore[assignment]  # noqa: RUF005
    ids = nth
    if PAGE_SIZE != 0:
        ids = ids_smem.index(0).load(LANE_LAYOUT)
    barrier()
    return tile_info, ids


@gluon.jit  # type: ignore[untyped-decorator]
def _load_blocks(  # type: ignore[no-untyped-def]
    tile_info,
    ids,
    done,
    key_desc,
    value_desc,
    rows,
    steps,
    kv_pipeline,
    info_empty,
    PAGE_SIZE: gl.constexpr,
    TMA_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    DIM_VO: gl.constexpr,
    APART: gl.constexpr,
    SPLIT_HEADS: gl.constexpr,
):
    """Load a tile's blocks, the last one first, whose pages are `ids`; `done` blocks of other tiles came before."""
    keys, values, full, empty = kv_pipeline
    K_STAGES: gl.constexpr = full[0].shape[0]
    V_STAGES: gl.constexpr = full[1].shape[0]
    head, row, start, num_blocks, seq_len = tile_info[:5]
    head = _head_of(head, SPLIT_HEADS)
    page_rows, head_rows, key_head, value_head, num_batches = steps
    at_row = head * head_rows
    if PAGE_SIZE == 0:
        at_row += row
    if num_blocks < LEAD:
        mbarrier.arrive(info_empty.index(0))
    for block in range(done, done + num_blocks):
        left = num_blocks - (block - done)
        if left == LEAD:
            mbarrier.arrive(info_empty.index(0))
        k_stage, v_stage = block % K_STAGES, block % V_STAGES
        first = start + (left - 1) * BLOCK_N
        of_block = (at_row, first, ids, page_rows, num_batches)
        mbarrier.wait(empty[0].index(k_stage), block // K_STAGES & 1 ^ 1)
        _load_block(key_desc, head * key_head, k_stage, of_block, full[0].index(k_stage), keys, PAGE_SIZE, TMA_ROWS,
                    BLOCK_N, DIM, 0)  # fmt: skip
        # These come while this block waits.
        next_ids = _page_ids(rows, row, first - BLOCK_N, seq_len, PAGE_SIZE, TMA_ROWS)
        mbarrier.wait(empty[1].index(v_stage), block // V_STAGES & 1 ^ 1)
        _load_block(value_desc, head * value_head, v_stage, of_block, full[1].index(v_stage), values, PAGE_SIZE,
                    TMA_ROWS, BLOCK_N, DIM_VO, APART)  # fmt: skip
        ids = next_ids


@gluon.jit  # type: ignore[untyped-decorator]
def _page_ids(  # type: ignore[no-untyped-def]
    rows,
    row,
    first,
    seq_len,
    PAGE_SIZE: gl.constexpr,
    TMA_ROWS: gl.constexpr,
):
    """Page ids of the block from key `first` on. Keys that do not lie in pages have none."""
    _seq_lens, _query_start_loc, _key_start_loc, page_table, table_row = rows
    ids = first
    if PAGE_SIZE != 0:
        ids = page_ids(page_table + row.to(gl.int64) * table_row, first, seq_len, PAGE_SIZE, TMA_ROWS)
    return ids


@gluon.jit  # type: ignore[untyped-decorator]
def _load_block(  # type: ignore[no-untyped-def]
    desc,
    at_head,
    stage,
    of_block,
    full_barrier,
    to,
    PAGE_SIZE: gl.constexpr,
    TMA_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WIDTH: gl.constexpr,
    APART: gl.constexpr,
):
    """Load keys or values of a block, BATCH TMA tiles of all columns at a time.

    The last TMA tile of a WIDTH that is no multiple of its columns holds zeros behind the head's, whatever lies there:
    such a descriptor has heads of its own. With APART the last columns of all stages lie behind the others of all.
    """
    at_row, first, ids, page_rows, num_batches = of_block
    TMA_TILES: gl.constexpr = BLOCK_N // TMA_ROWS
    AT_ONCE: gl.constexpr = TMA_TILES if TMA_TILES < BATCH else BATCH
    mbarrier.expect(full_barrier, TMA_TILES * column_tiles(WIDTH) * desc.block_type.nbytes)
    COLUMN_TILES: gl.constexpr = column_tiles(WIDTH)
    TOGETHER: gl.constexpr = COLUMN_TILES - APART
    STAGES: gl.constexpr = to.shape[0] // COLUMN_TILES
    ALL: gl.constexpr = to.shape[0] * TMA_TILES
    if WIDTH % TMA_COLS == 0:
        tiles = to._reinterpret(to.dtype, [ALL, TMA_ROWS, TMA_COLS], BLOCK_LAYOUT)
    else:
        tiles = to._reinterpret(to.dtype, [ALL, TMA_ROWS, 1, TMA_COLS], HEAD_LAYOUT)
    for batch in range(num_batches):
        for i in gl.static_range(AT_ONCE):
            nth = batch * AT_ONCE + i
            row = at_row + first + nth * TMA_ROWS
            if PAGE_SIZE != 0:
                row = at_row + nth_of(ids, nth) * page_rows + (first + nth * TMA_ROWS) % PAGE_SIZE
            for column_tile in gl.static_range(COLUMN_TILES):
                to_tile = tiles.index(_place_of(stage, column_tile, STAGES, TOGETHER) * TMA_TILES + nth)
                if WIDTH % TMA_COLS == 0:
                    at = [row, at_head + column_tile * TMA_COLS]
                else:
                    at = [row, at_head, column_tile * TMA_COLS]
                tma.async_copy_global_to_shared(desc, at, full_barrier, to_tile)


@gluon.jit  # type: ignore[untyped-decorator]
def _place_of(  # type: ignore[no-untyped-def]
    stage, column_tile: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr
):
    """Where a stage's columns lie: the first so many tiles of them together, one more behind those of all stages."""
    return stage * TOGETHER + column_tile if column_tile < TOGETHER else STAGES * TOGETHER + stage


@gluon.jit  # type: ignore[untyped-decorator]
def _make_16_bits(  # type: ignore[no-untyped-def]
    loaded,
    kv_pipeline,
    tile_channel,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    DIM_VO: gl.constexpr,
    E5M2: gl.constexpr,
):
    """Four warps make 16 bits of every block's keys and values of 8, which have come, once their stage is empty."""
    raw_keys, raw_values, raw_full, raw_empty = loaded
    keys, values, full, empty = kv_pipeline
    tile_info, _ids = _consume(tile_channel, 0, 0)
    num_tiles, done = 0, 0
    while tile_info[0] >= 0:
        for block in range(done, done + tile_info[3]):
            _make_block(raw_keys, keys, raw_full[0], raw_empty[0], full[0], empty[0], block, BLOCK_N, DIM, 0, E5M2)
            _make_block(raw_values, values, raw_full[1], raw_empty[1], full[1], empty[1], block, BLOCK_N, DIM_VO,
                        num_accs(DIM_VO) - 1, E5M2)  # fmt: skip
        num_tiles += 1
        done += tile_info[3]
        tile_info, _ids = _consume(tile_channel, num_tiles, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _make_block(  # type: ignore[no-untyped-def]
    raw,
    to,
    raw_full,
    raw_empty,
    full,
    empty,
    block,
    BLOCK_N: gl.constexpr,
    WIDTH: gl.constexpr,
    APART: gl.constexpr,
    E5M2: gl.constexpr,
):
    """Make 16 bits of a block's keys or values, TMA_COLS columns at a time, which are half of what a TMA tile has."""
    COALESCED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    OF_DTYPE: gl.constexpr = gl.float8e5 if E5M2 else gl.float8e4nv
    RAW_STAGES: gl.constexpr = raw_full.shape[0]
    STAGES: gl.constexpr = full.shape[0]
    RAW_TILES: gl.constexpr = column_tiles(WIDTH // 2)
    raw_stage, stage = block % RAW_STAGES, block % STAGES
    mbarrier.wait(raw_full.index(raw_stage), block // RAW_STAGES & 1)
    mbarrier.wait(empty.index(stage), block // STAGES & 1 ^ 1)
    raw_bytes = raw._reinterpret(OF_DTYPE, [RAW_STAGES * RAW_TILES, BLOCK_N, 2 * TMA_COLS], BYTE_LAYOUT)
    for column_tile in gl.static_range(column_tiles(WIDTH)):
        of_tile = raw_bytes.index(raw_stage * RAW_TILES + column_tile // 2)
        some = of_tile.slice(column_tile % 2 * TMA_COLS, TMA_COLS, 1).load(COALESCED)
        to_tile = to.index(_place_of(stage, column_tile, STAGES, column_tiles(WIDTH) - APART))
        to_tile.store(some.to(to.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(raw_empty.index(raw_stage))
    mbarrier.arrive(full.index(stage))


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    tensors,
    strides,
    scales,
    window,
    flags,
    q,
    kv_pipeline,
    tile_channel,
    warp_group: gl.constexpr,
    GROUPS: gl.constexpr,
    IN_TURNS: gl.constexpr,
    CHUNK: gl.constexpr,
    LOCAL: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    DIM_VO: gl.constexpr,
    Q_STAGES: gl.constexpr,
    SPLIT_HEADS: gl.constexpr,
):
    """A warp group attends for 64 queries of every tile. Those of the next come while the last values of this one are
    added up."""
    tile_info, _ids = _consume(tile_channel, 0, 0)
    _prefetch_queries(q, 0, tile_info, tensors, strides, warp_group, GROUP, DIM, SPLIT_HEADS)
    num_tiles, done = 0, 0
    TURN: gl.constexpr = warp_group if IN_TURNS else -1
    if TURN == 1:
        pass_turn(TURN)  # the other group's is the first
    while tile_info[0] >= 0:
        async_copy.wait_group(0)
        q_scales = _scale_queries(q, num_tiles % Q_STAGES, kv_pipeline[0].dtype, BLOCK_N, DIM)
        fence_async_shared()
        barrier()
        num_tiles += 1
        if tile_info[9] + warp_group * BLOCK_M < tile_info[8] * GROUP:
            next_tile_info = _attend_tile(
                tile_info, tile_channel, num_tiles, done, tensors, strides, scales, window, flags, q, q_scales,
                kv_pipeline, warp_group, GROUPS, TURN, CHUNK, LOCAL, GROUP, BLOCK_N, DIM, DIM_VO, Q_STAGES,
                SPLIT_HEADS,
            )  # fmt: skip
        else:
            _let_pass(kv_pipeline, done, tile_info[3], TURN)
            next_tile_info = _next_tile(q, tile_channel, num_tiles, tensors, strides, warp_group, GROUP, DIM,
                                        Q_STAGES, SPLIT_HEADS)  # fmt: skip
        done += tile_info[3]
        tile_info = next_tile_info
    if TURN == 0:
        take_turn(TURN)  # which the other group has passed last


@gluon.jit  # type: ignore[untyped-decorator]
def _scale_queries(  # type: ignore[no-untyped-def]
    q, q_stage, as_dtype: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr
):
    """Make a stage's bfloat16 queries float16 in their place, if keys are, each thread those that it has copied: each
    query divided by its largest element, which products of it are to be multiplied by. Returns these, [BLOCK_M] f32, in
    a tuple, or an empty one."""
    q_scales = ()
    if q.dtype != as_dtype:
        LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
        COALESCED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        as_fp16 = q._reinterpret(as_dtype, q.shape, BLOCK_LAYOUT)
        at = q_stage * column_tiles(DIM)
        q_scale = row_amax(q.index(at).load(COALESCED))
        for i in gl.static_range(1, column_tiles(DIM)):
            q_scale = gl.maximum(q_scale, row_amax(q.index(at + i).load(COALESCED)))
        for i in gl.static_range(column_tiles(DIM)):
            as_fp16.index(at + i).store(scale_to_fp16(q.index(at + i).load(COALESCED), q_scale))
        q_scales = q_scales + (gl.convert_layout(q_scale, gl.SliceLayout(1, LOGITS)),)  # type: ignore[assignment]  # noqa: RUF005
    return q_scales


@gluon.jit  # type: ignore[untyped-decorator]
def _let_pass(kv_pipeline, done, num_blocks, TURN: gl.constexpr):  # type: ignore[no-untyped-def]
    """Give back a tile's blocks, and its turns, which a warp group without queries has no use for, as soon as each has
    come."""
    _keys, _values, full, empty = kv_pipeline
    for block in range(done, done + num_blocks):
        take_turn(TURN)
        pass_turn(TURN)
        for i in gl.static_range(2):
            stage, round_ = block % full[i].shape[0], block // full[i].shape[0]
            mbarrier.wait(full[i].index(stage), round_ & 1)
            barrier()
            mbarrier.arrive(empty[i].index(stage))


@gluon.jit  # type: ignore[untyped-decorator]
def _attend_tile(  # type: ignore[no-untyped-def]
    tile_info,
    tile_channel,
    num_tiles,
    done,
    tensors,
    strides,
    scales,
    window,
    flags,
    q,
    q_scales,
    kv_pipeline,
    warp_group: gl.constexpr,
    GROUPS: gl.constexpr,
    TURN: gl.constexpr,  # see `take_turn`
    CHUNK: gl.constexpr,
    LOCAL: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    DIM_VO: gl.constexpr,
    Q_STAGES: gl.constexpr,
    SPLIT_HEADS: gl.constexpr,
):
    """Attend for 64 of a tile's queries, which lie in `q`, and return the next tile's `tile_info`; it is the
    program's `num_tiles`th. With one stage of queries those of the next tile take their place as soon as the last
    logits are there."""
    q_stage = (num_tiles - 1) % Q_STAGES
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    window_right, window_left = window
    scale, _value_scale = scales
    _head, _row, start, num_blocks, seq_len, upper, lower, _first_token, query_len, first = tile_info

    token, _q_head = _token_and_head(first, warp_group, GROUP, ROW)
    position = seq_len - query_len + token
    low = first_key(position, window_left, CHUNK)
    high = gl.minimum(position + window_right, gl.maximum(position, 0) // CHUNK * CHUNK + (CHUNK - 1))
    high = gl.minimum(high, seq_len - 1)
    last = start + (num_blocks - 1) * BLOCK_N

    keys, values, full, empty = kv_pipeline
    V_STAGES: gl.constexpr = full[1].shape[0]
    acc = _zero_acc(DIM_VO)
    m_i = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW)
    l_i = lane_sums(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS))
    if num_blocks > 0:
        if last + BLOCK_N > seq_len:
            mbarrier.wait(full[1].index(done % V_STAGES), done // V_STAGES & 1)
            _clear_values(values, done % V_STAGES, seq_len - last, BLOCK_N, BLOCK_N, DIM_VO)
        BOTH: gl.constexpr = BEHIND + BEFORE
        FIRST: gl.constexpr = BOTH if LOCAL else BEHIND  # of a split it may be any
        NEWEST: gl.constexpr = BOTH if LOCAL == 1 or CHUNK < FAR else BEHIND
        q_read = q._reinterpret(keys.dtype, q.shape, BLOCK_LAYOUT)
        logits = _logits(q_read, q_stage, keys, full[0], done, LOGITS, TURN, BLOCK_N, DIM)
        pass_turn(TURN)
        logits = warpgroup_mma_wait(0, deps=(logits,))
        barrier()
        mbarrier.arrive(empty[0].index(done % full[0].shape[0]))
        logits = _times_scales(logits, q_scales)
        p, m_i, l_i, _alpha = online_softmax(_masked(logits, last, low, high, FIRST, DIM_VO), m_i, l_i, scale)
        state = (_handed_on(p, values.dtype, GROUPS), acc, m_i, l_i)
        at = (q_read, q_stage, q_scales, kv_pipeline, values, done)
        upper, lower = gl.maximum(upper, 1), gl.maximum(lower, 1)
        state = _blocks(state, at, 1, upper, last, low, high, scale, NEWEST, GROUPS, TURN, BLOCK_N, DIM,
                        DIM_VO)  # fmt: skip
        state = _blocks(state, at, upper, lower, last, low, high, scale, 0, GROUPS, TURN, BLOCK_N, DIM,
                        DIM_VO)  # fmt: skip
        if LOCAL == 2:
            state = _blocks(state, at, lower, num_blocks, last, low, high, scale, BEFORE, GROUPS, TURN,
                            BLOCK_N, DIM, DIM_VO)  # fmt: skip
        next_tile_info = _next_tile(q, tile_channel, num_tiles, tensors, strides, warp_group, GROUP, DIM,
                                    Q_STAGES, SPLIT_HEADS)  # fmt: skip
        p, acc, m_i, l_i = state
        stage, phase = (done + num_blocks - 1) % V_STAGES, (done + num_blocks - 1) // V_STAGES & 1
        mbarrier.wait(full[1].index(stage), phase)
        if LOCAL:
            unseen = first_key(seq_len - query_len + first // GROUP, window_left, CHUNK) - start
            if unseen > 0:
                _clear_values(values, stage, 0, unseen, BLOCK_N, DIM_VO)
        acc = _add_values(_operands(p, values.dtype, acc, DIM_VO), values, stage, acc, BLOCK_N, DIM_VO)
        acc = _wait_for_values(acc, DIM_VO)
        barrier()
        mbarrier.arrive(empty[1].index(stage))
    else:
        next_tile_info = _next_tile(q, tile_channel, num_tiles, tensors, strides, warp_group, GROUP, DIM,
                                    Q_STAGES, SPLIT_HEADS)  # fmt: skip

    l_i = row_sums(l_i, ROW)
    if SPLIT_HEADS:
        slot = tile_info[0] - SPLIT_HEADS
        if slot >= 0:
            _store_partial(tile_info, slot, acc, m_i * scale, l_i, tensors, warp_group, GROUPS, GROUP,
                           DIM_VO)  # fmt: skip
        else:
            _write_tile(tile_info, q_stage, acc, m_i, l_i, tensors, strides, scales, flags, q, warp_group, GROUP,
                        DIM, DIM_VO, Q_STAGES)  # fmt: skip
    else:
        _write_tile(tile_info, q_stage, acc, m_i, l_i, tensors, strides, scales, flags, q, warp_group, GROUP,
                    DIM, DIM_VO, Q_STAGES)  # fmt: skip
    return next_tile_info


@gluon.jit  # type: ignore[untyped-decorator]
def _clear_values(  # type: ignore[no-untyped-def]
    values, stage, begin, end, BLOCK_N: gl.constexpr, DIM_VO: gl.constexpr
):
    """Zeros for values of keys `begin` to `end` of a block, which no query of the tile sees. All warp groups write the
    same."""
    for i in gl.static_range(num_accs(DIM_VO)):
        clear_rows(_values_of(values, stage, i, BLOCK_N, DIM_VO), begin, end)
    fence_async_shared()
    barrier()


@gluon.jit  # type: ignore[untyped-decorator]
def _next_tile(  # type: ignore[no-untyped-def]
    q,
    tile_channel,
    nth,
    tensors,
    strides,
    warp_group: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    Q_STAGES: gl.constexpr,
    SPLIT_HEADS: gl.constexpr,
):
    """The `tile_info` of the program's nth tile, whose queries are asked for. All threads have seen the last logits of
    the one before, so that its queries' place is free."""
    tile_info, _ids = _consume(tile_channel, nth, 0)
    _prefetch_queries(q, nth % Q_STAGES, tile_info, tensors, strides, warp_group, GROUP, DIM, SPLIT_HEADS)
    return tile_info


@gluon.jit  # type: ignore[untyped-decorator]
def _head_of(head, SPLIT_HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The head, without the partial slot; SPLIT_HEADS are the KV heads, or 0 where no tile is split."""
    if SPLIT_HEADS:
        head %= SPLIT_HEADS
    return head


@gluon.jit  # type: ignore[untyped-decorator]
def _token_and_head(  # type: ignore[no-untyped-def]
    first, warp_group: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr
):
    """[BLOCK_M]: query tokens of a row and query heads of the KV head, of a warp group's queries in a tile that begins
    with the row's query `first`. A tile may begin and end in the middle of a token, so that none of its rows are left
    empty by groups that are no power of two."""
    lane = warp_group * BLOCK_M + gl.arange(0, BLOCK_M, LAYOUT)
    if BLOCK_M % GROUP == 0:  # all tiles begin with a token: less is worked out for each query
        return first // GROUP + lane // GROUP, lane % GROUP
    else:
        return (first + lane) // GROUP, (first + lane) % GROUP


@gluon.jit  # type: ignore[untyped-decorator]
def _store_partial(  # type: ignore[no-untyped-def]
    tile_info,
    slot,
    acc,
    m_i,
    l_i,
    tensors,
    warp_group: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM_VO: gl.constexpr,
):
    """Store what a split's keys gave for 64 of a tile's queries: sums [GROUPS * 64, a power of two of columns] f32 in
    its slot, behind them each query's highest logit in base 2 and its sum of weights."""
    ROW: gl.constexpr = m_i.type.layout
    WIDE: gl.constexpr = acc_width(DIM_VO, 0)
    _query, _output, _lse, _sinks, partial_acc, partial_ml = tensors
    query_len, first = tile_info[8], tile_info[9]
    lane = warp_group * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
    live = first + lane < query_len * GROUP
    at = slot.to(gl.int64) * (GROUPS * BLOCK_M) + lane
    gl.store(partial_ml + at * 2, m_i, mask=live)
    gl.store(partial_ml + at * 2 + 1, l_i, mask=live)
    for i in gl.static_range(num_accs(DIM_VO)):
        write_rows(partial_acc + at * (WIDE * num_accs(DIM_VO)) + i * WIDE, acc[i], gl.full_like(l_i, 1.0), live)


@gluon.jit  # type: ignore[untyped-decorator]
def _write_tile(  # type: ignore[no-untyped-def]
    tile_info,
    q_stage,
    acc,
    m_i,
    l_i,
    tensors,
    strides,
    scales,
    flags,
    q,
    warp_group: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    DIM_VO: gl.constexpr,
    Q_STAGES: gl.constexpr,
):
    """Write outputs and LSEs of 64 of a tile's queries. Nobody wants their place in `q` any more, but of one stage the
    next ones are on their way to it."""
    ROW: gl.constexpr = m_i.type.layout
    _query, output, lse, sinks, _partial_acc, _partial_ml = tensors
    _query_token, _query_head, out_token, out_head, lse_token = strides
    has_sinks, want_lse = flags
    scale, value_scale = scales
    head, first_token, query_len, first = tile_info[0], tile_info[7], tile_info[8], tile_info[9]
    token, q_head = _token_and_head(first, warp_group, GROUP, ROW)
    live = token < query_len
    q_head += head * GROUP
    at = (first_token + token).to(gl.int64)
    saw = l_i > 0
    m_i *= scale
    sink = gl.load(sinks + q_head, mask=live & (has_sinks != 0), other=float("-inf")) * LOG2_E
    higher = gl.maximum(m_i, sink)
    alpha = gl.exp2(m_i - higher)
    l_i = l_i * alpha + gl.exp2(sink - higher)
    share = gl.where(saw, value_scale * alpha / gl.where(saw, l_i, 1.0), 0.0)
    if Q_STAGES == 1 and acc_width(DIM_VO, 0) == DIM_VO:
        write_rows_by_shuffles(output + at * out_token + q_head * out_head, acc[0], share, live)
    elif Q_STAGES > 1 and column_tiles(DIM) * TMA_COLS == acc_width(DIM_VO, 0):  # as wide as the tile's queries
        WIDE: gl.constexpr = acc_width(DIM_VO, 0)
        COALESCED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [gl.num_warps(), 1], [1, 0])
        token_of_row, head_of_row = _token_and_head(first, warp_group, GROUP, gl.SliceLayout(1, COALESCED))
        to = output + (first_token + token_of_row).to(gl.int64) * out_token + (head * GROUP + head_of_row) * out_head
        smem = q._reinterpret(q.dtype, [Q_STAGES, BLOCK_M, WIDE], BLOCK_LAYOUT).index(q_stage)
        write_rows_by_smem(to, acc[0], share, token_of_row < query_len, smem, DIM_VO)
    else:
        to = output + at * out_token + q_head * out_head
        for i in gl.static_range(num_accs(DIM_VO)):
            write_rows(to + i * acc_width(DIM_VO, 0), acc[i], share, live)
    if want_lse != 0:
        log_sum = (higher + gl.log2(gl.where(saw, l_i, 1.0))) * LN_2
        gl.store(lse + at * lse_token + q_head, gl.where(saw, log_sum, float("-inf")), mask=live)


@gluon.jit  # type: ignore[untyped-decorator]
def _blocks(  # type: ignore[no-untyped-def]
    state,
    at,
    begin,
    end,
    last,
    low,
    high,
    scale,
    MASK: gl.constexpr,
    GROUPS: gl.constexpr,
    TURN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    DIM_VO: gl.constexpr,
):
    """Work out the weights of blocks `begin` to `end`, and add the values of those from `begin` - 1 to `end` - 1."""
    p, acc, m_i, l_i = state
    q, q_stage, q_scales, kv_pipeline, values, done = at
    LOGITS: gl.constexpr = m_i.type.layout.parent
    keys, _, full, empty = kv_pipeline
    K_STAGES: gl.constexpr = full[0].shape[0]
    V_STAGES: gl.constexpr = full[1].shape[0]
    for block in range(begin, end):
        before = done + block - 1
        operands = _operands(p, values.dtype, acc, DIM_VO)  # values of 16 bits that a loop hands on are taken apart
        pending = _logits(q, q_stage, keys, full[0], before + 1, LOGITS, TURN, BLOCK_N, DIM)
        mbarrier.wait(full[1].index(before % V_STAGES), before // V_STAGES & 1)
        acc_pending = _add_values(operands, values, before % V_STAGES, acc, BLOCK_N, DIM_VO)
        pass_turn(TURN)
        logits = warpgroup_mma_wait(num_accs(DIM_VO), deps=(pending,))
        barrier()
        mbarrier.arrive(empty[0].index((before + 1) % K_STAGES))
        logits = _times_scales(logits, q_scales)
        if MASK:
            logits = _masked(logits, last - block * BLOCK_N, low, high, MASK, DIM_VO)
        p, m_i, l_i, alpha = online_softmax(logits, m_i, l_i, scale)
        # These values have come. But where ptxas sees no branch, it waits for their product in front of the weights.
        mbarrier.wait(full[1].index(before % V_STAGES), before // V_STAGES & 1)
        acc = _wait_for_values(acc_pending, DIM_VO)
        barrier()
        mbarrier.arrive(empty[1].index(before % V_STAGES))
        acc = _times_rows(acc, alpha, DIM_VO)
        p = _handed_on(p, values.dtype, GROUPS)
    return p, acc, m_i, l_i


@gluon.jit  # type: ignore[untyped-decorator]
def _zero_acc(DIM_VO: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of values, [BLOCK_M, columns] f32 for each part of them."""
    acc = ()
    for i in gl.static_range(num_accs(DIM_VO)):
        acc = acc + (_zeros(acc_width(DIM_VO, i)),)  # type: ignore[assignment]  # noqa: RUF005
    return acc


@gluon.jit  # type: ignore[untyped-decorator]
def _zeros(WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """What a product adds to, [BLOCK_M, WIDTH] f32."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return gl.zeros([BLOCK_M, WIDTH], gl.float32, ACC)


@gluon.jit  # type: ignore[untyped-decorator]
def _values_of(  # type: ignore[no-untyped-def]
    values, stage, i: gl.constexpr, BLOCK_N: gl.constexpr, DIM_VO: gl.constexpr
):
    """A part of a block's values, [BLOCK_N, columns]: the second, of all stages, lies behind the first."""
    WIDE: gl.constexpr = acc_width(DIM_VO, 0)
    STAGES: gl.constexpr = values.shape[0] // column_tiles(DIM_VO)
    if i == 0:
        part = values._reinterpret(values.dtype, [STAGES, BLOCK_N, WIDE], BLOCK_LAYOUT).index(stage)
    else:
        part = values.index(STAGES * (WIDE // TMA_COLS) + stage)
        if acc_width(DIM_VO, i) < TMA_COLS:
            part = part.slice(0, acc_width(DIM_VO, i), 1)
    return part


@gluon.jit  # type: ignore[untyped-decorator]
def _handed_on(p, of_dtype: gl.constexpr, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A block's weights for the next round: those of three groups of warps, whose threads have the fewest registers,
    in words. Two groups were slower so."""
    if GROUPS == 3:
        p = as_words(p, of_dtype)
    return p


@gluon.jit  # type: ignore[untyped-decorator]
def _operands(p, of_dtype: gl.constexpr, acc, DIM_VO: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights that were handed on, as each part's product wants them."""
    operands = ()
    if p.dtype == gl.int32:
        p = of_words(p, of_dtype)
    for i in gl.static_range(num_accs(DIM_VO)):
        operands = operands + (as_operand(p, of_dtype, acc[i]),)  # type: ignore[assignment]  # noqa: RUF005
    return operands


@gluon.jit  # type: ignore[untyped-decorator]
def _add_values(  # type: ignore[no-untyped-def]
    operands, values, stage, acc, BLOCK_N: gl.constexpr, DIM_VO: gl.constexpr
):
    """Sums with a block's weighted values, under way: a product for each part."""
    pending = ()
    for i in gl.static_range(num_accs(DIM_VO)):
        part = _values_of(values, stage, i, BLOCK_N, DIM_VO)
        pending = pending + (warpgroup_mma(operands[i], part, acc[i], is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
    return pending


@gluon.jit  # type: ignore[untyped-decorator]
def _wait_for_values(pending, DIM_VO: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of values once all products are done."""
    acc = warpgroup_mma_wait(0, deps=pending)
    if num_accs(DIM_VO) == 1:
        acc = (acc,)
    return acc


@gluon.jit  # type: ignore[untyped-decorator]
def _times_rows(acc, row_factors, DIM_VO: gl.constexpr):  # type: ignore[no-untyped-def]
    scaled = ()
    for i in gl.static_range(num_accs(DIM_VO)):
        scaled = scaled + (times_rows(acc[i], row_factors),)  # type: ignore[assignment]  # noqa: RUF005
    return scaled


@gluon.jit  # type: ignore[untyped-decorator]
def _logits(  # type: ignore[no-untyped-def]
    q, q_stage, keys, full, block, LOGITS: gl.constexpr, TURN: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr
):
    """Logits [BLOCK_M, BLOCK_N] of a block, under way, from the group's turn on."""
    STAGES: gl.constexpr = full.shape[0]
    stage = block % STAGES
    logits = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS)
    mbarrier.wait(full.index(stage), block // STAGES & 1)
    take_turn(TURN)
    for i in gl.static_range(num_pieces(DIM)):
        some_keys = _piece_of(keys, stage, i, DIM).permute((1, 0))
        logits = warpgroup_mma(_piece_of(q, q_stage, i, DIM), some_keys, logits, use_acc=i > 0, is_async=True)
    return logits


@gluon.jit
def _times_scales(logits, q_scales):  # type: ignore[no-untyped-def]
    """Logits of queries that may have been divided by their scales."""
    for i in gl.static_range(len(q_scales)):
        logits = times_rows(logits, q_scales[i])
    return logits


@gluon.jit  # type: ignore[untyped-decorator]
def _piece_of(tiles, stage, i: gl.constexpr, DIM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Some columns of a stage's queries or keys."""
    piece = tiles.index(stage * column_tiles(DIM) + piece_start(DIM, i) // TMA_COLS)
    if piece_width(DIM, i) < TMA_COLS:
        piece = piece.slice(piece_start(DIM, i) % TMA_COLS, piece_width(DIM, i), 1)
    return piece


@gluon.jit  # type: ignore[untyped-decorator]
def _masked(  # type: ignore[no-untyped-def]
    logits, first, low, high, MASK: gl.constexpr, DIM_VO: gl.constexpr
):
    """Logits of keys from `first` on, where a query sees them: MASK & BEHIND of those up to `high`, MASK & BEFORE of
    those from `low` on.

    A thread has two columns of every eight: with what it compares less those, all comparisons are with constants. Wide
    sums leave no registers for it.
    """
    if DIM_VO > 128:
        key = gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))
        if MASK & BEHIND:
            logits = gl.where(key[None] <= (high - first)[:, None], logits, float("-inf"))
        if MASK & BEFORE:
            logits = gl.where(key[None] >= (low - first)[:, None], logits, float("-inf"))
        return logits
    else:
        apart = logits.reshape([logits.shape[0], logits.shape[1] // 8, 8])
        OF: gl.constexpr = apart.type.layout
        eighth = gl.arange(0, apart.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, OF))) * 8
        eighth = eighth.expand_dims(0).expand_dims(2)
        if MASK & BEHIND:
            apart = gl.where(eighth <= _apart(high - first, OF), apart, float("-inf"))
        if MASK & BEFORE:
            apart = gl.where(eighth >= _apart(low - first, OF), apart, float("-inf"))
        kept = apart.reshape([logits.shape[0], logits.shape[1]])
        return gl.convert_layout(kept, logits.type.layout, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _apart(key, OF: gl.constexpr):  # type: ignore[no-untyped-def]
    """A key of each query less each of eight columns, [queries, 1, 8]."""
    key = gl.convert_layout(key, gl.SliceLayout(1, gl.SliceLayout(2, OF)), assert_trivial=True)
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, OF)))
    return key.expand_dims(1).expand_dims(2) - column.expand_dims(0).expand_dims(1)


@gluon.jit  # type: ignore[untyped-decorator]
def _prefetch_queries(  # type: ignore[no-untyped-def]
    q,
    q_stage,
    tile_info,
    tensors,
    strides,
    warp_group: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    SPLIT_HEADS: gl.constexpr,
):
    """Start to copy a warp group's queries of a tile to a stage in shared memory.

    What has no query, a row or a column behind the last one, is filled with zeros by the same instruction.
    """
    COALESCED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    head, first_token, query_len, first = tile_info[0], tile_info[7], tile_info[8], tile_info[9]
    query, _output, _lse, _sinks, _partial_acc, _partial_ml = tensors
    query_token, query_head, _out_token, _out_head, _lse_token = strides
    kv_head = _head_of(head, SPLIT_HEADS)
    token, q_head = _token_and_head(first, warp_group, GROUP, gl.SliceLayout(1, COALESCED))
    live = (head >= 0) & (token < query_len)
    at = query + (first_token + token).to(gl.int64) * query_token + (kv_head * GROUP + q_head) * query_head
    column = gl.arange(0, TMA_COLS, gl.SliceLayout(0, COALESCED))
    at = at[:, None] + column[None]
    for column_tile in gl.static_range(column_tiles(DIM)):
        to = q.index(q_stage * column_tiles(DIM) + column_tile)
        mask = live[:, None]
        if (column_tile + 1) * TMA_COLS > DIM:
            mask = mask & (column < DIM - column_tile * TMA_COLS)[None]
        async_copy.async_copy_global_to_shared(to, at + column_tile * TMA_COLS, mask=mask)
    async_copy.commit_group()

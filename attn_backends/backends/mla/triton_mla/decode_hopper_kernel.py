"""Decode on latent rows for many query heads, on Hopper: loads, products and softmax where they are to be, by Gluon.

A block of 64 latent rows is 72 KiB, and so are the queries of a tile: shared memory holds the queries and a pair of
blocks. Two groups of four warps take turns, as in FlashMLA (DeepSeek, 2025): each makes logits and weights of one block
of a pair, and each adds the weighted rows of both blocks to its half of the columns. While one group works out weights
the other multiplies, and a block is asked for again, by a warp that does nothing else, half by half as both are done.
The last block of a row may have none beside it, and no more of its rows are loaded than there are, by sixteen.

Four warps load rows of 8 bits and write them to shared memory as float16, piece by piece in the places that the others
would be loaded into. All else is the same, with queries scaled to float16 (see `fp8`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
    HEAD_LAYOUT,
    NOWHERE,
    TMA_COLS,
    WORD_LAYOUT,
    anew,
    as_operand,
    barrier,
    barriers,
    lane_sums,
    load_tma_tiles,
    nth_of,
    online_softmax,
    page_ids,
    row_sums,
    times_rows,
    to_fp16_pairs,
)
from attn_backends.kernels.hopper_writes import write_rows_by_shuffles
from attn_backends.kernels.pdl import grid_wait, grid_wait_and_launch_dependents
from attn_backends.kernels.split_kv import HOPPER_PAGE, LN_2, MAX_SPLITS

BLOCK_M, RANK, ROPE = gl.constexpr(64), gl.constexpr(512), gl.constexpr(64)
QUERY_TILES = gl.constexpr(9)  # TMA tiles of a tile's queries: latent columns, and rope keys' behind them
BLOCK_N = gl.constexpr(64)  # of a block
PIECES, WIDTH = gl.constexpr(4), gl.constexpr(128)  # of a block's columns, in which it arrives
HALF = gl.constexpr(256)  # columns, that a group has weighted sums of
LAST_ROWS = gl.constexpr(HOPPER_PAGE)  # that are loaded at a time of a row's last block
GROUP_WARPS = 4


@gluon.jit(do_not_specialize=["table_row"])  # type: ignore[untyped-decorator]
def mla_hopper_kernel(  # type: ignore[no-untyped-def]
    queries,  # TMA descriptor of [QUERY_LEN * HEADS, num_rows, RANK + ROPE]; None if UPCAST
    last_rows,  # TMA descriptor of [num_slots, RANK + ROPE], by LAST_ROWS rows; None if UPCAST
    cached,  # the same by TMA_ROWS rows; if UPCAST, [num_slots, (RANK + ROPE) / 4] i32
    query,  # [num_rows, QUERY_LEN * HEADS, RANK + ROPE], contiguous
    output,  # [num_rows, QUERY_LEN * HEADS, RANK]
    lse,  # [num_rows, QUERY_LEN * HEADS] f32, natural log, if WANT_LSE
    page_table,  # [num_rows, max_pages] i32
    work_items,  # [max_work_items, 8] i32, see `equal_cuts.cut_kernel`, split at multiples of a pair's keys
    more_items,  # [programs of a tile, 2] i32, the same
    partial_acc,  # [partial slots, TILES * BLOCK_M, RANK] f32
    partial_ml,  # [partial slots, TILES * BLOCK_M, 2] f32: m_i in base 2, l_i
    table_row,  # elements from row to row of the page table
    slot_step,  # i32 words from slot to slot, if UPCAST
    scale,  # f32, of logits in base 2, positive
    value_scale,  # f32, of cached values
    WANT_LSE: gl.constexpr,  # 0 or 1
    PAGE_SIZE: gl.constexpr,  # slots, a multiple of 16
    TMA_ROWS: gl.constexpr,  # rows of a TMA tile
    QUERY_LEN: gl.constexpr,  # query tokens of a row
    HEADS: gl.constexpr,  # query heads
    TILES: gl.constexpr,  # tiles of a row's queries
    UPCAST: gl.constexpr,  # the cache has 8 bits
    E5M2: gl.constexpr,  # its dtype is e5m2, not e4m3
    USE_PDL: gl.constexpr,  # this kernel starts early, and lets the next one, see `kernels.pdl.Pdl`
):
    """One program attends for a cut of all rows' keys and a tile of 64 of a row's queries, as `mla_decode_kernel`
    does."""
    of_dtype: gl.constexpr = gl.float16 if UPCAST else query.dtype.element_ty
    tile, program = gl.program_id(0) % TILES, gl.program_id(0) // TILES
    q_tiles = gl.allocate_shared_memory(of_dtype, [QUERY_TILES, BLOCK_M, TMA_COLS], BLOCK_LAYOUT)
    kv_tiles = gl.allocate_shared_memory(of_dtype, [2 * (RANK // TMA_COLS), BLOCK_N, TMA_COLS], BLOCK_LAYOUT)
    rope = gl.allocate_shared_memory(of_dtype, [2, BLOCK_N, ROPE], BLOCK_LAYOUT)
    p = gl.allocate_shared_memory(of_dtype, [BLOCK_M, BLOCK_N], BLOCK_LAYOUT)  # from group to group
    stats = gl.allocate_shared_memory(gl.float32, [6, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = (barriers(2, 1), barriers(2, 1), barriers(2, 1), barriers(2, 1), barriers(2, 1))  # pieces, rope keys
    empty = (barriers(2, 1), barriers(2, 1), barriers(2, 1))  # halves, rope keys
    p_full, met, q_full = barriers(2, 1), barriers(1, 2), barriers(1, 1)
    fence_async_shared()
    first_item = _load_item(work_items, program, True)
    next_item, end_item = gl.load(more_items + program * 2), gl.load(more_items + program * 2 + 1)
    items = (first_item, work_items, next_item, end_item)
    q_pipeline, kv_pipeline = (q_tiles, q_full), (kv_tiles, rope, full, empty)
    exchange = (p, stats, p_full, met)
    results = (output, lse, partial_acc, partial_ml)
    of_tile = (query, results, scale, value_scale, tile, q_pipeline, kv_pipeline, exchange)
    to_load = (queries, tile, last_rows, cached, slot_step, page_table, table_row, q_pipeline, kv_pipeline)
    if UPCAST:
        gl.warp_specialize(
            [
                (_attend, (of_tile, items, 0, WANT_LSE, QUERY_LEN, HEADS, TILES, UPCAST, USE_PDL)),
                (_attend, (of_tile, items, 1, WANT_LSE, QUERY_LEN, HEADS, TILES, UPCAST, USE_PDL)),
                (_load, (to_load, items, PAGE_SIZE, TMA_ROWS, UPCAST, E5M2, USE_PDL)),
            ],
            [4, 4],
            [208, 88],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (of_tile, items, 0, WANT_LSE, QUERY_LEN, HEADS, TILES, UPCAST, USE_PDL)),
                (_attend, (of_tile, items, 1, WANT_LSE, QUERY_LEN, HEADS, TILES, UPCAST, USE_PDL)),
                (_load, (to_load, items, PAGE_SIZE, TMA_ROWS, UPCAST, E5M2, USE_PDL)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _load_item(work_items, work_item, exists):  # type: ignore[no-untyped-def]
    """What a group has to know of a work item: its row, -1 where there is none; its first key and the end of its keys;
    the row's first partial slot, its splits, and its length (see `CutList`)."""
    at = work_items + work_item * 8
    row = gl.load(at, mask=exists, other=-1)
    start, stop = gl.load(at + 1, mask=exists, other=0), gl.load(at + 2, mask=exists, other=0)
    first_slot, split_info = gl.load(at + 3, mask=exists, other=0), gl.load(at + 4, mask=exists, other=0)
    return row, start, stop, first_slot, split_info, gl.load(at + 5, mask=exists, other=0)


@gluon.jit
def _uses(num_blocks, done):  # type: ignore[no-untyped-def]
    """How often each of both blocks' places was used, after so many blocks of another work item: one that is the last
    of an odd number lies in the first place."""
    done_0, done_1 = done
    return done_0 + (num_blocks + 1) // 2, done_1 + num_blocks // 2


@gluon.jit
def _place(nth, done):  # type: ignore[no-untyped-def]
    """The place of a work item's `nth` block, and the phase in which it is full there."""
    done_0, done_1 = done
    block = nth % 2
    return block, (gl.where(block == 0, done_0, done_1) + nth // 2) & 1


@gluon.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    to_load, items, PAGE_SIZE: gl.constexpr, TMA_ROWS: gl.constexpr, UPCAST: gl.constexpr, E5M2: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """One warp loads what all work items of a program read, queries in front of keys: behind them they would come late.
    Keys of 8 bits are loaded by four warps, and queries by those that multiply.

    Work items and page ids were there before the kernel in front was launched, or lets this one start."""
    queries, tile, last_rows, cached, slot_step, page_table, table_row, q_pipeline, kv_pipeline = to_load
    first_item, work_items, next_item, end_item = items
    row, start, stop, _slot, _split, _len = first_item
    of_row = page_table + gl.maximum(row, 0).to(gl.int64) * table_row
    if UPCAST == 0:
        ids = page_ids(of_row, start, stop, PAGE_SIZE, TMA_ROWS)
    if USE_PDL:
        grid_wait_and_launch_dependents()
    done = (0, 0)
    while row >= 0:
        num_blocks = (stop - start + BLOCK_N - 1) // BLOCK_N
        if UPCAST == 0:
            if num_blocks > 0:
                _load_queries(queries, row, tile, done, q_pipeline, kv_pipeline)
            _load_blocks(last_rows, cached, of_row, ids, start, stop, done, num_blocks, kv_pipeline, PAGE_SIZE,
                         TMA_ROWS)  # fmt: skip
        elif num_blocks > 0:
            _load_blocks_as_fp16(cached, slot_step, of_row, start, stop, done, num_blocks, kv_pipeline, PAGE_SIZE, E5M2)
        done = _uses(num_blocks, done)
        row, start, stop, _slot, _split, _len = _load_item(work_items, next_item, next_item < end_item)
        next_item += 1
        of_row = page_table + gl.maximum(row, 0).to(gl.int64) * table_row
        if UPCAST == 0:
            ids = page_ids(of_row, start, stop, PAGE_SIZE, TMA_ROWS)


@gluon.jit
def _load_queries(queries, row, tile, done, q_pipeline, kv_pipeline):  # type: ignore[no-untyped-def]
    """Ask for a row's queries of a tile, zeros behind the last one, once those of the item before are done with, which
    is when both blocks' last rope keys are; `done` says how often each place was used."""
    q_tiles, q_full = q_pipeline
    rope_empty = kv_pipeline[3][2]
    to = q_tiles._reinterpret(q_tiles.dtype, [QUERY_TILES, BLOCK_M, 1, TMA_COLS], HEAD_LAYOUT)
    for block in gl.static_range(2):
        mbarrier.wait(rope_empty.index(block), (done[block] & 1) ^ 1)
    mbarrier.expect(q_full.index(0), QUERY_TILES * queries.block_type.nbytes)
    for i in gl.static_range(QUERY_TILES):
        at = [tile * BLOCK_M, row, i * TMA_COLS]
        tma.async_copy_global_to_shared(queries, at, q_full.index(0), to.index(i))


@gluon.jit  # type: ignore[untyped-decorator]
def _load_blocks(  # type: ignore[no-untyped-def]
    last_rows, cached, pages, ids, start, stop, done, num_blocks, kv_pipeline, PAGE_SIZE: gl.constexpr,
    TMA_ROWS: gl.constexpr,
):  # fmt: skip
    """Ask for the rope keys and every piece of every block once their place is empty; `ids` are page ids of the first
    pair, and `done` says how often each place was used."""
    kv_tiles, rope, full, empty = kv_pipeline
    for nth in range(num_blocks):
        block, phase = _place(nth, done)
        first = start + nth * BLOCK_N
        next_ids = page_ids(pages, start + (nth // 2 + 1) * (2 * BLOCK_N), stop, PAGE_SIZE, TMA_ROWS)
        first_id = block * (BLOCK_N // TMA_ROWS)
        if stop - first > BLOCK_N - LAST_ROWS:
            rows = ()
            for part in gl.static_range(BLOCK_N // TMA_ROWS):
                page = nth_of(ids, first_id + part)
                rows = rows + (page * PAGE_SIZE + (first + part * TMA_ROWS) % PAGE_SIZE,)  # type: ignore[assignment]  # noqa: RUF005
            mbarrier.wait(empty[2].index(block), phase ^ 1)
            full_barrier = full[PIECES].index(block)
            mbarrier.expect(full_barrier, BLOCK_N // TMA_ROWS * cached.block_type.nbytes)
            load_tma_tiles(cached, rows, RANK, full_barrier, rope.index(block), TMA_ROWS)
            for piece in gl.static_range(PIECES):
                if piece * WIDTH % HALF == 0:
                    mbarrier.wait(empty[piece * WIDTH // HALF].index(block), phase ^ 1)
                full_barrier = full[piece].index(block)
                mbarrier.expect(full_barrier, WIDTH // TMA_COLS * (BLOCK_N // TMA_ROWS) * cached.block_type.nbytes)
                for i in gl.static_range(WIDTH // TMA_COLS):
                    column_tile = piece * (WIDTH // TMA_COLS) + i
                    to = kv_tiles.index(block * (RANK // TMA_COLS) + column_tile)
                    load_tma_tiles(cached, rows, column_tile * TMA_COLS, full_barrier, to, TMA_ROWS)
        else:
            _load_last_rows(last_rows, ids, first_id, first, stop, block, phase, kv_pipeline, PAGE_SIZE, TMA_ROWS)
        ids = gl.where(block == 1, next_ids, ids)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_last_rows(  # type: ignore[no-untyped-def]
    last_rows, ids, first_id, first, stop, block, phase, kv_pipeline, PAGE_SIZE: gl.constexpr, TMA_ROWS: gl.constexpr
):
    """Ask for a block that is not full, from key `first` on, LAST_ROWS at a time, and for zeros behind them."""
    PARTS: gl.constexpr = BLOCK_N // LAST_ROWS
    kv_tiles, rope, full, empty = kv_pipeline
    of_tiles = kv_tiles._reinterpret(kv_tiles.dtype, [2 * RANK // TMA_COLS * PARTS, LAST_ROWS, TMA_COLS], BLOCK_LAYOUT)
    of_rope = rope._reinterpret(rope.dtype, [2 * PARTS, LAST_ROWS, ROPE], BLOCK_LAYOUT)
    for i in gl.static_range(3):
        mbarrier.wait(empty[i].index(block), phase ^ 1)
    mbarrier.expect(full[PIECES].index(block), PARTS * last_rows.block_type.nbytes)
    for piece in gl.static_range(PIECES):
        mbarrier.expect(full[piece].index(block), PARTS * (WIDTH // TMA_COLS) * last_rows.block_type.nbytes)
    for part in range(PARTS):
        key = first + part * LAST_ROWS
        row = nth_of(ids, first_id + part * LAST_ROWS // TMA_ROWS) * PAGE_SIZE + key % PAGE_SIZE
        row = gl.where(key < stop, row, NOWHERE)
        tma.async_copy_global_to_shared(last_rows, [row, RANK], full[PIECES].index(block),
                                        of_rope.index(block * PARTS + part))  # fmt: skip
        for i in gl.static_range(RANK // TMA_COLS):
            to = of_tiles.index((block * (RANK // TMA_COLS) + i) * PARTS + part)
            tma.async_copy_global_to_shared(last_rows, [row, i * TMA_COLS], full[i * TMA_COLS // WIDTH].index(block),
                                            to)  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _load_blocks_as_fp16(  # type: ignore[no-untyped-def]
    cached, slot_step, pages, start, stop, done, num_blocks, kv_pipeline, PAGE_SIZE: gl.constexpr, E5M2: gl.constexpr
):
    """Write the rope keys and every piece of every block as float16, while the next ones are loaded; `done` says how
    often each place was used."""
    COALESCED: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    COALESCED_ROPE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    kv_tiles, rope_at, full, empty = kv_pipeline
    pieces = kv_tiles._reinterpret(gl.int32, [2 * PIECES, BLOCK_N, WIDTH // 2], WORD_LAYOUT)
    ropes = rope_at._reinterpret(gl.int32, [2, BLOCK_N, ROPE // 2], WORD_LAYOUT)
    rope_rows = _rows(cached, slot_step, pages, start, stop, PAGE_SIZE, COALESCED_ROPE)
    rows = _rows(cached, slot_step, pages, start, stop, PAGE_SIZE, COALESCED)
    rope = _columns(rope_rows, RANK, ROPE, COALESCED_ROPE)
    first, second = _columns(rows, 0, WIDTH, COALESCED), _columns(rows, WIDTH, WIDTH, COALESCED)
    for nth in range(num_blocks):
        block, phase = _place(nth, done)
        next_start = start + (nth + 1) * BLOCK_N
        next_rope_rows = _rows(cached, slot_step, pages, next_start, stop, PAGE_SIZE, COALESCED_ROPE)
        next_rows = _rows(cached, slot_step, pages, next_start, stop, PAGE_SIZE, COALESCED)
        mbarrier.wait(empty[2].index(block), phase ^ 1)
        _put(rope, ropes.index(block), full[PIECES].index(block), E5M2)
        mbarrier.wait(empty[0].index(block), phase ^ 1)
        _put(first, pieces.index(block * PIECES), full[0].index(block), E5M2)
        third = _columns(rows, 2 * WIDTH, WIDTH, COALESCED)
        _put(second, pieces.index(block * PIECES + 1), full[1].index(block), E5M2)
        fourth = _columns(rows, 3 * WIDTH, WIDTH, COALESCED)
        mbarrier.wait(empty[1].index(block), phase ^ 1)
        rope = _columns(next_rope_rows, RANK, ROPE, COALESCED_ROPE)
        _put(third, pieces.index(block * PIECES + 2), full[2].index(block), E5M2)
        first = _columns(next_rows, 0, WIDTH, COALESCED)
        _put(fourth, pieces.index(block * PIECES + 3), full[3].index(block), E5M2)
        second = _columns(next_rows, WIDTH, WIDTH, COALESCED)
        rows = next_rows


@gluon.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    cached, slot_step, pages, first, stop, PAGE_SIZE: gl.constexpr, COALESCED: gl.constexpr
):
    """Pointers [BLOCK_N] to the rows of a block; where there is no key, to others."""
    key = gl.maximum(gl.minimum(first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COALESCED)), stop - 1), 0)
    slot = gl.load(pages + key // PAGE_SIZE).to(gl.int64) * PAGE_SIZE + key % PAGE_SIZE
    return cached + slot * slot_step


@gluon.jit  # type: ignore[untyped-decorator]
def _columns(rows, begin: gl.constexpr, COUNT: gl.constexpr, COALESCED: gl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_N, COUNT / 4] i32, four columns each, from column `begin` on; under way."""
    return gl.load(rows[:, None] + (begin // 4 + gl.arange(0, COUNT // 4, gl.SliceLayout(0, COALESCED)))[None])


@gluon.jit  # type: ignore[untyped-decorator]
def _put(words, to, full_barrier, E5M2: gl.constexpr):  # type: ignore[no-untyped-def]
    """Write values as float16 to where products read them, and say that they have arrived."""
    to.store(to_fp16_pairs(words, E5M2))
    fence_async_shared()
    barrier()
    mbarrier.arrive(full_barrier)


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    of_tile, items, warp_group: gl.constexpr,
    WANT_LSE: gl.constexpr, QUERY_LEN: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr, UPCAST: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """A warp group attends for all work items of a program."""
    first_item, work_items, next_item, end_item = items
    row, start, stop, first_slot, split_info, seq_len = first_item
    if USE_PDL:
        grid_wait()
    nth, done = 0, (0, 0)
    while row >= 0:
        num_blocks = (stop - start + BLOCK_N - 1) // BLOCK_N
        _attend_item(of_tile, (row, start, stop, first_slot, split_info, seq_len), nth, done, num_blocks, warp_group,
                     WANT_LSE, QUERY_LEN, HEADS, TILES, UPCAST)  # fmt: skip
        if num_blocks > 0:
            nth += 1
        done = _uses(num_blocks, done)
        row, start, stop, first_slot, split_info, seq_len = _load_item(work_items, next_item, next_item < end_item)
        next_item += 1


@gluon.jit  # type: ignore[untyped-decorator]
def _attend_item(  # type: ignore[no-untyped-def]
    of_tile, work_item, nth, done, num_blocks, warp_group: gl.constexpr,
    WANT_LSE: gl.constexpr, QUERY_LEN: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr, UPCAST: gl.constexpr,
):  # fmt: skip
    """Work out the weights of one block of each pair, and half of the columns of the result."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    query, results, scale, value_scale, tile, q_pipeline, kv_pipeline, exchange = of_tile
    row, start, stop, first_slot, split_info, seq_len = work_item
    output, lse, partial_acc, partial_ml = results
    kv_tiles, _rope, _full, empty = kv_pipeline
    p_smem, stats, _p_full, met = exchange
    q_tiles, q_full = q_pipeline
    num_splits, split = split_info // MAX_SPLITS, split_info % MAX_SPLITS
    if UPCAST:
        _store_scaled_queries(query, q_tiles, stats.index(4 + warp_group), row, tile, warp_group,
                              QUERY_LEN * HEADS)  # fmt: skip
        _meet(met, 0)
    elif num_blocks > warp_group:  # who has no logits does not wait: queries of the next item may have come by then
        mbarrier.wait(q_full.index(0), nth & 1)
    q_scale, exp_scale = scale, scale
    if UPCAST:  # logits are scaled before they are compared: each row by another number
        q_scale, exp_scale = stats.index(4 + warp_group).load(ROW) * scale, 1.0

    values = kv_tiles._reinterpret(kv_tiles.dtype, [4, BLOCK_N, HALF], BLOCK_LAYOUT)  # halves of both blocks
    acc = gl.zeros([BLOCK_M, HALF], gl.float32, ACC)
    m_i = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW)
    l_i = lane_sums(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS))
    lane = tile * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
    last_seen = gl.minimum(seq_len - QUERY_LEN + lane // HEADS, seq_len - 1)
    all_see = gl.minimum(seq_len - QUERY_LEN + 1, stop)  # keys before it need no mask
    done_0, done_1 = done
    for pair in range((num_blocks + 1) // 2):
        phase_0, phase_1 = (done_0 + pair) & 1, (done_1 + pair) & 1
        first = start + 2 * pair * BLOCK_N
        has_second = 2 * pair + 1 < num_blocks  # the last block may have none beside it
        zero = anew(0)  # with which all places are worked out here: in front of the loop they would take registers
        if warp_group == 0:
            logits = _logits(q_tiles, kv_pipeline, zero, zero, phase_0, LOGITS)
            barrier()
            mbarrier.arrive(empty[2].index(0))
            logits = _masked(logits, first, all_see, last_seen, q_scale, UPCAST, LOGITS)
            p, m_i, l_i, alpha = online_softmax(logits, m_i, l_i, exp_scale)
            _publish_p(p, m_i, exchange, 0)
            _clear(kv_tiles, 0, 0, seq_len - first, UPCAST)
            p = as_operand(p, kv_tiles.dtype, acc)
            acc = warpgroup_mma(p, values.index(zero), times_rows(acc, alpha), is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()
            mbarrier.arrive(empty[0].index(0))
            if has_second:
                m_i, l_i, alpha = _consume_p(m_i, l_i, exchange, 1, phase_1, exp_scale)
                _clear(kv_tiles, 1, 0, seq_len - first - BLOCK_N, UPCAST)
                acc = warpgroup_mma(p_smem, values.index(2 + zero), times_rows(acc, alpha), is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                barrier()
                mbarrier.arrive(empty[0].index(1))
        elif has_second:
            logits = _logits(q_tiles, kv_pipeline, 1 + zero, zero, phase_1, LOGITS)
            barrier()
            mbarrier.arrive(empty[2].index(1))
            logits = _masked(logits, first + BLOCK_N, all_see, last_seen, q_scale, UPCAST, LOGITS)
            m_i, l_i, alpha = _consume_p(m_i, l_i, exchange, 0, phase_0, exp_scale)
            acc = warpgroup_mma(p_smem, values.index(1 + zero), times_rows(acc, alpha), is_async=True)
            p, m_i, l_i, alpha = online_softmax(logits, m_i, l_i, exp_scale)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()
            mbarrier.arrive(empty[1].index(0))
            _publish_p(p, m_i, exchange, 1)
            _clear(kv_tiles, 1, 1, seq_len - first - BLOCK_N, UPCAST)
            p = as_operand(p, kv_tiles.dtype, acc)
            acc = warpgroup_mma(p, values.index(3 + zero), times_rows(acc, alpha), is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()
            mbarrier.arrive(empty[1].index(1))
        else:
            m_i, l_i, alpha = _consume_p(m_i, l_i, exchange, 0, phase_0, exp_scale)
            _clear(kv_tiles, 0, 1, seq_len - first, UPCAST)
            acc = warpgroup_mma(p_smem, values.index(1 + zero), times_rows(acc, alpha), is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()
            mbarrier.arrive(empty[1].index(0))

    l_i = row_sums(l_i, ROW)  # of the weights that this group worked out
    if UPCAST:
        l_i += _of_other(l_i, stats, 2, warp_group, met, 1)
    elif num_blocks > 0:  # two places in turn: one group may be an item ahead of the other
        l_i += _of_other(l_i, stats, 2 + 2 * (nth & 1), warp_group, met, nth & 1)
    live = lane < QUERY_LEN * HEADS
    m_i *= exp_scale
    saw = l_i > 0
    if num_splits == 1:
        at = row.to(gl.int64) * (QUERY_LEN * HEADS) + lane
        divisor = gl.where(saw, l_i, 1.0)
        share = gl.where(saw, value_scale / divisor, 0.0)
        write_rows_by_shuffles(output + at * RANK + warp_group * HALF, acc, share, live)
        if WANT_LSE and warp_group == 0:
            gl.store(lse + at, gl.where(saw, (m_i + gl.log2(divisor)) * LN_2, float("-inf")), mask=live)
    else:
        at = (first_slot + split).to(gl.int64) * (TILES * BLOCK_M) + lane
        share = gl.full([BLOCK_M], 1.0, gl.float32, ROW)
        write_rows_by_shuffles(partial_acc + at * RANK + warp_group * HALF, acc, share, live)
        if warp_group == 0:
            gl.store(partial_ml + at * 2, m_i, mask=live)
            gl.store(partial_ml + at * 2 + 1, l_i, mask=live)


@gluon.jit
def _meet(met, phase):  # type: ignore[no-untyped-def]
    """Wait until both warp groups see what each has written to shared memory."""
    fence_async_shared()
    barrier()
    mbarrier.arrive(met.index(0))
    mbarrier.wait(met.index(0), phase)


@gluon.jit  # type: ignore[untyped-decorator]
def _of_other(l_i, stats, at, warp_group: gl.constexpr, met, phase):  # type: ignore[no-untyped-def]
    """The other group's sums of weights, for this one's."""
    stats.index(at + warp_group).store(l_i)
    _meet(met, phase)
    return stats.index(at + 1 - warp_group).load(l_i.type.layout)


@gluon.jit  # type: ignore[untyped-decorator]
def _logits(q_tiles, kv_pipeline, block, zero, phase, LOGITS: gl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_M, BLOCK_N] of a block."""
    q = q_tiles._reinterpret(q_tiles.dtype, [PIECES, BLOCK_M, WIDTH], BLOCK_LAYOUT)
    q_rope = q_tiles.index(QUERY_TILES - 1 + zero)
    kv_tiles, rope, full, _empty = kv_pipeline
    pieces = kv_tiles._reinterpret(kv_tiles.dtype, [2 * PIECES, BLOCK_N, WIDTH], BLOCK_LAYOUT)
    logits = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS)
    mbarrier.wait(full[PIECES].index(block), phase)
    logits = warpgroup_mma(q_rope, rope.index(block).permute((1, 0)), logits, use_acc=False, is_async=True)
    for piece in gl.static_range(PIECES):
        mbarrier.wait(full[piece].index(block), phase)
        keys = pieces.index(block * PIECES + piece).permute((1, 0))
        logits = warpgroup_mma(q.index(piece + zero), keys, logits, is_async=True)
    return warpgroup_mma_wait(0, deps=(logits,))


@gluon.jit  # type: ignore[untyped-decorator]
def _masked(  # type: ignore[no-untyped-def]
    logits, first, all_see, last_seen, q_scale, UPCAST: gl.constexpr, LOGITS: gl.constexpr
):
    """Logits of a block from key `first` on, -inf where a query does not see the key; queries of 8-bit keys are scaled
    first."""
    if UPCAST:
        logits *= q_scale[:, None]
    if first + BLOCK_N > all_see:
        seen = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LOGITS))[None] <= last_seen[:, None]
        logits = gl.where(seen, logits, float("-inf"))
    return logits


@gluon.jit  # type: ignore[untyped-decorator]
def _publish_p(p, m_i, exchange, block: gl.constexpr):  # type: ignore[no-untyped-def]
    """Publish a block's weights, and what they are relative to, for the other warp group.

    Both groups share one place: each has multiplied what the other left there before it writes.
    """
    p_smem, stats, p_full, _met = exchange
    p_smem.store(p.to(p_smem.dtype))
    stats.index(block).store(m_i)
    fence_async_shared()
    barrier()
    mbarrier.arrive(p_full.index(block))


@gluon.jit  # type: ignore[untyped-decorator]
def _consume_p(m_i, l_i, exchange, block: gl.constexpr, phase, scale):  # type: ignore[no-untyped-def]
    """Wait for the other warp group's weights of a block.

    Returns the logits that they are relative to, this group's l_i relative to the same, and what its acc shrinks by.
    """
    _p_smem, stats, p_full, _met = exchange
    mbarrier.wait(p_full.index(block), phase)
    m_new = stats.index(block).load(m_i.type.layout)
    alpha = gl.exp2(m_i * scale - gl.where(m_new == float("-inf"), 0.0, m_new * scale))
    return m_new, times_rows(l_i, alpha), alpha


@gluon.jit  # type: ignore[untyped-decorator]
def _clear(  # type: ignore[no-untyped-def]
    kv_tiles, block: gl.constexpr, warp_group: gl.constexpr, num_live, UPCAST: gl.constexpr
):
    """Zero what was loaded behind a block's last key with it, in a group's columns: anything may lie there. The block's
    logits are worked out by then. Of 8 bits it is the last key again."""
    COALESCED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    PARTS: gl.constexpr = BLOCK_N // LAST_ROWS
    if (UPCAST == 0) & (num_live < BLOCK_N) & (num_live % LAST_ROWS > 0):
        of_tiles = kv_tiles._reinterpret(
            kv_tiles.dtype, [2 * RANK // TMA_COLS * PARTS, LAST_ROWS, TMA_COLS], BLOCK_LAYOUT
        )
        live = (gl.arange(0, LAST_ROWS, gl.SliceLayout(1, COALESCED)) < num_live % LAST_ROWS)[:, None]
        for i in gl.static_range(HALF // TMA_COLS):
            column_tile = (2 * block + warp_group) * (HALF // TMA_COLS) + i
            rows = of_tiles.index(column_tile * PARTS + num_live // LAST_ROWS)
            held = rows.load(COALESCED)
            rows.store(gl.where(live, held, gl.zeros_like(held)))
        fence_async_shared()
        barrier()


@gluon.jit  # type: ignore[untyped-decorator]
def _store_scaled_queries(  # type: ignore[no-untyped-def]
    query, q_tiles, q_scale_at, row, tile, warp_group: gl.constexpr, QUERIES: gl.constexpr
):
    """Store a group's half of the tile's queries in shared memory for good, scaled to float16, and each query's scale
    [BLOCK_M] f32 for this group: all loads are under way before the first store."""
    COALESCED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    q = q_tiles._reinterpret(q_tiles.dtype, [PIECES, BLOCK_M, WIDTH], BLOCK_LAYOUT)
    lane = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COALESCED))
    from_row = query + (row.to(gl.int64) * QUERIES + lane)[:, None] * (RANK + ROPE)
    live = (lane < QUERIES)[:, None]
    at = from_row + gl.arange(0, WIDTH, gl.SliceLayout(0, COALESCED))[None]
    rope = gl.load(from_row + RANK + gl.arange(0, ROPE, gl.SliceLayout(0, COALESCED))[None], mask=live, other=0.0)
    q_scale = row_amax(rope)
    loaded = ()
    for piece in gl.static_range(PIECES):
        loaded = loaded + (gl.load(at + piece * WIDTH, mask=live, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    for piece in gl.static_range(PIECES):
        q_scale = gl.maximum(q_scale, row_amax(loaded[piece]))
    if warp_group == 0:
        q_tiles.index(QUERY_TILES - 1).store(scale_to_fp16(rope, q_scale))
    for part in gl.static_range(PIECES // 2):
        q.index(warp_group * (PIECES // 2) + part).store(
            scale_to_fp16(loaded[warp_group * (PIECES // 2) + part], q_scale)
        )
    q_scale_at.store(q_scale)

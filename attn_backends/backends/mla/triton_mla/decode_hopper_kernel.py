"""Decode on latent rows for many query heads, on Hopper: loads, products and softmax where they are to be, by Gluon.

A block of 64 latent rows is 72 KiB, and so are the queries of a tile: shared memory holds the queries and a pair of
blocks. Two groups of four warps take turns, as in FlashMLA (DeepSeek, 2025): each makes logits and weights of one block
of a pair, and each adds the weighted rows of both blocks to its half of the columns. While one group works out weights
the other multiplies, and a block is asked for again, by a warp that does nothing else, half by half as both are done.

Rows of 8 bits are loaded by four warps, which write them to shared memory as float16, piece by piece in the places that
the others would be loaded into. All else is the same, with queries as float16 shares (see `fp8`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_backends.kernels.fp8 import largest_of, shares_of
from attn_backends.kernels.hopper import (
    BLOCK_LAYOUT,
    STRIP,
    WORD_LAYOUT,
    as_operand,
    barrier,
    barriers,
    clear_rows,
    halves_of,
    load_strip,
    nth_of,
    page_ids,
    times_rows,
    weigh,
    write_rows,
)
from attn_backends.kernels.launch import let_next_start
from attn_backends.kernels.split_kv import LN_2, MOST_ITEMS

ROWS, RANK, ROPE = gl.constexpr(64), gl.constexpr(512), gl.constexpr(64)
KEYS = gl.constexpr(64)  # of a block
PIECES, WIDTH = gl.constexpr(4), gl.constexpr(128)  # of a block's columns, in which it arrives
HALF = gl.constexpr(256)  # columns, that a group has weighted sums of
GROUP_WARPS = 4


@gluon.jit(do_not_specialize=["table_row"])  # type: ignore[untyped-decorator]
def mla_hopper_kernel(  # type: ignore[no-untyped-def]
    cached, query, output, lse, page_table, items, partial, partial_sums, table_row, slot_step, scale, value_scale,
    WANT_LSE: gl.constexpr, PAGE_SIZE: gl.constexpr, LOAD: gl.constexpr, QUERY_LEN: gl.constexpr, HEADS: gl.constexpr,
    TILES: gl.constexpr, WIDEN: gl.constexpr, E5M2: gl.constexpr, LETS_NEXT_START: gl.constexpr,
):  # fmt: skip
    """One program an item and tile of 64 of its queries, as `mla_decode_kernel` does.

    Args:
        query: [num_rows, QUERY_LEN * HEADS, RANK + ROPE], contiguous.
        cached: see `triton_hopper.strips_of`; loads have LOAD rows. PAGE_SIZE is a multiple of 16. Where it has 8 bits
            (WIDEN; E5M2 says which), [num_slots, (RANK + ROPE) / 4] i32, whose rows are `slot_step` apart.
        output: [num_rows, QUERY_LEN * HEADS, RANK]; lse: [num_rows, QUERY_LEN * HEADS] f32.
        items: see `triton_split`, cut at multiples of a pair's keys; a place of partial results holds TILES * 64
            queries of RANK.
        scale: of logits in base 2, positive; value_scale: of the cache.
        LETS_NEXT_START: `mla_join_kernel` starts early (see `triton_launch.Start`).
    """
    if LETS_NEXT_START:
        let_next_start()
    of_dtype: gl.constexpr = gl.float16 if WIDEN else query.dtype.element_ty
    tile = gl.program_id(0) % TILES
    item = items + gl.program_id(0) // TILES * 8
    row = gl.load(item)
    start, stop = gl.load(item + 1), gl.load(item + 2)
    if row < 0:
        start = stop
    pages = page_table + gl.maximum(row, 0).to(gl.int64) * table_row
    num_pairs = (stop - start + 2 * KEYS - 1) // (2 * KEYS)

    q = gl.allocate_shared_memory(of_dtype, [PIECES, ROWS, WIDTH], BLOCK_LAYOUT)
    q_rope = gl.allocate_shared_memory(of_dtype, [ROWS, ROPE], BLOCK_LAYOUT)
    strips = gl.allocate_shared_memory(of_dtype, [2 * (RANK // STRIP), KEYS, STRIP], BLOCK_LAYOUT)
    rope = gl.allocate_shared_memory(of_dtype, [2, KEYS, ROPE], BLOCK_LAYOUT)
    weights = gl.allocate_shared_memory(of_dtype, [ROWS, KEYS], BLOCK_LAYOUT)  # from group to group
    stats = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    arrived = (barriers(2, 1), barriers(2, 1), barriers(2, 1), barriers(2, 1), barriers(2, 1))  # pieces, rope keys
    free = (barriers(2, 1), barriers(2, 1), barriers(2, 1))  # halves, rope keys
    weighed, met = barriers(2, 1), barriers(1, 2)
    fence_async_shared()
    held = (strips, rope, arrived, free)
    between = (weights, stats, weighed, met)
    results = (output, lse, partial, partial_sums)
    of_tile = (query, results, item, scale, value_scale, tile, num_pairs, q, q_rope, held, between)
    if WIDEN:
        gl.warp_specialize(
            [
                (_attend, (of_tile, 0, WANT_LSE, QUERY_LEN, HEADS, TILES, WIDEN)),
                (_attend, (of_tile, 1, WANT_LSE, QUERY_LEN, HEADS, TILES, WIDEN)),
                (_load_as_halves, (cached, slot_step, pages, start, stop, num_pairs, held, PAGE_SIZE, E5M2)),
            ],
            [4, 4],
            [208, 88],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (of_tile, 0, WANT_LSE, QUERY_LEN, HEADS, TILES, WIDEN)),
                (_attend, (of_tile, 1, WANT_LSE, QUERY_LEN, HEADS, TILES, WIDEN)),
                (_load, (cached, pages, start, stop, num_pairs, held, PAGE_SIZE, LOAD)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    cached, pages, start, stop, num_pairs, held, PAGE_SIZE: gl.constexpr, LOAD: gl.constexpr
):
    """One warp: asks for the rope keys and every piece of every block once their place is free."""
    strips, rope, arrived, free = held
    ids = page_ids(pages, start, stop, PAGE_SIZE, LOAD)
    for pair in range(num_pairs):
        turn = pair & 1
        next_ids = page_ids(pages, start + (2 * pair + 2) * KEYS, stop, PAGE_SIZE, LOAD)
        for block in gl.static_range(2):
            rows = ()
            for part in gl.static_range(KEYS // LOAD):
                key = start + (2 * pair + block) * KEYS + part * LOAD
                page = nth_of(ids, block * (KEYS // LOAD) + part)
                rows = rows + (page * PAGE_SIZE + key % PAGE_SIZE,)  # type: ignore[assignment]  # noqa: RUF005
            mbarrier.wait(free[2].index(block), turn ^ 1)
            ready = arrived[PIECES].index(block)
            mbarrier.expect(ready, KEYS // LOAD * cached.block_type.nbytes)
            load_strip(cached, rows, RANK, ready, rope.index(block), LOAD)
            for piece in gl.static_range(PIECES):
                if piece * WIDTH % HALF == 0:
                    mbarrier.wait(free[piece * WIDTH // HALF].index(block), turn ^ 1)
                ready = arrived[piece].index(block)
                mbarrier.expect(ready, WIDTH // STRIP * (KEYS // LOAD) * cached.block_type.nbytes)
                for nth in gl.static_range(WIDTH // STRIP):
                    strip = piece * (WIDTH // STRIP) + nth
                    to = strips.index(block * (RANK // STRIP) + strip)
                    load_strip(cached, rows, strip * STRIP, ready, to, LOAD)
        ids = next_ids


@gluon.jit  # type: ignore[untyped-decorator]
def _load_as_halves(  # type: ignore[no-untyped-def]
    cached, slot_step, pages, start, stop, num_pairs, held, PAGE_SIZE: gl.constexpr, E5M2: gl.constexpr
):
    """Four warps: rope keys and every piece of every block, as float16. The next of them are on their way meanwhile."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    THIN: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    strips, rope_at, arrived, free = held
    pieces = strips._reinterpret(gl.int32, [2 * PIECES, KEYS, WIDTH // 2], WORD_LAYOUT)
    ropes = rope_at._reinterpret(gl.int32, [2, KEYS, ROPE // 2], WORD_LAYOUT)
    rope_rows = _rows(cached, slot_step, pages, start, stop, PAGE_SIZE, THIN)
    rows = _rows(cached, slot_step, pages, start, stop, PAGE_SIZE, LINES)
    rope = _columns(rope_rows, RANK, ROPE, THIN)
    first, second = _columns(rows, 0, WIDTH, LINES), _columns(rows, WIDTH, WIDTH, LINES)
    for nth in range(2 * num_pairs):
        block, turn = nth % 2, nth // 2 & 1
        next_start = start + (nth + 1) * KEYS
        next_rope_rows = _rows(cached, slot_step, pages, next_start, stop, PAGE_SIZE, THIN)
        next_rows = _rows(cached, slot_step, pages, next_start, stop, PAGE_SIZE, LINES)
        mbarrier.wait(free[2].index(block), turn ^ 1)
        _put(rope, ropes.index(block), arrived[PIECES].index(block), E5M2)
        mbarrier.wait(free[0].index(block), turn ^ 1)
        _put(first, pieces.index(block * PIECES), arrived[0].index(block), E5M2)
        third = _columns(rows, 2 * WIDTH, WIDTH, LINES)
        _put(second, pieces.index(block * PIECES + 1), arrived[1].index(block), E5M2)
        fourth = _columns(rows, 3 * WIDTH, WIDTH, LINES)
        mbarrier.wait(free[1].index(block), turn ^ 1)
        rope = _columns(next_rope_rows, RANK, ROPE, THIN)
        _put(third, pieces.index(block * PIECES + 2), arrived[2].index(block), E5M2)
        first = _columns(next_rows, 0, WIDTH, LINES)
        _put(fourth, pieces.index(block * PIECES + 3), arrived[3].index(block), E5M2)
        second = _columns(next_rows, WIDTH, WIDTH, LINES)
        rows = next_rows


@gluon.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    cached, slot_step, pages, first, stop, PAGE_SIZE: gl.constexpr, LINES: gl.constexpr
):
    """Pointers [KEYS] to the rows of a block; where there is no key, to others."""
    key = gl.maximum(gl.minimum(first + gl.arange(0, KEYS, gl.SliceLayout(1, LINES)), stop - 1), 0)
    slot = gl.load(pages + key // PAGE_SIZE).to(gl.int64) * PAGE_SIZE + key % PAGE_SIZE
    return cached + slot * slot_step


@gluon.jit  # type: ignore[untyped-decorator]
def _columns(rows, begin: gl.constexpr, COUNT: gl.constexpr, LINES: gl.constexpr):  # type: ignore[no-untyped-def]
    """[KEYS, COUNT / 4] i32, four columns each, from column `begin` on; under way."""
    return gl.load(rows[:, None] + (begin // 4 + gl.arange(0, COUNT // 4, gl.SliceLayout(0, LINES)))[None])


@gluon.jit  # type: ignore[untyped-decorator]
def _put(words, to, ready, E5M2: gl.constexpr):  # type: ignore[no-untyped-def]
    """As float16, to where products find it."""
    to.store(halves_of(words, E5M2))
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready)


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    of_tile, which: gl.constexpr,
    WANT_LSE: gl.constexpr, QUERY_LEN: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr, WIDEN: gl.constexpr,
):  # fmt: skip
    """A group of warps: weights of one block of each pair, and half of the columns of the result."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    query, results, item, scale, value_scale, tile, num_pairs, q, q_rope, held, between = of_tile
    output, lse, partial, partial_sums = results
    strips, _rope, _arrived, free = held
    weights_at, stats, _weighed, met = between
    row = gl.load(item)
    start, stop, place, parts = gl.load(item + 1), gl.load(item + 2), gl.load(item + 3), gl.load(item + 4)
    seq_len = gl.load(item + 5)
    if row >= 0:
        count, nth = parts // MOST_ITEMS, parts % MOST_ITEMS
        if WIDEN:
            _store_shares(query, q, q_rope, stats.index(2 + which), row, tile, which, QUERY_LEN * HEADS)
        else:
            _store_queries(query, q, q_rope, row, tile, which, QUERY_LEN * HEADS)
        _meet(met, 0)
        stretch, after = scale, scale
        if WIDEN:  # logits are scaled before they are compared: each row by another number
            stretch, after = stats.index(2 + which).load(ROW) * scale, 1.0

        values = strips._reinterpret(strips.dtype, [4, KEYS, HALF], BLOCK_LAYOUT)  # halves of both blocks
        sums = gl.zeros([ROWS, HALF], gl.float32, SUMS)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([ROWS], gl.float32, ROW)
        lane = tile * ROWS + gl.arange(0, ROWS, ROW)
        last_seen = gl.minimum(seq_len - QUERY_LEN + lane // HEADS, seq_len - 1)
        all_see = gl.minimum(seq_len - QUERY_LEN + 1, stop)  # keys before it need no mask
        for pair in range(num_pairs):
            turn = pair & 1
            first = start + 2 * pair * KEYS
            own = first + which * KEYS
            logits = _logits(q, q_rope, held, which, turn, LOGITS)
            barrier()
            mbarrier.arrive(free[2].index(which))
            if WIDEN:
                logits *= stretch[:, None]
            if own + KEYS > all_see:
                seen = own + gl.arange(0, KEYS, gl.SliceLayout(0, LOGITS))[None] <= last_seen[:, None]
                logits = gl.where(seen, logits, float("-inf"))
            if which == 0:
                weights, top, total, shrunk = weigh(logits, top, total, after)
                _hand_over(weights, top, between, 0)
                _clear(strips, 0, which, seq_len - first)
                weights = as_operand(weights, strips.dtype, sums)
                sums = warpgroup_mma(weights, values.index(which), times_rows(sums, shrunk), is_async=True)
                sums = warpgroup_mma_wait(0, deps=(sums,))
                barrier()
                mbarrier.arrive(free[which].index(0))
                top, total, shrunk = _take_over(top, total, between, 1, turn, after)
                _clear(strips, 1, which, seq_len - first - KEYS)
                sums = warpgroup_mma(weights_at, values.index(2 + which), times_rows(sums, shrunk), is_async=True)
            else:
                top, total, shrunk = _take_over(top, total, between, 0, turn, after)
                _clear(strips, 0, which, seq_len - first)
                sums = warpgroup_mma(weights_at, values.index(which), times_rows(sums, shrunk), is_async=True)
                weights, top, total, shrunk = weigh(logits, top, total, after)
                sums = warpgroup_mma_wait(0, deps=(sums,))
                barrier()
                mbarrier.arrive(free[which].index(0))
                _hand_over(weights, top, between, 1)
                _clear(strips, 1, which, seq_len - first - KEYS)
                weights = as_operand(weights, strips.dtype, sums)
                sums = warpgroup_mma(weights, values.index(2 + which), times_rows(sums, shrunk), is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            barrier()
            mbarrier.arrive(free[which].index(1))

        stats.index(2 + which).store(total)  # of the weights that this group worked out
        _meet(met, 1)
        total += stats.index(3 - which).load(ROW)
        live = lane < QUERY_LEN * HEADS
        top *= after
        saw = total > 0
        if count == 1:
            at = row.to(gl.int64) * (QUERY_LEN * HEADS) + lane
            divisor = gl.where(saw, total, 1.0)
            share = gl.where(saw, value_scale / divisor, 0.0)
            write_rows(output + at * RANK + which * HALF, sums, share, live)
            if WANT_LSE and which == 0:
                gl.store(lse + at, gl.where(saw, (top + gl.log2(divisor)) * LN_2, float("-inf")), mask=live)
        else:
            at = (place + nth).to(gl.int64) * (TILES * ROWS) + lane
            share = gl.full([ROWS], 1.0, gl.float32, ROW)
            write_rows(partial + at * RANK + which * HALF, sums, share, live)
            if which == 0:
                gl.store(partial_sums + at * 2, top, mask=live)
                gl.store(partial_sums + at * 2 + 1, total, mask=live)


@gluon.jit  # type: ignore[untyped-decorator]
def _meet(met, turn: gl.constexpr):  # type: ignore[no-untyped-def]
    """Both groups see what each has written to shared memory."""
    fence_async_shared()
    barrier()
    mbarrier.arrive(met.index(0))
    mbarrier.wait(met.index(0), turn)


@gluon.jit  # type: ignore[untyped-decorator]
def _logits(q, q_rope, held, block: gl.constexpr, turn, LOGITS: gl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, KEYS] of a block."""
    strips, rope, arrived, _free = held
    pieces = strips._reinterpret(strips.dtype, [2 * PIECES, KEYS, WIDTH], BLOCK_LAYOUT)
    logits = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
    mbarrier.wait(arrived[PIECES].index(block), turn)
    logits = warpgroup_mma(q_rope, rope.index(block).permute((1, 0)), logits, use_acc=False, is_async=True)
    for piece in gl.static_range(PIECES):
        mbarrier.wait(arrived[piece].index(block), turn)
        keys = pieces.index(block * PIECES + piece).permute((1, 0))
        logits = warpgroup_mma(q.index(piece), keys, logits, is_async=True)
    return warpgroup_mma_wait(0, deps=(logits,))


@gluon.jit  # type: ignore[untyped-decorator]
def _hand_over(weights, top, between, block: gl.constexpr):  # type: ignore[no-untyped-def]
    """A block's weights to the other group, and what they are relative to. There is one place for both groups': each
    has multiplied what the other left there before it writes."""
    weights_at, stats, weighed, _met = between
    weights_at.store(weights.to(weights_at.dtype))
    stats.index(block).store(top)
    fence_async_shared()
    barrier()
    mbarrier.arrive(weighed.index(block))


@gluon.jit  # type: ignore[untyped-decorator]
def _take_over(top, total, between, block: gl.constexpr, turn, scale):  # type: ignore[no-untyped-def]
    """Waits for the other group's weights of a block. Returns the logits that they are relative to, this group's total
    relative to the same, and what its sums shrink by."""
    _weights, stats, weighed, _met = between
    mbarrier.wait(weighed.index(block), turn)
    new_top = stats.index(block).load(top.type.layout)
    shrunk = gl.exp2(top * scale - gl.where(new_top == float("-inf"), 0.0, new_top * scale))
    return new_top, total * shrunk, shrunk


@gluon.jit  # type: ignore[untyped-decorator]
def _clear(strips, block: gl.constexpr, which: gl.constexpr, num_live):  # type: ignore[no-untyped-def]
    """Zeros for a block's rows from `num_live` on, in a group's columns. Its logits are there."""
    if num_live < KEYS:
        for part in gl.static_range(HALF // STRIP):
            clear_rows(strips.index((2 * block + which) * (HALF // STRIP) + part), num_live)
        fence_async_shared()
        barrier()


@gluon.jit  # type: ignore[untyped-decorator]
def _store_queries(  # type: ignore[no-untyped-def]
    query, q, q_rope, row, tile, which: gl.constexpr, QUERIES: gl.constexpr
):
    """A group's half of the tile's queries, in shared memory for good. All loads are under way before the first is
    stored."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    lane = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    from_row = query + (row.to(gl.int64) * QUERIES + lane)[:, None] * (RANK + ROPE)
    live = (lane < QUERIES)[:, None]
    at = from_row + gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))[None]
    loaded = ()
    for part in gl.static_range(PIECES // 2):
        piece = which * (PIECES // 2) + part
        loaded = loaded + (gl.load(at + piece * WIDTH, mask=live, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    if which == 0:
        at = from_row + RANK + gl.arange(0, ROPE, gl.SliceLayout(0, LINES))[None]
        q_rope.store(gl.load(at, mask=live, other=0.0))
    for part in gl.static_range(PIECES // 2):
        q.index(which * (PIECES // 2) + part).store(loaded[part])


@gluon.jit  # type: ignore[untyped-decorator]
def _store_shares(  # type: ignore[no-untyped-def]
    query, q, q_rope, largest_at, row, tile, which: gl.constexpr, QUERIES: gl.constexpr
):
    """The same as shares of each query's largest element, which is left for this group [ROWS] f32."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    lane = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    from_row = query + (row.to(gl.int64) * QUERIES + lane)[:, None] * (RANK + ROPE)
    live = (lane < QUERIES)[:, None]
    at = from_row + gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))[None]
    rope = gl.load(from_row + RANK + gl.arange(0, ROPE, gl.SliceLayout(0, LINES))[None], mask=live, other=0.0)
    largest = largest_of(rope)
    loaded = ()
    for piece in gl.static_range(PIECES):
        loaded = loaded + (gl.load(at + piece * WIDTH, mask=live, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    for piece in gl.static_range(PIECES):
        largest = gl.maximum(largest, largest_of(loaded[piece]))
    if which == 0:
        q_rope.store(shares_of(rope, largest))
    for part in gl.static_range(PIECES // 2):
        q.index(which * (PIECES // 2) + part).store(shares_of(loaded[which * (PIECES // 2) + part], largest))
    largest_at.store(largest)

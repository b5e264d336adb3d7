"""Decode on latent rows for many query heads, on Hopper: loads, products and softmax where they are to be, by Gluon.

A block of 64 latent rows is 72 KiB, and so are the queries of a tile. Triton's own pipeline holds two blocks, asks for
the next when all of a block's products are under way, and waits for it. Here a block is multiplied in pieces of 128
columns, and as soon as a piece has given its weighted values, a warp that does nothing else asks for that piece of the
next block that takes its place. FlashMLA (DeepSeek, 2025) copies and multiplies in such pieces too. There is one block
of 128 rows, which products make the most of, or there are two of 64, of which one can come while the other is in use.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_backends.triton_hopper import BLOCK_LAYOUT, barrier, barriers, clear_rows, write_rows
from attn_backends.triton_split import LN_2, MOST_ITEMS

ROWS, RANK, ROPE = gl.constexpr(64), gl.constexpr(512), gl.constexpr(64)
PIECES, WIDTH = gl.constexpr(4), gl.constexpr(128)  # of a block's columns
LOAD = gl.constexpr(64)  # rows and columns of one load: what a swizzle of 128 bytes is wide, and no page is smaller
WARPS = 8  # two groups: each has 64 columns of the logits, and of every piece of weighted values


def blocks_of(rows: torch.Tensor) -> Any:
    """Loads from [num_slots, RANK + ROPE], into shared memory as products want them."""
    return TensorDescriptor(rows, [*rows.shape], [*rows.stride()], [LOAD.value, LOAD.value], BLOCK_LAYOUT)


@gluon.jit(do_not_specialize=["table_row"])  # type: ignore[untyped-decorator]
def mla_hopper_kernel(  # type: ignore[no-untyped-def]
    query, blocks, output, lse, page_table, items, partial, partial_sums, scale, value_scale, table_row,
    WANT_LSE: gl.constexpr, PAGE_SIZE: gl.constexpr, QUERY_LEN: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr,
    KEYS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """One program an item and tile of 64 of its queries, as `mla_decode_kernel` does.

    Args:
        query: [num_rows, QUERY_LEN * HEADS, RANK + ROPE], contiguous.
        blocks: see `blocks_of`; PAGE_SIZE is a multiple of LOAD.
        output: [num_rows, QUERY_LEN * HEADS, RANK]; lse: [num_rows, QUERY_LEN * HEADS] f32.
        items: see `triton_split`; a place of partial results holds TILES * 64 queries of RANK.
        scale: of logits in base 2; value_scale: of the cache.
    """
    of_dtype: gl.constexpr = query.dtype.element_ty
    tile = gl.program_id(0) % TILES
    item = items + gl.program_id(0) // TILES * 8
    row = gl.load(item)
    start, stop = gl.load(item + 1), gl.load(item + 2)
    if row < 0:
        start = stop
    pages = page_table + gl.maximum(row, 0).to(gl.int64) * table_row
    num_blocks = (stop - start + KEYS - 1) // KEYS

    q = gl.allocate_shared_memory(of_dtype, [PIECES, ROWS, WIDTH], BLOCK_LAYOUT)
    weights_at = gl.allocate_shared_memory(of_dtype, [ROWS, KEYS], BLOCK_LAYOUT)
    columns = gl.allocate_shared_memory(of_dtype, [BLOCKS * (RANK // LOAD), KEYS, LOAD], BLOCK_LAYOUT)
    rope = gl.allocate_shared_memory(of_dtype, [BLOCKS, KEYS, ROPE], BLOCK_LAYOUT)
    arrived = _barriers_of(BLOCKS)
    free = _barriers_of(BLOCKS)
    fence_async_shared()
    held = (columns, rope, arrived, free)
    results = (output, lse, partial, partial_sums)
    gl.warp_specialize(
        [
            (_attend, (query, results, item, scale, value_scale, tile, num_blocks, q, weights_at, held, WANT_LSE,
                       QUERY_LEN, HEADS, TILES, KEYS, BLOCKS)),
            (_load, (blocks, pages, start, stop, num_blocks, held, PAGE_SIZE, KEYS, BLOCKS)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _barriers_of(BLOCKS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of the pieces, and of the rope keys; each is of every block in shared memory."""
    return barriers(BLOCKS, 1), barriers(BLOCKS, 1), barriers(BLOCKS, 1), barriers(BLOCKS, 1), barriers(BLOCKS, 1)


@gluon.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    blocks, pages, start, stop, num_blocks, held, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, BLOCKS: gl.constexpr
):
    """One warp: asks for the rope keys and every piece of every block once their place is free."""
    columns, rope, arrived, free = held
    for block in range(num_blocks):
        first = start + block * KEYS
        stage, turn = block % BLOCKS, block // BLOCKS & 1
        upper = _slot(pages, first, stop, PAGE_SIZE)
        lower = _slot(pages, first + LOAD, stop, PAGE_SIZE) if KEYS > LOAD else upper
        mbarrier.wait(free[PIECES].index(stage), turn ^ 1)
        ready = arrived[PIECES].index(stage)
        mbarrier.expect(ready, KEYS // LOAD * blocks.block_type.nbytes)
        _load_columns(blocks, upper, lower, RANK, ready, rope.index(stage), KEYS)
        for piece in gl.static_range(PIECES):
            mbarrier.wait(free[piece].index(stage), turn ^ 1)
            ready = arrived[piece].index(stage)
            mbarrier.expect(ready, WIDTH // LOAD * (KEYS // LOAD) * blocks.block_type.nbytes)
            for part in gl.static_range(WIDTH // LOAD):
                part += WIDTH // LOAD * piece
                to = columns.index(stage * (RANK // LOAD) + part)
                _load_columns(blocks, upper, lower, part * LOAD, ready, to, KEYS)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_columns(blocks, upper, lower, column, ready, to, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """LOAD columns of a block's rows, which begin at the slots `upper` and, its second half, `lower`."""
    tma.async_copy_global_to_shared(blocks, [upper, column], ready, to.slice(0, LOAD))
    if KEYS > LOAD:
        tma.async_copy_global_to_shared(blocks, [lower, column], ready, to.slice(LOAD, LOAD))


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, results, item, scale, value_scale, tile, num_blocks, q, weights_at, held,
    WANT_LSE: gl.constexpr, QUERY_LEN: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr,
    KEYS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Two groups of warps: products, softmax, and the result."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, WIDTH // 2, 16])  # of a piece
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    of_dtype: gl.constexpr = query.dtype.element_ty
    output, lse, partial, partial_sums = results
    columns, rope, arrived, free = held
    row = gl.load(item)
    start, stop, place, parts = gl.load(item + 1), gl.load(item + 2), gl.load(item + 3), gl.load(item + 4)
    seq_len = gl.load(item + 5)
    if row >= 0:
        count, nth = parts // MOST_ITEMS, parts % MOST_ITEMS
        values = columns._reinterpret(of_dtype, [BLOCKS * PIECES, KEYS, WIDTH], BLOCK_LAYOUT)
        q_rope_at = weights_at.slice(0, ROPE, dim=1)  # whose place weights take
        _store_queries(query, q, q_rope_at, row, tile, QUERY_LEN * HEADS)
        q_rope = q_rope_at.load(gl.DotOperandLayout(0, LOGITS, 2))  # stays in registers
        fence_async_shared()

        zeros = gl.zeros([ROWS, WIDTH], gl.float32, VALUES)
        sums = (zeros, zeros, zeros, zeros)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        nothing = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
        total = _sums_of_thread(nothing)
        lane = tile * ROWS + gl.arange(0, ROWS, ROW)
        last_seen = gl.minimum(seq_len - QUERY_LEN + lane // HEADS, seq_len - 1)
        all_see = gl.minimum(seq_len - QUERY_LEN + 1, stop)  # keys before it need no mask
        for block in range(num_blocks):
            first = start + block * KEYS
            stage, turn = block % BLOCKS, block // BLOCKS & 1
            mbarrier.wait(arrived[PIECES].index(stage), turn)
            rope_keys = rope.index(stage).permute((1, 0))
            logits = warpgroup_mma(q_rope, rope_keys, nothing, use_acc=False, is_async=True)
            for piece in gl.static_range(PIECES):
                mbarrier.wait(arrived[piece].index(stage), turn)
                keys = values.index(stage * PIECES + piece).permute((1, 0))
                logits = warpgroup_mma(q.index(piece), keys, logits, is_async=True)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            barrier()
            mbarrier.arrive(free[PIECES].index(stage))
            if first + KEYS > all_see:
                seen = first + gl.arange(0, KEYS, gl.SliceLayout(0, LOGITS))[None] <= last_seen[:, None]
                logits = gl.where(seen, logits, float("-inf"))
            if first + KEYS > seq_len:
                for part in gl.static_range(RANK // LOAD):
                    clear_rows(columns.index(stage * (RANK // LOAD) + part), seq_len - first)
                fence_async_shared()
            new_top = gl.maximum(top, gl.max(logits, 1) * scale)
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            weights = gl.exp2(logits * scale - base[:, None])
            shrunk = gl.exp2(top - base)
            top = new_top
            weights_at.store(weights.to(of_dtype))
            fence_async_shared()
            barrier()
            shrink = gl.convert_layout(shrunk, gl.SliceLayout(1, VALUES), assert_trivial=True)[:, None]
            piece_0 = stage * PIECES
            sums = (
                warpgroup_mma(weights_at, values.index(piece_0), sums[0] * shrink, is_async=True),
                warpgroup_mma(weights_at, values.index(piece_0 + 1), sums[1] * shrink, is_async=True),
                warpgroup_mma(weights_at, values.index(piece_0 + 2), sums[2] * shrink, is_async=True),
                warpgroup_mma(weights_at, values.index(piece_0 + 3), sums[3] * shrink, is_async=True),
            )
            total = total * _of_rows(shrunk, total) + _sums_of_thread(weights)
            for piece in gl.static_range(PIECES):  # where both groups are done with one, its place is free
                sums = warpgroup_mma_wait(PIECES - 1 - piece, deps=sums)
                barrier()
                mbarrier.arrive(free[piece].index(stage))

        live = lane < QUERY_LEN * HEADS
        total_of = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), ROW)
        saw = total_of > 0
        divisor = gl.where(saw, total_of, 1.0)
        if count == 1:
            at = row.to(gl.int64) * (QUERY_LEN * HEADS) + lane
            share = gl.where(saw, value_scale / divisor, 0.0)
            _write(output + at * RANK, sums, share, live)
            if WANT_LSE:
                gl.store(lse + at, gl.where(saw, (top + gl.log2(divisor)) * LN_2, float("-inf")), mask=live)
        else:
            at = (place + nth).to(gl.int64) * (TILES * ROWS) + lane
            share = gl.full([ROWS], 1.0, gl.float32, ROW)
            _write(partial + at * RANK, sums, share, live)
            gl.store(partial_sums + at * 2, top, mask=live)
            gl.store(partial_sums + at * 2 + 1, total_of, mask=live)


@gluon.jit  # type: ignore[untyped-decorator]
def _slot(pages, key, stop, PAGE_SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where a key lies; anywhere, if there is no such key."""
    return gl.load(pages + key // PAGE_SIZE, mask=key < stop, other=0) * PAGE_SIZE + key % PAGE_SIZE


@gluon.jit  # type: ignore[untyped-decorator]
def _store_queries(query, q, q_rope, row, tile, QUERIES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The tile's queries, in shared memory for good. All loads are under way before the first is stored."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    lane = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    from_row = query + (row.to(gl.int64) * QUERIES + lane)[:, None] * (RANK + ROPE)
    live = (lane < QUERIES)[:, None]
    at = from_row + gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))[None]
    loaded = ()
    for piece in gl.static_range(PIECES):
        loaded = loaded + (gl.load(at + piece * WIDTH, mask=live, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    at = from_row + RANK + gl.arange(0, ROPE, gl.SliceLayout(0, LINES))[None]
    loaded_rope = gl.load(at, mask=live, other=0.0)
    for piece in gl.static_range(PIECES):
        q.index(piece).store(loaded[piece])
    q_rope.store(loaded_rope)


@gluon.jit
def _sums_of_thread(weights):  # type: ignore[no-untyped-def]
    """[ROWS, 2, 8] of [ROWS, KEYS]: over the columns that one thread has, without a word to the others."""
    return gl.sum(gl.reshape(weights, [ROWS, 2, weights.shape[1] // 16, 8]), 2)


@gluon.jit
def _of_rows(values, like):  # type: ignore[no-untyped-def]
    """[ROWS] as [ROWS, 1, 1], where `like` has its rows."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))
    values = gl.convert_layout(values, layout, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(values, 1), 2)


@gluon.jit
def _write(rows, sums, share, live):  # type: ignore[no-untyped-def]
    """Weighted values of every row, each times the row's share."""
    for piece in gl.static_range(PIECES):
        write_rows(rows + piece * WIDTH, sums[piece], share, live)

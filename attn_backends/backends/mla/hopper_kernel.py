"""Decode on latent rows for many query heads, on Hopper: loads, products and softmax where they are to be, by Gluon.

With 64 queries a tile a block of 64 latent rows is 72 KiB: two fit beside the queries. Triton's own pipeline asks for
the next one when all products of a block are under way, and waits for it. Here a block is asked for as soon as the one
before last has left its place, and comes while another is multiplied.
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

from attn_backends.triton_split import LN_2, MOST_ITEMS

WARPS = 8  # two groups, each of which holds half of the weighted values

ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # as older versions call it


def rows_of(rows: torch.Tensor, keys: int, width: int) -> Any:
    """Blocks of [keys, width] of [num_slots, dim], in shared memory as products want them."""
    return TensorDescriptor(rows, [*rows.shape], [*rows.stride()], [keys, width], ROWS_LAYOUT)


@gluon.jit(do_not_specialize=["table_row"])  # type: ignore[untyped-decorator]
def mla_hopper_kernel(  # type: ignore[no-untyped-def]
    query, latent_rows, rope_rows, output, lse, page_table, items, partial, partial_sums, scale, value_scale, table_row,
    WANT_LSE: gl.constexpr, PAGE_SIZE: gl.constexpr, QUERY_LEN: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr,
    RANK: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """One program an item and tile of 64 of its queries, as `mla_decode_kernel` does.

    Args:
        query: [num_rows, QUERY_LEN * HEADS, RANK + ROPE], contiguous.
        latent_rows, rope_rows: descriptors of the cache as [num_slots, RANK + ROPE], for blocks of [64, RANK] and
            [64, ROPE], in shared memory as products want them; a block lies in one page.
        output: [num_rows, QUERY_LEN * HEADS, RANK]; lse: [num_rows, QUERY_LEN * HEADS] f32.
        items: see `triton_split`; a place of partial results holds TILES * 64 queries of RANK.
        scale: of logits in base 2; value_scale: of the cache.
    """
    ROWS: gl.constexpr = 64
    KEYS: gl.constexpr = 64
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    of_dtype: gl.constexpr = query.dtype.element_ty
    tile = gl.program_id(0) % TILES
    item = items + gl.program_id(0) // TILES * 8
    row = gl.load(item)
    start, stop, place, parts = gl.load(item + 1), gl.load(item + 2), gl.load(item + 3), gl.load(item + 4)
    seq_len = gl.load(item + 5)
    if row >= 0:
        count, nth = parts // MOST_ITEMS, parts % MOST_ITEMS
        pages = page_table + row.to(gl.int64) * table_row
        num_blocks = (stop - start + KEYS - 1) // KEYS

        latent = gl.allocate_shared_memory(of_dtype, [2, KEYS, RANK], latent_rows.layout)
        rope = gl.allocate_shared_memory(of_dtype, [2, KEYS, ROPE], rope_rows.layout)
        arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for place_of in gl.static_range(2):
            mbarrier.init(arrived.index(place_of), 1)
        fence_async_shared()
        for nth_block in gl.static_range(2):
            _ask_for(latent_rows, rope_rows, latent, rope, arrived, pages, start, nth_block, num_blocks, PAGE_SIZE)

        # The tile's queries, in shared memory for good.
        q = gl.allocate_shared_memory(of_dtype, [ROWS, RANK], latent_rows.layout)
        q_rope = gl.allocate_shared_memory(of_dtype, [ROWS, ROPE], rope_rows.layout)
        lane = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
        from_row = query + (row.to(gl.int64) * (QUERY_LEN * HEADS) + lane)[:, None] * (RANK + ROPE)
        live = (lane < QUERY_LEN * HEADS)[:, None]
        q.store(gl.load(from_row + gl.arange(0, RANK, gl.SliceLayout(0, LINES))[None], mask=live, other=0.0))
        q_rope.store(
            gl.load(from_row + RANK + gl.arange(0, ROPE, gl.SliceLayout(0, LINES))[None], mask=live, other=0.0)
        )
        weights_of = gl.allocate_shared_memory(of_dtype, [ROWS, KEYS], rope_rows.layout)
        fence_async_shared()

        sums = gl.zeros([ROWS, RANK], gl.float32, SUMS)
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LOGITS))
        nothing = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
        query_of = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOGITS))
        last_seen = gl.minimum(seq_len - QUERY_LEN + query_of // HEADS, seq_len - 1)
        all_see = gl.minimum(seq_len - QUERY_LEN + 1, stop)  # keys before it need no mask
        columns = gl.arange(0, KEYS, gl.SliceLayout(0, LOGITS))
        for block in range(num_blocks):
            held = block % 2
            first = start + block * KEYS
            keys, ropes = latent.index(held), rope.index(held)
            mbarrier.wait(arrived.index(held), block // 2 & 1)
            if first + KEYS > seq_len:
                _clear(keys, seq_len - first, RANK)
            logits = warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)
            logits = warpgroup_mma(q_rope, ropes.permute((1, 0)), logits, is_async=True)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            if first + KEYS > all_see:
                logits = gl.where(first + columns[None] <= last_seen[:, None], logits, float("-inf"))
            new_top = gl.maximum(top, gl.max(logits, 1) * scale)
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            weights = gl.exp2(logits * scale - base[:, None])
            shrunk = gl.exp2(top - base)
            total = total * shrunk + gl.sum(weights, 1)
            top = new_top
            weights_of.store(weights.to(of_dtype))
            sums = sums * gl.convert_layout(shrunk, gl.SliceLayout(1, SUMS))[:, None]
            fence_async_shared()
            _barrier()
            sums = warpgroup_mma(weights_of, keys, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            _barrier()  # both groups have read the block, and its place is free
            _ask_for(latent_rows, rope_rows, latent, rope, arrived, pages, start, block + 2, num_blocks, PAGE_SIZE)
        for place_of in gl.static_range(2):
            mbarrier.invalidate(arrived.index(place_of))

        ranks = gl.arange(0, RANK, gl.SliceLayout(0, SUMS))
        at_lane = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        live_sums, live_row = at_lane < QUERY_LEN * HEADS, query_of < QUERY_LEN * HEADS
        if count == 1:
            saw = total > 0
            divisor = gl.where(saw, total, 1.0)
            share = gl.convert_layout(gl.where(saw, value_scale / divisor, 0.0), gl.SliceLayout(1, SUMS))
            at = row.to(gl.int64) * (QUERY_LEN * HEADS) + at_lane
            gl.store(output + at[:, None] * RANK + ranks[None], (sums * share[:, None]).to(output.dtype.element_ty),
                     mask=live_sums[:, None])  # fmt: skip
            if WANT_LSE:
                log_sum = gl.where(saw, (top + gl.log2(divisor)) * LN_2, float("-inf"))
                gl.store(lse + row.to(gl.int64) * (QUERY_LEN * HEADS) + query_of, log_sum, mask=live_row)
        else:
            before = (place + nth).to(gl.int64) * (TILES * ROWS)
            gl.store(partial + (before + at_lane)[:, None] * RANK + ranks[None], sums, mask=live_sums[:, None])
            gl.store(partial_sums + (before + query_of) * 2, top, mask=live_row)
            gl.store(partial_sums + (before + query_of) * 2 + 1, total, mask=live_row)


@gluon.jit  # type: ignore[untyped-decorator]
def _ask_for(  # type: ignore[no-untyped-def]
    latent_rows, rope_rows, latent, rope, arrived, pages, start, block, num_blocks, PAGE_SIZE: gl.constexpr
):
    """Have a block loaded into its place, if there is such a block: one thread asks."""
    exists = block < num_blocks
    first = start + block * latent.shape[1]
    slot = gl.load(pages + first // PAGE_SIZE, mask=exists, other=0) * PAGE_SIZE + first % PAGE_SIZE
    place = block % 2
    ready = arrived.index(place)
    mbarrier.expect(ready, latent_rows.block_type.nbytes + rope_rows.block_type.nbytes, pred=exists)
    tma.async_copy_global_to_shared(latent_rows, [slot, 0], ready, latent.index(place), pred=exists)
    tma.async_copy_global_to_shared(rope_rows, [slot, latent.shape[2]], ready, rope.index(place), pred=exists)


@gluon.jit  # type: ignore[untyped-decorator]
def _clear(keys, num_live, RANK: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros for rows from `num_live` on: what lies behind the last key may be NaN, which no weight of zero undoes."""
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    live = gl.arange(0, keys.shape[0], gl.SliceLayout(1, PIECE)) < num_live
    for piece in gl.static_range(RANK // 64):
        part = keys.slice(piece * 64, 64, dim=1)
        values = part.load(PIECE)
        part.store(gl.where(live[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    _barrier()

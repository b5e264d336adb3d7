"""Prefill on Hopper: loads, products and softmax where they are to be, by Triton's Gluon.

Two groups of warps have 64 queries each and share the keys. A group asks for the next block's logits, then for the
values that the last block's weights give, and works out its weights while the latter are under way, as FlashAttention-3
does (Shah et al., 2024). A warp that does nothing else loads keys and values by the tensor memory accelerator, out of
pages of any multiple of 16 slots.
"""

from __future__ import annotations

import math

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

from attn_backends.backends.triton.tile import rows_of, tile_of
from attn_backends.triton_hopper import (
    BLOCK_LAYOUT,
    as_operand,
    barrier,
    barriers,
    clear_rows,
    times_rows,
    weigh,
    write_rows,
)
from attn_backends.triton_split import FAR, LN_2, LOG2_E, first_key

ROWS = gl.constexpr(64)  # queries of a group of warps
STRIP = gl.constexpr(64)  # columns of one load: what a swizzle of 128 bytes is wide
STAGES = gl.constexpr(2)  # blocks of keys, and of values, in shared memory
GROUP_WARPS = 4


def keys_of(head_dim: int) -> int:
    """Of a block."""
    return 128 if head_dim <= 128 else 64


def rows_of_load(page_size: int, keys: int) -> int:
    """Rows that lie together wherever a block begins; a page size of 0 stands for keys without pages."""
    return math.gcd(page_size, keys) or keys


def strips_of(shape: list[int], strides: list[int], tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Loads of `rows` rows and STRIP columns into shared memory, as products want them."""
    return TensorDescriptor(tensor, shape, strides, [rows, STRIP.value], BLOCK_LAYOUT)


_NOT_CONSTANT = ["first_row", "num_rows", "num_tiles", "section", "table_row", "ahead", "behind", "chunk", "has_sinks",
                 "want_lse", "lse_token", "page_rows", "head_rows"]  # fmt: skip


@gluon.jit(do_not_specialize=_NOT_CONSTANT)  # type: ignore[untyped-decorator]
def prefill_hopper_kernel(  # type: ignore[no-untyped-def]
    query, key_strips, value_strips, output, lse, page_table, seq_lens, query_start_loc, key_start_loc, sinks,
    scale, value_scale, ahead, behind, chunk, has_sinks, want_lse, first_row, num_rows, num_tiles, section, table_row,
    page_rows, head_rows, key_head, value_head, query_token, query_head, out_token, out_head, lse_token,
    PAGE_SIZE: gl.constexpr, LOAD: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    KEYS: gl.constexpr, DIM: gl.constexpr, DIM_VO: gl.constexpr,
):  # fmt: skip
    """One program a tile, as `prefill_kernel` has them, of 2 * ROWS queries.

    Args:
        key_strips, value_strips: see `strips_of`; loads have LOAD rows.
        page_rows, head_rows: rows of them from page to page, and from head to head.
        key_head, value_head: columns from head to head.
        scale: of logits in base 2, positive; value_scale: of the cache.
    """
    of_dtype: gl.constexpr = query.dtype.element_ty
    head, tile = tile_of(gl.program_id(0), num_tiles, section, KV_HEADS)
    row, first_token, query_len, first = rows_of(tile, query_start_loc, first_row, num_rows, TOKENS)
    seq_len = gl.load(seq_lens + row)
    oldest = seq_len - query_len + first  # position of the tile's first query
    start = first_key(oldest, behind, chunk) // KEYS * KEYS
    stop = gl.minimum(seq_len, oldest + TOKENS + ahead)
    if first >= query_len:
        stop = start
    num_blocks = gl.maximum(stop - start + KEYS - 1, 0) // KEYS
    # Blocks come from the last on. Of the first `num_masked` some query may not see all; behind them none needs a mask.
    num_masked = num_blocks
    if gl.minimum(behind, chunk) >= FAR:
        num_masked -= gl.maximum(gl.minimum(seq_len, oldest + 1 + ahead) - start, 0) // KEYS

    at_row, from_pages = head * head_rows, page_table
    if PAGE_SIZE == 0:
        at_row += gl.load(key_start_loc + row)
    else:
        from_pages += row.to(gl.int64) * table_row
    q_0 = gl.allocate_shared_memory(of_dtype, [DIM // STRIP, ROWS, STRIP], BLOCK_LAYOUT)
    q_1 = gl.allocate_shared_memory(of_dtype, [DIM // STRIP, ROWS, STRIP], BLOCK_LAYOUT)
    keys = gl.allocate_shared_memory(of_dtype, [STAGES * (DIM // STRIP), KEYS, STRIP], BLOCK_LAYOUT)
    values = gl.allocate_shared_memory(of_dtype, [STAGES * (DIM_VO // STRIP), KEYS, STRIP], BLOCK_LAYOUT)
    arrived = (barriers(STAGES, 1), barriers(STAGES, 1))  # of keys, of values
    free = (barriers(STAGES, 2), barriers(STAGES, 2))  # by both groups
    fence_async_shared()

    held = (keys, values, arrived, free)
    tensors = (query, output, lse, sinks)
    strides = (query_token, query_head, out_token, out_head, lse_token)
    factors = (scale, value_scale)
    sees = (ahead, behind, chunk, has_sinks, want_lse)
    of_tile = (head, first_token, query_len, first, seq_len, start, num_blocks, num_masked)
    gl.warp_specialize(
        [
            (_attend, (tensors, strides, factors, sees, of_tile, q_0, held, 0, GROUP, TOKENS, KEYS, DIM, DIM_VO)),
            (_attend, (tensors, strides, factors, sees, of_tile, q_1, held, 1, GROUP, TOKENS, KEYS, DIM, DIM_VO)),
            (_load, (key_strips, value_strips, from_pages, at_row, page_rows, head * key_head, head * value_head,
                     start, seq_len, num_blocks, held, PAGE_SIZE, LOAD, KEYS, DIM, DIM_VO)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    key_strips, value_strips, pages, at_row, page_rows, key_column, value_column, start, seq_len, num_blocks, held,
    PAGE_SIZE: gl.constexpr, LOAD: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, DIM_VO: gl.constexpr,
):  # fmt: skip
    """One warp: asks for every block's keys and values, the last block first, once their places are free."""
    keys, values, arrived, free = held
    for block in range(num_blocks):
        stage, turn = block % STAGES, block // STAGES & 1
        first = start + (num_blocks - 1 - block) * KEYS
        rows = ()
        for part in gl.static_range(KEYS // LOAD):
            at = first + part * LOAD
            row = at_row + at
            if PAGE_SIZE != 0:
                page = gl.load(pages + at // PAGE_SIZE, mask=at < seq_len, other=0)
                row = at_row + page * page_rows + at % PAGE_SIZE
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(free[0].index(stage), turn ^ 1)
        _load_block(key_strips, rows, key_column, arrived[0].index(stage), keys, stage, LOAD, KEYS, DIM)
        mbarrier.wait(free[1].index(stage), turn ^ 1)
        _load_block(value_strips, rows, value_column, arrived[1].index(stage), values, stage, LOAD, KEYS, DIM_VO)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_block(  # type: ignore[no-untyped-def]
    strips, rows, column, ready, to, stage, LOAD: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr
):
    mbarrier.expect(ready, KEYS // LOAD * (WIDTH // STRIP) * strips.block_type.nbytes)
    for strip in gl.static_range(WIDTH // STRIP):
        place = to.index(stage * (WIDTH // STRIP) + strip)
        for part in gl.static_range(KEYS // LOAD):
            at = place.slice(part * LOAD, LOAD)
            tma.async_copy_global_to_shared(strips, [rows[part], column + strip * STRIP], ready, at)


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    tensors, strides, factors, sees, of_tile, q, held, which: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, DIM_VO: gl.constexpr,
):  # fmt: skip
    """A group of warps: 64 of a tile's queries."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_VO, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    query, output, lse, sinks = tensors
    query_token, query_head, out_token, out_head, lse_token = strides
    ahead, behind, chunk, has_sinks, want_lse = sees
    scale, value_scale = factors
    head, first_token, query_len, first, seq_len, start, num_blocks, num_masked = of_tile
    _store_queries(query, q, head, first_token, query_len, first, query_token, query_head, which, GROUP, TOKENS, DIM)

    lane = which * ROWS + gl.arange(0, ROWS, ROW)
    token = first + lane // GROUP
    position = seq_len - query_len + token
    low = first_key(position, behind, chunk)
    high = gl.minimum(position + ahead, gl.maximum(position, 0) // chunk * chunk + (chunk - 1))
    high = gl.minimum(high, seq_len - 1)
    last = start + (num_blocks - 1) * KEYS

    keys, values, arrived, free = held
    values = values._reinterpret(values.dtype, [STAGES, KEYS, DIM_VO], BLOCK_LAYOUT)
    sums = gl.zeros([ROWS, DIM_VO], gl.float32, SUMS)
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    if num_blocks > 0:
        if last + KEYS > seq_len:  # both groups write the same
            mbarrier.wait(arrived[1].index(0), 0)
            clear_rows(values.index(0), seq_len - last)
            fence_async_shared()
            barrier()
        logits = _logits(q, keys, arrived[0], 0, LOGITS, KEYS, DIM)
        logits = warpgroup_mma_wait(0, deps=(logits,))
        barrier()
        mbarrier.arrive(free[0].index(0))
        weights, top, total, _shrunk = weigh(_masked(logits, last, low, high), top, total, scale)
        so_far = (as_operand(weights, values.dtype, sums), sums, top, total)
        so_far = _blocks(so_far, q, held, values, 1, num_masked, last, low, high, scale, True, KEYS, DIM, DIM_VO)
        so_far = _blocks(so_far, q, held, values, gl.maximum(num_masked, 1), num_blocks, last, low, high, scale, False,
                         KEYS, DIM, DIM_VO)  # fmt: skip
        weights, sums, top, total = so_far
        stage, turn = (num_blocks - 1) % STAGES, (num_blocks - 1) // STAGES & 1
        mbarrier.wait(arrived[1].index(stage), turn)
        sums = warpgroup_mma(weights, values.index(stage), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))

    live = (token < query_len) & (lane < TOKENS * GROUP)
    q_head = head * GROUP + lane % GROUP
    at = (first_token + token).to(gl.int64)
    saw = total > 0
    top *= scale
    sink = gl.load(sinks + q_head, mask=live & (has_sinks != 0), other=float("-inf")) * LOG2_E
    higher = gl.maximum(top, sink)
    shrunk = gl.exp2(top - higher)
    total = total * shrunk + gl.exp2(sink - higher)
    share = gl.where(saw, value_scale * shrunk / gl.where(saw, total, 1.0), 0.0)
    write_rows(output + at * out_token + q_head * out_head, sums, share, live)
    if want_lse != 0:
        log_sum = (higher + gl.log2(gl.where(saw, total, 1.0))) * LN_2
        gl.store(lse + at * lse_token + q_head, gl.where(saw, log_sum, float("-inf")), mask=live)


@gluon.jit  # type: ignore[untyped-decorator]
def _blocks(  # type: ignore[no-untyped-def]
    so_far, q, held, values, begin, end, last, low, high, scale, MASKED: gl.constexpr, KEYS: gl.constexpr,
    DIM: gl.constexpr, DIM_VO: gl.constexpr,
):  # fmt: skip
    """The weights of blocks `begin` to `end`, and the weighted values of those from `begin` - 1 to `end` - 1."""
    weights, sums, top, total = so_far
    LOGITS: gl.constexpr = top.type.layout.parent
    keys, _, arrived, free = held
    for block in range(begin, end):
        before = (block - 1) % STAGES
        pending = _logits(q, keys, arrived[0], block, LOGITS, KEYS, DIM)
        mbarrier.wait(arrived[1].index(before), (block - 1) // STAGES & 1)
        sums_pending = warpgroup_mma(weights, values.index(before), sums, is_async=True)
        logits = warpgroup_mma_wait(1, deps=(pending,))
        barrier()
        mbarrier.arrive(free[0].index(block % STAGES))
        if MASKED:
            logits = _masked(logits, last - block * KEYS, low, high)
        given, top, total, shrunk = weigh(logits, top, total, scale)
        weights = as_operand(given, values.dtype, sums)
        sums = warpgroup_mma_wait(0, deps=(sums_pending,))
        barrier()
        mbarrier.arrive(free[1].index(before))
        sums = times_rows(sums, shrunk)
    return weights, sums, top, total


@gluon.jit  # type: ignore[untyped-decorator]
def _logits(  # type: ignore[no-untyped-def]
    q, keys, arrived, block, LOGITS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr
):
    """[ROWS, KEYS] of a block, under way."""
    stage = block % STAGES
    logits = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
    mbarrier.wait(arrived.index(stage), block // STAGES & 1)
    for strip in gl.static_range(DIM // STRIP):
        of_strip = keys.index(stage * (DIM // STRIP) + strip).permute((1, 0))
        logits = warpgroup_mma(q.index(strip), of_strip, logits, use_acc=strip > 0, is_async=True)
    return logits


@gluon.jit
def _masked(logits, first, low, high):  # type: ignore[no-untyped-def]
    """Logits of keys from `first` on, where a query sees them."""
    key = first + gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))
    return gl.where((key[None] >= low[:, None]) & (key[None] <= high[:, None]), logits, float("-inf"))


@gluon.jit  # type: ignore[untyped-decorator]
def _store_queries(  # type: ignore[no-untyped-def]
    query, q, head, first_token, query_len, first, query_token, query_head, which: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """A group's queries, in shared memory for good. All loads are under way before the first is stored."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    token = first + lane // GROUP
    live = (token < query_len) & (lane < TOKENS * GROUP)
    at = query + (first_token + token).to(gl.int64) * query_token + (head * GROUP + lane % GROUP) * query_head
    at = at[:, None] + gl.arange(0, STRIP, gl.SliceLayout(0, LINES))[None]
    loaded = ()
    for strip in gl.static_range(DIM // STRIP):
        loaded = loaded + (gl.load(at + strip * STRIP, mask=live[:, None], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    for strip in gl.static_range(DIM // STRIP):
        q.index(strip).store(loaded[strip])
    fence_async_shared()
    barrier()

"""Prefill on Hopper: loads, products and softmax where they are to be, by Triton's Gluon.

Two groups of warps have 64 queries each and share the keys. A group asks for the next block's logits, then for the
values that the last block's weights give, and works out its weights while the latter are under way, as FlashAttention-3
does (Shah et al., 2024). A warp that does nothing else loads keys and values by the tensor memory accelerator, out of
pages of any multiple of 16 slots. A program for each multiprocessor goes from tile to tile until none is left: one more
warp takes them, and tells the others a tile ahead what they are to know, so that nobody waits for what is in memory.
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

from attn_backends.backends.triton.kernels.tile import tile_of
from attn_backends.kernels.hopper import (
    BLOCK_LAYOUT,
    LANE_LAYOUT,
    LANES,
    STRIP,
    as_operand,
    barrier,
    barriers,
    clear_rows,
    nth_of,
    page_ids,
    times_rows,
    weigh,
    write_lines,
    write_rows,
)
from attn_backends.kernels.launch import let_next_start
from attn_backends.kernels.split_kv import FAR, LN_2, LOG2_E, first_key, seen_by_all

ROWS = gl.constexpr(64)  # queries of a group of warps
STAGES = gl.constexpr(2)  # blocks of keys, and of values, in shared memory
NUMBERS = gl.constexpr(10)  # that are told of a tile
BATCH = gl.constexpr(4)  # loads of keys or values that code is written out for
GROUP_WARPS = 4


def keys_of(head_dim: int) -> int:
    """Of a block."""
    return 128 if head_dim <= 128 else 64


def places_of(head_dim: int) -> int:
    """For queries: of this tile and the next, where both fit."""
    return 1 if head_dim > 192 else 2


_NOT_CONSTANT = ["first_row", "num_rows", "section", "table_row", "ahead", "behind", "has_sinks", "want_lse",
                 "lse_token", "page_rows", "head_rows", "num_batches"]  # fmt: skip
# No code depends on whether these are aligned.
_ANYWHERE = ["lse", "page_table", "seq_lens", "query_start_loc", "key_start_loc", "sinks"]


@gluon.jit(do_not_specialize=_NOT_CONSTANT, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def prefill_hopper_kernel(  # type: ignore[no-untyped-def]
    key_strips, value_strips, query, output, lse, page_table, seq_lens, query_start_loc, key_start_loc, sinks, counters,
    first_row, num_rows, section, table_row, scale, value_scale, ahead, behind, has_sinks, want_lse, page_rows,
    head_rows, num_batches, key_head, value_head, query_token, query_head, out_token, out_head, lse_token,
    CHUNK: gl.constexpr, LOCAL: gl.constexpr, PAGE_SIZE: gl.constexpr, LOAD: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, DIM_VO: gl.constexpr,
    PLACES: gl.constexpr, LETS_NEXT_START: gl.constexpr,
):  # fmt: skip
    """Programs that go from tile to tile, as `prefill_kernel` has them, of 2 * ROWS queries: the first by number, then
    whichever is next.

    Args:
        key_strips, value_strips: see `triton_hopper.strips_of`; loads have LOAD rows.
        counters: [2] i32, zeros between launches: tiles that were taken, and programs that are done.
        page_rows, head_rows: rows of them from page to page, and from head to head.
        num_batches: of a block's loads, by BATCH or as many as there are. Not a constant: a compiler that writes all of
            them out has too few registers left, for the other warps too.
        key_head, value_head: columns from head to head.
        scale: of logits in base 2, positive; value_scale: of the cache.
        query_token, query_head: multiples of 16, and `query` of 16 bytes.
        CHUNK: positions of a chunk, FAR where there are none: one that is known needs no divisions.
        LOCAL: of windows and chunks some blocks may need no mask, which else all have.
        PLACES: for queries, 2 or 1.
        LETS_NEXT_START: the next kernel runs beside this one, where it leaves multiprocessors free, and waits for it.
    """
    if LETS_NEXT_START:
        let_next_start()
    of_dtype: gl.constexpr = query.dtype.element_ty
    q_0 = gl.allocate_shared_memory(of_dtype, [PLACES * (DIM // STRIP), ROWS, STRIP], BLOCK_LAYOUT)
    q_1 = gl.allocate_shared_memory(of_dtype, [PLACES * (DIM // STRIP), ROWS, STRIP], BLOCK_LAYOUT)
    keys = gl.allocate_shared_memory(of_dtype, [STAGES * (DIM // STRIP), KEYS, STRIP], BLOCK_LAYOUT)
    values = gl.allocate_shared_memory(of_dtype, [STAGES * (DIM_VO // STRIP), KEYS, STRIP], BLOCK_LAYOUT)
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    first_ids = gl.allocate_shared_memory(gl.int32, [1, LANES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    arrived = (barriers(STAGES, 1), barriers(STAGES, 1))  # of keys, of values
    free = (barriers(STAGES, 2), barriers(STAGES, 2))  # by both groups
    told, heard = barriers(1, 1), barriers(1, 3)
    fence_async_shared()

    held = (keys, values, arrived, free)
    news = (numbers, first_ids, told, heard)
    tensors = (query, output, lse, sinks)
    strides = (query_token, query_head, out_token, out_head, lse_token)
    factors = (scale, value_scale)
    sees, wants = (ahead, behind), (has_sinks, want_lse)
    rows = (seq_lens, query_start_loc, key_start_loc, page_table, table_row)
    spans = (first_row, num_rows, section)
    steps = (page_rows, head_rows, key_head, value_head, num_batches)
    gl.warp_specialize(
        [
            (_attend, (tensors, strides, factors, sees, wants, q_0, held, news, 0, CHUNK, LOCAL, GROUP, TOKENS, KEYS,
                       DIM, DIM_VO, PLACES)),
            (_attend, (tensors, strides, factors, sees, wants, q_1, held, news, 1, CHUNK, LOCAL, GROUP, TOKENS, KEYS,
                       DIM, DIM_VO, PLACES)),
            (_load, (key_strips, value_strips, rows, steps, held, news, PAGE_SIZE, LOAD, KEYS, DIM, DIM_VO)),
            (_take_tiles, (rows, spans, sees, counters, news, CHUNK, LOCAL, PAGE_SIZE, LOAD, KV_HEADS, TOKENS, KEYS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _span(  # type: ignore[no-untyped-def]
    query_len, first, seq_len, sees, CHUNK: gl.constexpr, LOCAL: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr
):
    """Of a tile from query token `first` of a row on: the first key of its blocks, and how many blocks there are. They
    come from the last on. Which is the first that all queries see whole, and which the first behind those."""
    ahead, behind = sees
    oldest = seq_len - query_len + first  # position of the tile's first query
    start = first_key(oldest, behind, CHUNK) // KEYS * KEYS
    stop = gl.minimum(seq_len, oldest + TOKENS + ahead)
    if first >= query_len:
        stop = start
    num_blocks = gl.maximum(stop - start + KEYS - 1, 0) // KEYS
    upper, lower = num_blocks, num_blocks
    if LOCAL:
        newest = gl.minimum(oldest + TOKENS, seq_len) - 1
        seen_from, seen_to = seen_by_all(oldest, newest, seq_len, ahead, behind, CHUNK)
        upper -= gl.maximum(seen_to - start, 0) // KEYS
        lower = gl.maximum(upper, num_blocks - (gl.maximum(seen_from - start, 0) + KEYS - 1) // KEYS)
    elif gl.minimum(behind, CHUNK) >= FAR:
        upper -= gl.maximum(gl.minimum(seq_len, oldest + 1 + ahead) - start, 0) // KEYS
    return start, num_blocks, upper, lower


@gluon.jit  # type: ignore[untyped-decorator]
def _take_tiles(  # type: ignore[no-untyped-def]
    rows, spans, sees, counters, news, CHUNK: gl.constexpr, LOCAL: gl.constexpr, PAGE_SIZE: gl.constexpr,
    LOAD: gl.constexpr, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """One warp: takes a tile as soon as all others have heard of the one before, and tells them of it."""
    _numbers, _first_ids, _told, heard = news
    num_programs, num_tiles = gl.num_programs(0), _count_tiles(rows, spans, TOKENS)
    tile, nth, head, begin, before = gl.program_id(0), 0, 0, 0, 0
    while head >= 0:
        at, begin, before = _look_up(tile, num_tiles, begin, before, rows, spans, KV_HEADS, TOKENS)
        row, head, first_token, query_len, first, seq_len = at
        start, num_blocks, upper, lower = _span(query_len, first, seq_len, sees, CHUNK, LOCAL, TOKENS, KEYS)
        ids = _page_ids(rows, row, start + (num_blocks - 1) * KEYS, seq_len, PAGE_SIZE, LOAD)
        if PAGE_SIZE == 0:
            row = gl.load(rows[2] + row)
        given = (head, row, start, num_blocks, seq_len, upper, lower, first_token, query_len, first)
        _tell(news, given, ids, PAGE_SIZE)
        mbarrier.wait(heard.index(0), nth & 1)
        nth += 1
        tile = gl.atomic_add(counters, 1, sem="relaxed") + num_programs
    if gl.atomic_add(counters + 1, 1, sem="relaxed") == num_programs - 1:  # for the next launch
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    key_strips, value_strips, rows, steps, held, news, PAGE_SIZE: gl.constexpr, LOAD: gl.constexpr,
    KEYS: gl.constexpr, DIM: gl.constexpr, DIM_VO: gl.constexpr,
):  # fmt: skip
    """One warp: asks for every block's keys and values once their places are free."""
    told, ids = _hear(news, 0, PAGE_SIZE)
    num_tiles, done = 0, 0
    while told[0] >= 0:
        _load_blocks(told, ids, done, key_strips, value_strips, rows, steps, held, PAGE_SIZE, LOAD, KEYS, DIM, DIM_VO)
        done += told[3]
        num_tiles += 1
        told, ids = _hear(news, num_tiles, PAGE_SIZE)


@gluon.jit  # type: ignore[untyped-decorator]
def _look_up(  # type: ignore[no-untyped-def]
    program, num_tiles, begin, before, rows, spans, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr
):
    """A tile's row and head, the row's first query token and their number, which of them is the tile's first, and the
    row's length; a head of -1 behind the last tile. It looks among LANES rows at a time, first among those from the
    `begin`th on, which have `before` tiles in front; also returns where it found the tile."""
    seq_lens, query_start_loc, _, _, _ = rows
    first_row, num_rows, section = spans
    last = num_tiles * KV_HEADS - 1
    head, tile = tile_of(gl.minimum(program, last), gl.maximum(num_tiles, 1), section, KV_HEADS)
    if tile < before:
        begin, before = begin * 0, before * 0
    counts = _tile_counts(rows, spans, begin, TOKENS)
    while (begin + LANES < num_rows) & (before + gl.sum(counts, 0) <= tile):
        before += gl.sum(counts, 0)
        begin += LANES
        counts = _tile_counts(rows, spans, begin, TOKENS)
    ends = before + gl.associative_scan(counts, 0, _add)
    row = first_row + gl.minimum(begin + gl.sum((ends <= tile).to(gl.int32), 0), num_rows - 1)
    first_of_row = gl.max(gl.where(ends <= tile, ends, before), 0)
    first_token = gl.load(query_start_loc + row)
    query_len = gl.load(query_start_loc + row + 1) - first_token
    head = gl.where(program > last, -1, head)
    at = (row, head, first_token, query_len, (tile - first_of_row) * TOKENS, gl.load(seq_lens + row))
    return at, begin, before


@gluon.jit  # type: ignore[untyped-decorator]
def _count_tiles(rows, spans, TOKENS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of all rows, for one KV head."""
    total = 0
    for begin in range(0, spans[1], LANES):
        total += gl.sum(_tile_counts(rows, spans, begin, TOKENS), 0)
    return total


@gluon.jit  # type: ignore[untyped-decorator]
def _tile_counts(rows, spans, begin, TOKENS: gl.constexpr):  # type: ignore[no-untyped-def]
    """[LANES] i32, of rows from the `begin`th on; 0 behind the last."""
    nth = begin + gl.arange(0, LANES, LANE_LAYOUT)
    starts, there = rows[1] + spans[0] + nth, nth < spans[1]
    lens = gl.load(starts + 1, mask=there, other=0) - gl.load(starts, mask=there, other=0)
    return (lens + (TOKENS - 1)) // TOKENS


@gluon.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit  # type: ignore[untyped-decorator]
def _tell(news, given, ids, PAGE_SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """NUMBERS of a tile, and its first page ids, once all have heard of the one before."""
    numbers, first_ids, told, _heard = news
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(NUMBERS):
        numbers.index(i).store(gl.full([1], 0, gl.int32, ONE) + given[i])
    if PAGE_SIZE != 0:
        first_ids.index(0).store(ids)
    barrier()
    mbarrier.arrive(told.index(0))


@gluon.jit  # type: ignore[untyped-decorator]
def _hear(news, nth, PAGE_SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """What was told of the program's nth tile: its head, its row or, without pages, where its keys start, its span (see
    `_span`) with the row's length between, the row's first query token and their number, and which of them is its
    first. Also the first page ids, for one warp."""
    numbers, first_ids, told, heard = news
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(told.index(0), nth & 1)
    given = ()
    for i in gl.static_range(NUMBERS):
        given = given + (gl.sum(numbers.index(i).load(ONE), 0),)  # type: ignore[assignment]  # noqa: RUF005
    ids = nth
    if PAGE_SIZE != 0:
        ids = first_ids.index(0).load(LANE_LAYOUT)
    barrier()
    mbarrier.arrive(heard.index(0))
    return given, ids


@gluon.jit  # type: ignore[untyped-decorator]
def _load_blocks(  # type: ignore[no-untyped-def]
    told, ids, done, key_strips, value_strips, rows, steps, held, PAGE_SIZE: gl.constexpr, LOAD: gl.constexpr,
    KEYS: gl.constexpr, DIM: gl.constexpr, DIM_VO: gl.constexpr,
):  # fmt: skip
    """Of a tile, the last block first, of which `ids` are the pages; `done` blocks of other tiles came before."""
    keys, values, arrived, free = held
    head, row, start, num_blocks, seq_len, _upper, _lower, _first_token, _query_len, _first = told
    page_rows, head_rows, key_head, value_head, num_batches = steps
    at_row = head * head_rows
    if PAGE_SIZE == 0:
        at_row += row
    for block in range(num_blocks):
        stage, turn = (done + block) % STAGES, (done + block) // STAGES & 1
        first = start + (num_blocks - 1 - block) * KEYS
        of_block = (stage, at_row, first, ids, page_rows, num_batches)
        mbarrier.wait(free[0].index(stage), turn ^ 1)
        _load_block(key_strips, head * key_head, of_block, arrived[0].index(stage), keys, PAGE_SIZE, LOAD, KEYS, DIM)
        next_ids = _page_ids(rows, row, first - KEYS, seq_len, PAGE_SIZE, LOAD)  # they come while this block waits
        mbarrier.wait(free[1].index(stage), turn ^ 1)
        _load_block(value_strips, head * value_head, of_block, arrived[1].index(stage), values, PAGE_SIZE, LOAD, KEYS,
                    DIM_VO)  # fmt: skip
        ids = next_ids


@gluon.jit  # type: ignore[untyped-decorator]
def _page_ids(rows, row, first, seq_len, PAGE_SIZE: gl.constexpr, LOAD: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of the block from key `first` on. Keys that do not lie in pages have none."""
    _seq_lens, _query_start_loc, _key_start_loc, page_table, table_row = rows
    ids = first
    if PAGE_SIZE != 0:
        ids = page_ids(page_table + row.to(gl.int64) * table_row, first, seq_len, PAGE_SIZE, LOAD)
    return ids


@gluon.jit  # type: ignore[untyped-decorator]
def _load_block(  # type: ignore[no-untyped-def]
    strips, column, of_block, ready, to, PAGE_SIZE: gl.constexpr, LOAD: gl.constexpr, KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Keys or values of a block, BATCH loads of all strips at a time."""
    stage, at_row, first, ids, page_rows, num_batches = of_block
    LOADS: gl.constexpr = KEYS // LOAD
    AT_ONCE: gl.constexpr = LOADS if LOADS < BATCH else BATCH
    mbarrier.expect(ready, LOADS * (WIDTH // STRIP) * strips.block_type.nbytes)
    places = to._reinterpret(to.dtype, [STAGES * (WIDTH // STRIP) * LOADS, LOAD, STRIP], BLOCK_LAYOUT)
    for batch in range(num_batches):
        for i in gl.static_range(AT_ONCE):
            nth = batch * AT_ONCE + i
            row = at_row + first + nth * LOAD
            if PAGE_SIZE != 0:
                row = at_row + nth_of(ids, nth) * page_rows + (first + nth * LOAD) % PAGE_SIZE
            for strip in gl.static_range(WIDTH // STRIP):
                place = places.index((stage * (WIDTH // STRIP) + strip) * LOADS + nth)
                tma.async_copy_global_to_shared(strips, [row, column + strip * STRIP], ready, place)


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    tensors, strides, factors, sees, wants, q, held, news, which: gl.constexpr, CHUNK: gl.constexpr,
    LOCAL: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr,
    DIM_VO: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """A group of warps: 64 queries of every tile. Those of the next come while this one is worked out."""
    told, _ids = _hear(news, 0, 0)
    _ask_for_queries(q, 0, told, tensors, strides, which, GROUP, TOKENS, DIM)
    num_tiles, done = 0, 0
    while told[0] >= 0:
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        next_told, _ids = _hear(news, num_tiles + 1, 0)
        place, next_place = num_tiles % PLACES, (num_tiles + 1) % PLACES
        if PLACES > 1:
            _ask_for_queries(q, next_place, next_told, tensors, strides, which, GROUP, TOKENS, DIM)
        _attend_tile(told, place, done, tensors, strides, factors, sees, wants, q, held, which, CHUNK, LOCAL, GROUP,
                     TOKENS, KEYS, DIM, DIM_VO, PLACES)  # fmt: skip
        if PLACES == 1:
            barrier()
            _ask_for_queries(q, next_place, next_told, tensors, strides, which, GROUP, TOKENS, DIM)
        num_tiles += 1
        done += told[3]
        told = next_told


@gluon.jit  # type: ignore[untyped-decorator]
def _attend_tile(  # type: ignore[no-untyped-def]
    told, place, done, tensors, strides, factors, sees, wants, q, held, which: gl.constexpr, CHUNK: gl.constexpr,
    LOCAL: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr,
    DIM_VO: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """64 of a tile's queries, which lie in `q` at its place."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_VO, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    _query, output, lse, sinks = tensors
    _query_token, _query_head, out_token, out_head, lse_token = strides
    ahead, behind = sees
    has_sinks, want_lse = wants
    scale, value_scale = factors
    head, _row, start, num_blocks, seq_len, upper, lower, first_token, query_len, first = told

    lane = which * ROWS + gl.arange(0, ROWS, ROW)
    token = first + lane // GROUP
    position = seq_len - query_len + token
    low = first_key(position, behind, CHUNK)
    high = gl.minimum(position + ahead, gl.maximum(position, 0) // CHUNK * CHUNK + (CHUNK - 1))
    high = gl.minimum(high, seq_len - 1)
    last = start + (num_blocks - 1) * KEYS

    keys, values, arrived, free = held
    values = values._reinterpret(values.dtype, [STAGES, KEYS, DIM_VO], BLOCK_LAYOUT)
    sums = gl.zeros([ROWS, DIM_VO], gl.float32, SUMS)
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    if num_blocks > 0:
        if last + KEYS > seq_len:  # both groups write the same
            mbarrier.wait(arrived[1].index(done % STAGES), done // STAGES & 1)
            clear_rows(values.index(done % STAGES), seq_len - last)
            fence_async_shared()
            barrier()
        logits = _logits(q, place, keys, arrived[0], done, LOGITS, KEYS, DIM)
        logits = warpgroup_mma_wait(0, deps=(logits,))
        barrier()
        mbarrier.arrive(free[0].index(done % STAGES))
        weights, top, total, _shrunk = weigh(_masked(logits, last, low, high), top, total, scale)
        so_far = (weights, sums, top, total)
        at = (q, place, held, values, done)
        upper, lower = gl.maximum(upper, 1), gl.maximum(lower, 1)
        so_far = _blocks(so_far, at, 1, upper, last, low, high, scale, True, KEYS, DIM, DIM_VO)
        so_far = _blocks(so_far, at, upper, lower, last, low, high, scale, False, KEYS, DIM, DIM_VO)
        if LOCAL:
            so_far = _blocks(so_far, at, lower, num_blocks, last, low, high, scale, True, KEYS, DIM, DIM_VO)
        weights, sums, top, total = so_far
        stage, turn = (done + num_blocks - 1) % STAGES, (done + num_blocks - 1) // STAGES & 1
        mbarrier.wait(arrived[1].index(stage), turn)
        weights = as_operand(weights, values.dtype, sums)
        sums = warpgroup_mma(weights, values.index(stage), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        barrier()
        mbarrier.arrive(free[1].index(stage))

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
    if DIM == DIM_VO:  # the place of the tile's queries, which nobody wants any more, is as wide
        LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM_VO, DIM_VO // 8], [gl.num_warps(), 1], [1, 0])
        line = which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
        its_token = first + line // GROUP
        to = output + (first_token + its_token).to(gl.int64) * out_token + (head * GROUP + line % GROUP) * out_head
        its_place = q._reinterpret(q.dtype, [PLACES, ROWS, DIM_VO], BLOCK_LAYOUT).index(place)
        write_lines(to, sums, share, (its_token < query_len) & (line < TOKENS * GROUP), its_place)
    else:
        write_rows(output + at * out_token + q_head * out_head, sums, share, live)
    if want_lse != 0:
        log_sum = (higher + gl.log2(gl.where(saw, total, 1.0))) * LN_2
        gl.store(lse + at * lse_token + q_head, gl.where(saw, log_sum, float("-inf")), mask=live)


@gluon.jit  # type: ignore[untyped-decorator]
def _blocks(  # type: ignore[no-untyped-def]
    so_far, at, begin, end, last, low, high, scale, MASKED: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr,
    DIM_VO: gl.constexpr,
):  # fmt: skip
    """The weights of blocks `begin` to `end`, and the weighted values of those from `begin` - 1 to `end` - 1."""
    weights, sums, top, total = so_far
    q, place, held, values, done = at
    LOGITS: gl.constexpr = top.type.layout.parent
    keys, _, arrived, free = held
    for block in range(begin, end):
        before = done + block - 1
        operand = as_operand(weights, values.dtype, sums)  # values of 16 bits that a loop hands on are taken apart
        pending = _logits(q, place, keys, arrived[0], before + 1, LOGITS, KEYS, DIM)
        mbarrier.wait(arrived[1].index(before % STAGES), before // STAGES & 1)
        sums_pending = warpgroup_mma(operand, values.index(before % STAGES), sums, is_async=True)
        logits = warpgroup_mma_wait(1, deps=(pending,))
        barrier()
        mbarrier.arrive(free[0].index((before + 1) % STAGES))
        if MASKED:
            logits = _masked(logits, last - block * KEYS, low, high)
        weights, top, total, shrunk = weigh(logits, top, total, scale)
        sums = warpgroup_mma_wait(0, deps=(sums_pending,))
        barrier()
        mbarrier.arrive(free[1].index(before % STAGES))
        sums = times_rows(sums, shrunk)
    return weights, sums, top, total


@gluon.jit  # type: ignore[untyped-decorator]
def _logits(  # type: ignore[no-untyped-def]
    q, place, keys, arrived, block, LOGITS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr
):
    """[ROWS, KEYS] of a block, under way."""
    stage = block % STAGES
    logits = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
    mbarrier.wait(arrived.index(stage), block // STAGES & 1)
    for strip in gl.static_range(DIM // STRIP):
        of_strip = keys.index(stage * (DIM // STRIP) + strip).permute((1, 0))
        queries = q.index(place * (DIM // STRIP) + strip)
        logits = warpgroup_mma(queries, of_strip, logits, use_acc=strip > 0, is_async=True)
    return logits


@gluon.jit
def _masked(logits, first, low, high):  # type: ignore[no-untyped-def]
    """Logits of keys from `first` on, where a query sees them."""
    key = first + gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))
    return gl.where((key[None] >= low[:, None]) & (key[None] <= high[:, None]), logits, float("-inf"))


@gluon.jit  # type: ignore[untyped-decorator]
def _ask_for_queries(  # type: ignore[no-untyped-def]
    q, place, told, tensors, strides, which: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """A group's queries of a tile, on their way to a place in shared memory. Lanes without a query keep what is there,
    which no other lane sees."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    head, _row, _start, _num_blocks, _seq_len, _upper, _lower, first_token, query_len, first = told
    query, _output, _lse, _sinks = tensors
    query_token, query_head, _out_token, _out_head, _lse_token = strides
    lane = which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    token = first + lane // GROUP
    live = (head >= 0) & (token < query_len) & (lane < TOKENS * GROUP)
    at = query + (first_token + token).to(gl.int64) * query_token + (head * GROUP + lane % GROUP) * query_head
    at = at[:, None] + gl.arange(0, STRIP, gl.SliceLayout(0, LINES))[None]
    for strip in gl.static_range(DIM // STRIP):
        to = q.index(place * (DIM // STRIP) + strip)
        async_copy.async_copy_global_to_shared(to, at + strip * STRIP, mask=live[:, None])
    async_copy.commit_group()

"""How the splits of a row meet in TRITON_MLA's kernel for Hopper: each of a program's two groups of warps has half of
the columns, and joins these with the same groups of the programs that have the row's other splits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_backends.backends.mla.triton_mla.tuning import HOPPER_GROUPS
from attn_backends.kernels.hopper import WARP_SIZE, barrier
from attn_backends.kernels.split_joins import HAVE_BEGUN, JOIN_WORDS, LAUNCHES, arrive
from attn_backends.kernels.split_kv import LN_2, MAX_SPLITS

GROUPS = gl.constexpr(HOPPER_GROUPS)
_WARPS = gl.constexpr(4)  # of a group
# That it combines at a time, 64 of a thread: with more, the loops over keys are compiled into fewer registers.
_NUMBERS = gl.constexpr(64 * 32 * 4)
_ACROSS = gl.constexpr(4)  # columns that a thread loads as one


@gluon.jit
def join_words(counters, first_slot, tile, warp_group, TILES):  # type: ignore[no-untyped-def]
    """Where a group counts those that have a row's splits, see `split_joins.arrive`."""
    return counters + ((first_slot * TILES + tile) * GROUPS + warp_group) * JOIN_WORDS


@gluon.jit  # type: ignore[untyped-decorator]
def count_begun(  # type: ignore[no-untyped-def]
    counters, first_slot, split_info, work_items, next_item, end_item, tile, warp_group: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """Say that a program has begun with its first item and, where it has more, with its last one: it waits for nobody
    before that, so who waits for it need not see it begin. Items between these are whole rows."""
    if split_info // MAX_SPLITS > 1:
        gl.atomic_add(join_words(counters, first_slot, tile, warp_group, TILES) + HAVE_BEGUN, 1, sem="relaxed")
    if next_item < end_item:
        last = work_items + (end_item - 1) * 8
        last_slot, last_info = gl.load(last + 3), gl.load(last + 4)
        if last_info // MAX_SPLITS > 1:
            gl.atomic_add(join_words(counters, last_slot, tile, warp_group, TILES) + HAVE_BEGUN, 1, sem="relaxed")


@gluon.jit
def load_begun(words, is_split):  # type: ignore[no-untyped-def]
    """How many of those that have a row's splits have begun, as each thread reads it, and the number of launches; 0 of
    a row that is whole. All warps are to go by the largest: where they went apart they would never meet again."""
    same = gl.arange(0, _WARPS * WARP_SIZE, gl.BlockedLayout([1], [WARP_SIZE], [_WARPS], [0])) * 0
    begun = gl.load(words + HAVE_BEGUN + same, mask=same < is_split.to(gl.int32), other=0, volatile=True)
    return begun, gl.load(words + LAUNCHES, mask=is_split, other=0, volatile=True)


@gluon.jit  # type: ignore[untyped-decorator]
def meet_and_combine(  # type: ignore[no-untyped-def]
    of_row, words, launches, stays, warp_group: gl.constexpr,
    WANT_LSE: gl.constexpr, QUERIES: gl.constexpr, TILES: gl.constexpr, BLOCK_M: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """Once a group has stored its partial result: wait for the others' if it stays, and combine its share of the tile's
    queries. The fewer splits there are the more queries and columns are combined at a time."""
    num_splits = of_row[3]
    barrier()  # all of the group's stores come before its count
    part, num_parts = arrive(words, num_splits, launches, stays)
    if num_parts > 0:
        barrier()
        share = (of_row, part, num_parts)
        if num_splits <= 2:
            _combine(share, warp_group, 16, 2, WANT_LSE, QUERIES, TILES, BLOCK_M, RANK)
        elif num_splits <= 4:
            _combine(share, warp_group, 8, 4, WANT_LSE, QUERIES, TILES, BLOCK_M, RANK)
        elif num_splits <= 16:
            _combine(share, warp_group, 4, 16, WANT_LSE, QUERIES, TILES, BLOCK_M, RANK)
        else:
            _combine(share, warp_group, 4, 64, WANT_LSE, QUERIES, TILES, BLOCK_M, RANK)


@gluon.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    share, warp_group: gl.constexpr, TOGETHER: gl.constexpr, SPLITS: gl.constexpr,
    WANT_LSE: gl.constexpr, QUERIES: gl.constexpr, TILES: gl.constexpr, BLOCK_M: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """Combine every `num_parts`-th block of TOGETHER queries and some columns from `part` on, SPLITS at a time."""
    COLUMNS: gl.constexpr = _NUMBERS // (TOGETHER * SPLITS)
    LANES: gl.constexpr = COLUMNS // _ACROSS if COLUMNS // _ACROSS < WARP_SIZE else WARP_SIZE
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, _ACROSS], [1, WARP_SIZE // LANES, LANES], [_WARPS, 1, 1], [2, 1, 0])
    OF_SPLITS: gl.constexpr = gl.SliceLayout(2, LOADED)  # [TOGETHER, SPLITS]
    OUT: gl.constexpr = gl.SliceLayout(1, LOADED)  # [TOGETHER, COLUMNS]
    of_row, part, num_parts = share
    results, _row, first_slot, num_splits, tile, _value_scale = of_row
    _output, _lse, partial_acc, partial_ml, _counters = results
    used = gl.minimum(QUERIES - tile * BLOCK_M, BLOCK_M)
    RUNS: gl.constexpr = RANK // GROUPS // COLUMNS
    for block in range(part, (used + TOGETHER - 1) // TOGETHER * RUNS, num_parts):
        column = warp_group * (RANK // GROUPS) + block % RUNS * COLUMNS
        query = block // RUNS * TOGETHER + gl.arange(0, TOGETHER, gl.SliceLayout(1, OF_SPLITS))
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
        m_i = gl.full([TOGETHER], float("-inf"), gl.float32, gl.SliceLayout(1, OF_SPLITS))
        l_i = gl.zeros([TOGETHER], gl.float32, gl.SliceLayout(1, OF_SPLITS))
        acc = gl.zeros([TOGETHER, COLUMNS], gl.float32, OUT)
        for begin in range(0, num_splits, SPLITS):
            split = begin + gl.arange(0, SPLITS, gl.SliceLayout(0, OF_SPLITS))
            there = (split < num_splits)[None] & (query < used)[:, None]
            slot = (first_slot + split).to(gl.int64) * (TILES * BLOCK_M)
            at = slot[None] + (tile * BLOCK_M + query)[:, None]
            m_splits = gl.load(partial_ml + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            l_splits = gl.load(partial_ml + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            numbers = (partial_acc + at * RANK)[:, :, None] + _along(columns, LOADED)
            acc_splits = gl.load(numbers, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
            m_new = gl.maximum(m_i, gl.max(m_splits, 1))
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            p = gl.exp2(m_splits - m_safe[:, None])
            alpha = gl.exp2(m_i - m_safe)
            l_i = l_i * alpha + gl.sum(l_splits * p, 1)
            acc = acc * _down(alpha, OUT) + gl.sum(acc_splits * p[:, :, None], 1)
            m_i = m_new
        _write(of_row, acc, m_i, l_i, query, columns, used, column == 0, WANT_LSE, QUERIES, BLOCK_M, RANK, OUT)


@gluon.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    of_row, acc, m_i, l_i, query, columns, used, is_first, WANT_LSE: gl.constexpr, QUERIES: gl.constexpr,
    BLOCK_M: gl.constexpr, RANK: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Some columns of some queries of a tile, and with the first ones their LSEs; zeros and -inf of a query that saw no
    key."""
    results, row, _first_slot, _num_splits, tile, value_scale = of_row
    output, lse, _partial_acc, _partial_ml, _counters = results
    saw = l_i > 0
    divisor = gl.where(saw, l_i, 1.0)
    at_query = row.to(gl.int64) * QUERIES + tile * BLOCK_M + query
    out = acc * _down(gl.where(saw, value_scale / divisor, 0.0), OUT)
    to = _down(output + at_query * RANK, OUT) + columns[None]
    gl.store(to, out.to(output.dtype.element_ty), mask=_down(query < used, OUT))
    if WANT_LSE:
        row_lse = gl.where(saw, (m_i + gl.log2(divisor)) * LN_2, float("-inf"))
        gl.store(lse + at_query, row_lse, mask=(query < used) & is_first)


@gluon.jit  # type: ignore[untyped-decorator]
def _along(columns, LOADED: gl.constexpr):  # type: ignore[no-untyped-def]
    """[1, 1, columns]"""
    FLAT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LOADED))
    return gl.convert_layout(columns, FLAT)[None][None]


@gluon.jit  # type: ignore[untyped-decorator]
def _down(of_queries, OUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """[queries, 1]"""
    return gl.convert_layout(of_queries, gl.SliceLayout(1, OUT))[:, None]

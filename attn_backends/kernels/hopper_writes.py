"""How kernels of ours for Hopper write to memory what products leave in registers, in Triton's Gluon."""

from __future__ import annotations

from typing import Any

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_backends.kernels.hopper import as_words, barrier, of_words, times_rows

_EXCHANGE_1, _EXCHANGE_2 = (  # two i32 of a thread, with the one whose lane number differs in a bit
    gl.constexpr(
        "{.reg .pred has_bit; .reg .b32 lane, given, taken; mov.u32 lane, %laneid; "
        f"and.b32 lane, lane, {bit}; setp.ne.u32 has_bit, lane, 0; selp.b32 given, $2, $3, has_bit; "
        f"shfl.sync.bfly.b32 taken, given, {bit}, 31, -1; "
        "selp.b32 $0, taken, $2, has_bit; selp.b32 $1, $3, taken, has_bit;}"
    )
    for bit in (1, 2)
)


@gluon.jit
def write_rows(rows, acc, share, live):  # type: ignore[no-untyped-def]
    """Weighted values [rows, columns] to where `rows` point, each row times its share."""
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = gl.convert_layout(rows, ROW, assert_trivial=True)
    live = gl.convert_layout(live, ROW, assert_trivial=True)
    to = rows[:, None] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))[None]
    gl.store(to, times_rows(acc, share).to(rows.dtype.element_ty), mask=live[:, None])


@gluon.jit  # type: ignore[untyped-decorator]
def _exchange(first, second, LANE_BIT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two i32 of each thread after an exchange with the one whose lane number differs in a bit: those that have the bit
    give their first one, and take the other's second one to its place."""
    HOW: gl.constexpr = _EXCHANGE_1 if LANE_BIT == 1 else _EXCHANGE_2
    return gl.inline_asm_elementwise(HOW, "=&r,=&r,r,r", [first, second], (gl.int32, gl.int32), False, 1)


@gluon.jit
def words_together(words):  # type: ignore[no-untyped-def]
    """[rows, words] i32 of a product's result in 16 bits, two in a word, of which a thread has every fourth: the same
    in another layout, where it has four that lie together.

    Four threads have four words each of four times four that lie together, and exchange them as a matrix is transposed.
    """
    rows: gl.constexpr = words.shape[0]
    runs: gl.constexpr = words.shape[1] // 16
    first, second = words.reshape([rows, runs, 2, 2, 4]).permute([0, 1, 2, 4, 3]).split()
    both = gl.join(*_exchange(first, second, 1))  # [rows, runs, 2, 4, 2]
    first, second = both.permute([0, 1, 4, 3, 2]).split()
    both = gl.join(*_exchange(first, second, 2))  # [rows, runs, 2, 4, 2]
    return both.permute([0, 1, 3, 4, 2]).reshape([rows, runs * 16])


@gluon.jit
def floats_together(acc):  # type: ignore[no-untyped-def]
    """[rows, columns] f32 of a product's result, of which a thread has two that lie together: the same in another
    layout, where it has four."""
    rows: gl.constexpr = acc.shape[0]
    runs: gl.constexpr = acc.shape[1] // 16
    words = acc.to(gl.int32, bitcast=True).reshape([rows, runs, 2, 2, 2, 2])
    first, second = words.permute([0, 1, 3, 4, 5, 2]).split()  # [rows, runs, 2, 2, 2]
    both = gl.join(*_exchange(first, second, 1))  # of runs, lanes' upper and lower bit, pairs, places
    together = both.permute([0, 1, 3, 2, 5, 4]).reshape([rows, runs * 16])
    return together.to(gl.float32, bitcast=True)


@constexpr_function  # type: ignore[untyped-decorator]
def _as_written(num_columns: int, itemsize: int) -> Any:
    """The layout of what `write_rows_by_shuffles` writes: [64, num_columns] of four warps, of which a thread has 16
    bytes of a row, and four threads 64."""
    across = 16 // itemsize
    in_one, apart = (
        [[0, 1 << bit] for bit in range(first.bit_length() - 1, last.bit_length() - 1)]
        for first, last in ((1, across), (4 * across, num_columns))
    )
    lanes = [[0, across], [0, 2 * across], [1, 0], [2, 0], [4, 0]]
    if itemsize == 4:
        lanes[:2] = lanes[1::-1]
    return gl.DistributedLinearLayout([*in_one, [8, 0], *apart], lanes, [[16, 0], [32, 0]], [], [64, num_columns])


@gluon.jit
def write_rows_by_shuffles(rows, acc, share, live):  # type: ignore[no-untyped-def]
    """Write [rows, columns] like `write_rows`: threads exchange what they have first, so that each writes 16 bytes. Two
    numbers at a time, as products leave them, take the memory several times as long."""
    of_dtype: gl.constexpr = rows.dtype.element_ty
    values = times_rows(acc, share)
    if of_dtype == gl.float32:
        values = floats_together(values)
    else:
        values = of_words(words_together(as_words(values, of_dtype)), of_dtype)
    WRITTEN: gl.constexpr = _as_written(acc.shape[1], 4 if of_dtype == gl.float32 else 2)
    ROW: gl.constexpr = gl.SliceLayout(1, WRITTEN)
    rows = gl.convert_layout(rows, ROW, assert_trivial=True)
    live = gl.convert_layout(live, ROW, assert_trivial=True)
    to = rows[:, None] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, WRITTEN))[None]
    gl.store(to, gl.convert_layout(values, WRITTEN), mask=live[:, None])  # the same registers in another order


@gluon.jit  # type: ignore[untyped-decorator]
def write_rows_by_smem(rows, acc, share, live, smem, NUM_COLS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Write the first NUM_COLS columns like `write_rows`, by way of shared memory: each thread writes 16 bytes, where
    `rows` and `live` lie."""
    COALESCED: gl.constexpr = live.type.layout.parent
    smem.store(times_rows(acc, share).to(rows.dtype.element_ty))
    barrier()
    columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, COALESCED))
    mask = live[:, None]
    if acc.shape[1] > NUM_COLS:
        mask = mask & (columns < NUM_COLS)[None]
    gl.store(rows[:, None] + columns[None], smem.load(COALESCED), mask=mask)

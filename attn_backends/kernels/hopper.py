"""What kernels of ours for Hopper share, in Triton's Gluon. Not every Triton has what this imports: see
`launch.has_hopper_kernels`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_backends.kernels.launch import ALIGNED

TMA_COLS = gl.constexpr(64)  # columns of a TMA tile: what a swizzle of 128 bytes is wide
BLOCK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# The same of one head among others: columns behind its last one are zeros, whatever lies there.
HEAD_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
BYTE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)  # of twice as many columns
NOWHERE = gl.constexpr(1 << 30)  # a row that no tensor has: the tensor memory accelerator gives zeros for it
WARP_SIZE = gl.constexpr(32)
LANE_LAYOUT = gl.BlockedLayout([1], [32], [1], [0])  # a number a lane, for one warp
WORD_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)  # the same, two by two
# Of four values of 8 bits in a register: the first two as float16, and the other two.
_E4M3 = gl.constexpr(
    "{.reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;}"
)
_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")  # float16 without its last byte
# Of two f32 one register of 16 bits each, the first the lower; and of such a register its two numbers.
_TO_BF16_PAIR, _TO_FP16_PAIR = (gl.constexpr(f"cvt.rn.{kind}x2.f32 $0, $2, $1;") for kind in ("bf16", "f16"))
_TAKE_APART = gl.constexpr("mov.b32 {$0, $1}, $2;")
# Two groups of four warps meet at barriers that Triton has not taken, of 0 to 15: each group's turn begins at its own.
_TAKE_FIRST, _TAKE_SECOND = (gl.constexpr(f"bar.sync {number}, 256; // dummy $0") for number in (14, 15))
_PASS_FIRST, _PASS_SECOND = (gl.constexpr(f"bar.arrive {number}, 256; // dummy $0") for number in (14, 15))

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # as older versions call it


def tma_rows(page_size: int, keys: int) -> int:
    """Rows that lie together wherever a block of `keys` begins; a page size of 0 stands for keys without pages."""
    return math.gcd(page_size, keys) or keys


def tma_descriptor(shape: list[int], strides: list[int], tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """The descriptor of a tensor in TMA tiles of `rows` rows and TMA_COLS columns, swizzled as products want them.

    Triton checks what it makes a descriptor of at each launch; here that is done once for all tensors that lie alike.

    Args:
        shape, strides: of rows and columns, or of rows, heads and columns: then a tile is of one head.

    Raises:
        ValueError: the tensor's address is no multiple of 16 bytes.
    """
    if tensor.data_ptr() % ALIGNED:
        raise ValueError(
            f"a tensor begins {tensor.data_ptr() % ALIGNED} bytes behind a multiple of {ALIGNED}, from which on the "
            "tensor memory accelerator loads: allocate it by itself, or begin a view at such an address"
        )
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_described(tuple(shape), tuple(strides), tensor.dtype, rows), base=tensor)
    return made


@lru_cache(maxsize=256)
def _described(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int) -> dict[str, Any]:
    """All that a descriptor has but its tensor."""
    tile, layout = ([rows], BLOCK_LAYOUT) if len(shape) == 2 else ([rows, 1], HEAD_LAYOUT)
    nowhere = torch.empty(0, dtype=dtype, device="cpu")
    return dict(vars(TensorDescriptor(nowhere, list(shape), list(strides), [*tile, TMA_COLS.value], layout)))


@constexpr_function  # type: ignore[untyped-decorator]
def column_tiles(width: int) -> int:
    """Number of TMA tiles beside one another that so many columns take."""
    return -(-width // 64)


@constexpr_function  # type: ignore[untyped-decorator]
def pieces(width: int) -> list[int]:
    """Columns of queries and keys that a product each multiplies: a power of two within a TMA tile, 16 or more.

    >>> pieces(192), pieces(112), pieces(72)
    ([64, 64, 64], [64, 32, 16], [64, 16])
    """
    rest = -(-(width % 64) // 16) * 16
    return [64] * (width // 64) + [piece for piece in (64, 32, 16) if rest & piece]


@constexpr_function  # type: ignore[untyped-decorator]
def num_pieces(width: int) -> int:
    return len(pieces(width))


@constexpr_function  # type: ignore[untyped-decorator]
def piece_width(width: int, i: int) -> int:
    return pieces(width)[i]  # type: ignore[no-any-return]


@constexpr_function  # type: ignore[untyped-decorator]
def piece_start(width: int, i: int) -> int:
    return sum(pieces(width)[:i])


@constexpr_function  # type: ignore[untyped-decorator]
def acc_widths(width: int) -> list[int]:
    """Columns of the sums of values: the sides of a tensor are powers of two, so some widths are two tensors.

    >>> acc_widths(128), acc_widths(192), acc_widths(80), acc_widths(112)
    ([128], [128, 64], [64, 16], [128])
    """
    wide = 1 << (width.bit_length() - 1)
    rest = max(16, 1 << (width - wide - 1).bit_length()) if width > wide else 0
    return [2 * wide] if rest == wide else [wide, rest] if rest else [wide]


@constexpr_function  # type: ignore[untyped-decorator]
def num_accs(width: int) -> int:
    return len(acc_widths(width))


@constexpr_function  # type: ignore[untyped-decorator]
def acc_width(width: int, i: int) -> int:
    return acc_widths(width)[i]  # type: ignore[no-any-return]


@gluon.jit  # type: ignore[untyped-decorator]
def page_ids(pages, first, num_keys, PAGE_SIZE: gl.constexpr, TMA_ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Page ids [WARP_SIZE] i32 of a row's TMA tiles from key `first` on, for one warp; any ids where there is no key.

    One instruction loads all. It comes early: what wants them is a block ahead.
    """
    at = gl.maximum(gl.minimum(first + gl.arange(0, WARP_SIZE, LANE_LAYOUT) * TMA_ROWS, num_keys - 1), 0)
    return gl.load(pages + at // PAGE_SIZE)


@gluon.jit
def nth_of(ids, nth):  # type: ignore[no-untyped-def]
    return gl.sum(gl.where(gl.arange(0, WARP_SIZE, LANE_LAYOUT) == nth, ids, 0), 0)


@gluon.jit  # type: ignore[untyped-decorator]
def load_tma_tiles(desc, rows, column, full, to, TMA_ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for TMA_COLS columns of a block, by a TMA tile of TMA_ROWS rows from each of `rows` on."""
    for part in gl.static_range(to.shape[0] // TMA_ROWS):
        tma.async_copy_global_to_shared(desc, [rows[part], column], full, to.slice(part * TMA_ROWS, TMA_ROWS))


@gluon.jit
def anew(number):  # type: ignore[no-untyped-def]
    """An i32 that compilers know nothing of: what follows from it is worked out where it is wanted, and not before a
    loop, to be kept in a register that there may not be."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit  # type: ignore[untyped-decorator]
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Barriers [STAGES] that COUNT threads arrive at. An allocation of their own: Triton synchronises uses of one
    allocation."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(made.index(stage), COUNT)
    return made


@gluon.jit  # type: ignore[untyped-decorator]
def take_turn(TURN: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the other one of two groups of warps has passed its turn: so one's products are under way while the
    other works out weights. TURN: 0 or 1, which of them this is; -1: there are no turns, and nothing is done."""
    if TURN >= 0:
        HOW: gl.constexpr = _TAKE_FIRST if TURN == 0 else _TAKE_SECOND
        gl.inline_asm_elementwise(HOW, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit  # type: ignore[untyped-decorator]
def pass_turn(TURN: gl.constexpr):  # type: ignore[no-untyped-def]
    """Let the other group take its turn, once; TURN is `take_turn`'s."""
    if TURN >= 0:
        HOW: gl.constexpr = _PASS_SECOND if TURN == 0 else _PASS_FIRST
        gl.inline_asm_elementwise(HOW, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def clear_rows(block, begin, end):  # type: ignore[no-untyped-def]
    """Zeros for rows `begin` to `end` of a block [rows, columns] in shared memory. What lies behind the last key, or in
    front of the first that is seen, may be NaN, which no weight of zero undoes."""
    COALESCED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    STEP: gl.constexpr = 16
    WIDTH: gl.constexpr = block.shape[1]
    for i in gl.static_range(block.shape[0] // STEP):
        part = block.slice(i * STEP, STEP)
        if (begin <= i * STEP) & (end >= (i + 1) * STEP):
            part.store(gl.zeros([STEP, WIDTH], block.dtype, COALESCED))
        elif (begin < (i + 1) * STEP) & (end > i * STEP):
            row = i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, COALESCED))
            is_live = (row < begin) | (row >= end)
            held = part.load(COALESCED)
            part.store(gl.where(is_live[:, None], held, gl.zeros_like(held)))


@gluon.jit
def online_softmax(logits, m_i, l_i, scale):  # type: ignore[no-untyped-def]
    """The online softmax's next step, base 2: weights of `logits` [rows, keys], the highest logit of each row so far
    (not scaled), the lanes' sums of its weights, and what earlier weights shrink by."""
    m_new = gl.maximum(m_i, gl.max(logits, 1))
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new * scale)
    p = gl.exp2(logits * scale - m_safe[:, None])
    alpha = gl.exp2(m_i * scale - m_safe)
    return p, m_new, times_rows(l_i, alpha) + lane_sums(p), alpha


@gluon.jit
def lane_sums(p):  # type: ignore[no-untyped-def]
    """[rows, 4]: the sums of what each of a row's four lanes holds of weights [rows, keys]. Lanes need not exchange
    theirs before the last block."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 1), 2)


@gluon.jit  # type: ignore[untyped-decorator]
def row_sums(l_i, ROW: gl.constexpr):  # type: ignore[no-untyped-def]
    """[rows] of `lane_sums`."""
    return gl.convert_layout(gl.sum(l_i, 1), ROW, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def as_operand(p, of_dtype: gl.constexpr, acc):  # type: ignore[no-untyped-def]
    """Weights in registers as a product that adds to `acc` wants them, which is where they are."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(p.to(of_dtype), layout)


@gluon.jit  # type: ignore[untyped-decorator]
def as_words(p, of_dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights [rows, keys] f32 as float16 or bfloat16, two in an i32 [rows, keys / 2].

    So a loop hands them on, and their float32 is gone by then: compilers take values of 16 bits apart between one round
    and the next, and make them of float32 late, while the next logits want the same registers.
    """
    HOW: gl.constexpr = _TO_BF16_PAIR if of_dtype == gl.bfloat16 else _TO_FP16_PAIR
    first, second = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise(HOW, "=r,f,f", [first, second], gl.int32, True, 1)


@gluon.jit  # type: ignore[untyped-decorator]
def of_words(words, of_dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """The weights [rows, keys] of `as_words`."""
    first, second = gl.inline_asm_elementwise(_TAKE_APART, "=h,=h,r", [words], (gl.int16, gl.int16), True, 1)
    both = gl.join(first, second).reshape([words.shape[0], 2 * words.shape[1]])
    return both.to(of_dtype, bitcast=True)


@gluon.jit  # type: ignore[untyped-decorator]
def to_fp16_pairs(words, E5M2: gl.constexpr):  # type: ignore[no-untyped-def]
    """Values of 8 bits [rows, n / 4], four in an i32, as float16 [rows, n / 2], two in an i32."""
    HOW: gl.constexpr = _E5M2 if E5M2 else _E4M3
    two, others = gl.inline_asm_elementwise(HOW, "=&r,=r,r", [words], (gl.int32, gl.int32), True, 1)
    return gl.join(two, others).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def times_rows(acc, row_factors):  # type: ignore[no-untyped-def]
    """[rows, columns] times a factor of each row."""
    return acc * gl.convert_layout(row_factors, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]

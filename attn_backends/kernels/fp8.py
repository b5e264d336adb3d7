"""Caches of 8 bits in Triton kernels: products of float16, and values that come two by two.

A GPU makes two float16 of 8 bits each by one instruction, and of each of them a bfloat16 by one more, which is slow. So
products are of float16, which holds all such values. And a product wants the values of two keys side by side: shared
memory gives columns so that are of 16 bits, not of 8. So values are read as pairs of two columns, and the even and the
odd columns are products of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.launch import INTERPRETED

_COMPILED = tl.constexpr(not INTERPRETED)
# Of two pairs in a register the first of each, or the second, side by side as float16. The compiler takes five more
# instructions for both.
_FIRST_E4M3 = tl.constexpr(
    "{.reg .b32 both; .reg .b16 low, high; prmt.b32 both, $1, 0, 0x4420; mov.b32 {low, high}, both; "
    "cvt.rn.f16x2.e4m3x2 $0, low;}"
)
_SECOND_E4M3 = tl.constexpr(_FIRST_E4M3.value.replace("0x4420", "0x4431"))
_FIRST_E5M2 = tl.constexpr("prmt.b32 $0, $1, 0, 0x2404;")  # float16 without its last byte
_SECOND_E5M2 = tl.constexpr("prmt.b32 $0, $1, 0, 0x3414;")


@triton.jit
def row_amax(q):  # type: ignore[no-untyped-def]
    """Each row's largest absolute value, or a little above 0, [BLOCK_M] f32."""
    return tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), 1e-30)


@triton.jit
def scale_to_fp16(q, q_scale):  # type: ignore[no-untyped-def]
    """Round bfloat16 queries to float16, each row divided by its scale.

    What is below 2^-25 of the row's largest element is lost.
    """
    return (q.to(tl.float32) * (1.0 / q_scale)[:, None]).to(tl.float16)  # a division is three multiplications


@triton.jit
def as_pairs(pointer):  # type: ignore[no-untyped-def]
    """A pointer to pairs of the 8-bit elements that a pointer is to."""
    return pointer.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def unpack_columns(  # type: ignore[no-untyped-def]
    loaded, of_dtype: tl.constexpr, as_dtype: tl.constexpr, PAIRS: tl.constexpr
):
    """All columns of what was loaded, or of pairs the first ones and the second ones, as another dtype."""
    if not PAIRS:
        return (loaded.to(as_dtype),)
    elif _COMPILED and as_dtype == tl.float16 and of_dtype == tl.float8e5:
        even = tl.inline_asm_elementwise(_FIRST_E5M2, "=r,r", [loaded], tl.float16, True, 2)
        odd = tl.inline_asm_elementwise(_SECOND_E5M2, "=r,r", [loaded], tl.float16, True, 2)
        return even, odd
    elif _COMPILED and as_dtype == tl.float16:
        even = tl.inline_asm_elementwise(_FIRST_E4M3, "=r,r", [loaded], tl.float16, True, 2)
        odd = tl.inline_asm_elementwise(_SECOND_E4M3, "=r,r", [loaded], tl.float16, True, 2)
        return even, odd
    else:
        even = loaded.to(tl.int8).to(of_dtype, bitcast=True).to(as_dtype)
        odd = (loaded >> 8).to(tl.int8).to(of_dtype, bitcast=True).to(as_dtype)
        return even, odd


@triton.jit  # type: ignore[untyped-decorator]
def zero_acc(BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros for weighted values: [BLOCK_M, WIDTH], or the even columns and the odd ones, f32."""
    if PAIRS:
        return tl.zeros([BLOCK_M, WIDTH // 2], tl.float32), tl.zeros([BLOCK_M, WIDTH // 2], tl.float32)
    else:
        return (tl.zeros([BLOCK_M, WIDTH], tl.float32),)


@triton.jit
def interleave_columns(acc):  # type: ignore[no-untyped-def]
    """[BLOCK_M, WIDTH] of an acc that may be in even and odd columns."""
    if len(acc) == 1:
        return acc[0]
    else:
        return tl.reshape(tl.join(acc[0], acc[1]), [acc[0].shape[0], 2 * acc[0].shape[1]])


@triton.jit  # type: ignore[untyped-decorator]
def accumulate(acc, p, alpha, values, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Shrink acc, and add weighted values.

    Args:
        p: [BLOCK_M, BLOCK_N] weights of the values' dtype.
        alpha: [BLOCK_M] f32, what earlier weights shrink by.
        values: as `unpack_columns` gives them.
    """
    first = tl.dot(p, values[0], acc[0] * alpha[:, None], input_precision=PRECISION)
    if len(values) == 1:
        return (first,)
    else:
        return first, tl.dot(p, values[1], acc[1] * alpha[:, None], input_precision=PRECISION)

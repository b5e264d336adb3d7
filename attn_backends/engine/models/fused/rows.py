"""The small operations of a decoder layer in C, where there is a compiler: one call each, for any number of tokens."""

from __future__ import annotations

import ctypes
import logging
import struct
from functools import cache
from pathlib import Path

import torch

from attn_backends.kernels.c_compiler import CompileError, load

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("rows.c")
DTYPES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16"}
_norm, _rotation = struct.Struct("3P3qd"), struct.Struct("3P4q")  # `struct norm` and `struct rotation` of rows.c


class RowKernels:
    """The functions of `rows.c` for one dtype, over tensors of it on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rms_norm, self._rotate = library.rms_norm, library.rotate
        for function in (self._rms_norm, self._rotate):
            function.argtypes, function.restype = (ctypes.c_char_p,), None

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x · w / √(mean x² + ε) of each row of `hidden` [num_rows, size]; `weight` [size] f32, contiguous."""
        if hidden.stride(1) != 1:
            hidden = hidden.contiguous()
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        (num_rows, size), row = hidden.shape, hidden.stride(0)
        self._rms_norm(_norm.pack(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), num_rows, size, row, epsilon))
        return out

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Turn `heads` [num_tokens, num_heads, head_dim], a token's in one piece, in place.

        Args:
            cos, sin: [num_tokens, head_dim] of the same dtype, contiguous.

        Raises:
            ValueError: they are not of that shape.
        """
        num_tokens, _, head_dim = heads.shape
        if not cos.shape == sin.shape == (num_tokens, head_dim):
            raise ValueError(
                f"angles of {list(cos.shape)} and {list(sin.shape)} for heads of {list(heads.shape)}: give a row of "
                f"{head_dim} for each of {num_tokens} tokens"
            )
        self._rotate(_rotation.pack(heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), *heads.shape, heads.stride(0)))


@cache
def row_kernels(dtype: torch.dtype) -> RowKernels | None:
    """Compiled at the first question; None where there are none, which is logged if a compiler is to blame."""
    if dtype not in DTYPES:
        return None
    try:
        return RowKernels(load(SOURCE, {DTYPES[dtype]: 1}))
    except CompileError as error:
        logger.warning("norms and rotations in plain torch, which is slower, as they cannot be compiled: %s", error)
        return None

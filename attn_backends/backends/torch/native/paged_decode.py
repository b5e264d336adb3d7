"""Paged attention of rows with one new token each, in C: what TORCH decodes with on a CPU, where there is a compiler.

The kernel is compiled for a shape of layer (`PagedDecode.of`), in a third of a second, and reads pages where they lie.
It is called with pointers by `ctypes`, or without Python from a graph of torch.compile: each shape is an operator.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from attn_backends.backends.torch.native.compiler import CompileError, load
from attn_backends.backends.torch.native.paged_rows import (
    DTYPES,
    PagedRows,
    call,
    layer_constants,
    readable,
    serves,
)
from attn_backends.cache.kv_cache import KVCache
from attn_backends.kernels.c_shims import declarations
from attn_backends.spec import AttentionSpec

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_decode.c")
MOST_HEADS = 8  # query heads of a KV head that fit in registers
MOST_FLOATS = 1 << 15  # queries and outputs of a KV head's group: they lie on the stack


class PagedDecode:
    """The kernel for layers of one shape, with one layer's constants.

    Args:
        sinks: [num_qo_heads] float, as the spec says.
        k_scale, v_scale: a cached value times its scale is the real one.
    """

    def __init__(
        self, shape: _Shape, spec: AttentionSpec, sinks: torch.Tensor | None, k_scale: float, v_scale: float
    ) -> None:
        self.operator, self.run = shape.operator, shape.run
        self.constants = layer_constants(spec, sinks, k_scale, v_scale)

    @staticmethod
    def serves(spec: AttentionSpec, device: torch.device) -> bool:
        """Whether there is a kernel for such a layer. Compiles it at the first question; logs why there is none."""
        return _shape_of(spec, device) is not None

    @staticmethod
    def of(
        spec: AttentionSpec, device: torch.device, sinks: torch.Tensor | None, k_scale: float, v_scale: float
    ) -> PagedDecode | None:
        shape = _shape_of(spec, device)
        return None if shape is None else PagedDecode(shape, spec, sinks, k_scale, v_scale)

    def attend(
        self,
        query: torch.Tensor,  # [num_rows, num_qo_heads, head_dim]
        key: torch.Tensor | None,  # [num_new, num_kv_heads, head_dim], written first; None: nothing to write
        value: torch.Tensor | None,
        kv_cache: KVCache,
        slots: torch.Tensor,  # [num_new] i64; -1 is not written
        rows: PagedRows,
        output: torch.Tensor,  # [num_rows, num_qo_heads, head_dim_vo], contiguous
        lse: torch.Tensor | None = None,  # [num_rows, num_qo_heads] f32, contiguous; natural log, sinks included
    ) -> int:
        """Write the new tokens of a step and attend its rows; returns the number of threads that did."""
        if key is None or value is None:
            key, value, slots = query, query, slots[:0]
        query, key, value = readable(query, key, value)
        return call(self.run, query, key, value, *kv_cache, slots, rows, output, lse, *self.constants)

    def trace(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        slots: torch.Tensor,
        *rows: torch.Tensor,  # pages, first_pages, seq_lens
    ) -> torch.Tensor:
        """`attend` as one operator, for a compiler to trace; returns the output."""
        query, key, value = readable(query, key, value)
        out: torch.Tensor = self.operator(query, key, value, *kv_cache, slots, *rows, *self.constants)
        return out


@dataclass(frozen=True)
class _Shape:
    run: Callable[[Any], int]
    operator: Any  # torch.ops.attn_backends.paged_decode_…


_library = torch.library.Library("attn_backends", "FRAGMENT")
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
    "Tensor pages, Tensor first_pages, Tensor seq_lens, Tensor sinks, Tensor slopes, int window_left, int chunk_size, "
    "float scale, float soft_cap, float k_scale, float v_scale) -> Tensor"
)


def _shape_of(spec: AttentionSpec, device: torch.device) -> _Shape | None:
    if not serves(spec, device) or spec.group_size * (spec.head_dim + spec.head_dim_vo) > MOST_FLOATS:
        return None
    return _compiled(spec.head_dim, spec.head_dim_vo, spec.group_size, DTYPES[spec.dtype])


@cache
def _compiled(head_dim: int, head_dim_vo: int, group: int, dtype: str) -> _Shape | None:
    block = max(size for size in range(1, MOST_HEADS + 1) if group % size == 0)
    name = f"paged_decode_{head_dim}_{head_dim_vo}_{group}_{dtype.lower()}"
    shim = f"aoti_torch_cpu_{name}"
    defines = {"HEAD_DIM": head_dim, "HEAD_DIM_VO": head_dim_vo, "GROUP": group, "BLOCK": block, dtype: 1}
    try:
        library = load(SOURCE, defines | {"OPERATOR": shim})
    except CompileError as error:
        logger.warning("decoding in plain torch, which is slower, as its kernel cannot be compiled: %s", error)
        return None
    run = library.paged_decode
    run.argtypes = (ctypes.c_char_p,)
    return _Shape(run, _defined(name, shim, run, head_dim_vo))


def _defined(name: str, shim: str, run: Any, head_dim_vo: int) -> Any:
    """The shape's operator; its first definition stays."""
    if not hasattr(torch.ops.attn_backends, name):
        _library.define(name + _SCHEMA)
        _library.impl(name, partial(_operate, run, head_dim_vo), "CompositeExplicitAutograd")
        torch.library.register_fake(f"attn_backends::{name}", partial(_operated, head_dim_vo), lib=_library)
    operator = getattr(torch.ops.attn_backends, name).default
    tensors, numbers = "AtenTensorHandle, " * 11, "int64_t, int64_t, double, double, double, double, "
    declarations[operator] = [f"AOTITorchError {shim}({tensors}{numbers}AtenTensorHandle *)"]
    return operator


def _operate(run: Any, head_dim_vo: int, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    output = query.new_empty(*query.shape[:2], head_dim_vo)
    key, value, key_cache, value_cache, slots, pages, first_pages, seq_lens, *constants = arguments
    rows = PagedRows(pages, first_pages, seq_lens)
    call(run, query, key, value, key_cache, value_cache, slots, rows, output, None, *constants)
    return output


def _operated(head_dim_vo: int, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], head_dim_vo)

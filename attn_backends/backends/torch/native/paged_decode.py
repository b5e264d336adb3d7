"""Paged attention of rows with one new token each, in C: what TORCH decodes with on a CPU, where there is a compiler.

The kernel is compiled for a shape of layer (`PagedDecode.of`), in a third of a second, and reads pages where they lie.
It is called with pointers by `ctypes`, or without Python from a graph of torch.compile: each shape is an operator.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from attn_backends.backends.torch.native.compiler import CompileError, load
from attn_backends.cache.kv_cache import KVCache
from attn_backends.kernels.c_shims import declarations
from attn_backends.spec import AttentionSpec, AttentionType

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_decode.c")
LANES = 16  # head dims are multiples of it
MOST_HEADS = 8  # query heads of a KV head that fit in registers
MOST_FLOATS = 1 << 15  # queries and outputs of a KV head's group: they lie on the stack

_DTYPES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
# `struct step` of the source: five views of an address and three strides, addresses, integers, floats.
_step = struct.Struct("P3q" * 5 + "8P7q4d")


@dataclass(frozen=True)
class PagedRows:
    """The rows of a step, as the kernel reads them: row i's pages are `pages[first_pages[i]:]`."""

    pages: torch.Tensor  # [n] i32
    first_pages: torch.Tensor  # [num_rows] i64
    seq_lens: torch.Tensor  # [num_rows] i32, new token included; 0 for padding, whose output is zero
    first_key: int = 0  # keys before it are left out

    @classmethod
    def of(cls, page_table: torch.Tensor, seq_lens: torch.Tensor, first_key: int = 0) -> PagedRows:
        """The rows of a dense table [num_rows, max_pages] i32, without a copy."""
        (num_rows, num_pages), (stride, _) = page_table.shape, page_table.stride()
        pages = page_table.as_strided(((num_rows - 1) * stride + num_pages,), (1,))
        return cls(pages, torch.arange(0, num_rows * stride, stride), seq_lens, first_key)

    def first(self, num_rows: int) -> PagedRows:
        return replace(self, first_pages=self.first_pages[:num_rows], seq_lens=self.seq_lens[:num_rows])


class PagedDecode:
    """The kernel for layers of one shape, with one layer's constants.

    Args:
        sinks: [num_qo_heads] float, as the spec says.
        k_scale, v_scale: a cached value times its scale is the real one.
    """

    def __init__(
        self, shape: _Shape, spec: AttentionSpec, sinks: torch.Tensor | None, k_scale: float, v_scale: float
    ) -> None:
        slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes)
        self.sinks, self.slopes = (torch.empty(0) if each is None else each.float() for each in (sinks, slopes))
        self.operator, self.run, self.spec = shape.operator, shape.run, spec
        numbers = (spec.window_left, spec.chunk_size or 0, spec.scale, spec.logits_soft_cap or 0.0, k_scale, v_scale)
        self.constants: tuple[Any, ...] = (self.sinks, self.slopes, *numbers)

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
        query, key, value = _readable(query, key, value)
        return _call(self.run, query, key, value, *kv_cache, slots, rows, output, lse, *self.constants)

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
        query, key, value = _readable(query, key, value)
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
    dims = (spec.head_dim, spec.head_dim_vo)
    fits = not any(dim % LANES for dim in dims) and spec.group_size * sum(dims) <= MOST_FLOATS
    alike = spec.dtype in _DTYPES and spec.cache_dtype is spec.dtype
    if device.type != "cpu" or spec.attention_type is not AttentionType.DECODER or not (fits and alike):
        return None
    return _compiled(*dims, spec.group_size, _DTYPES[spec.dtype])


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


def _readable(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with each head in one piece."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def _call(
    run: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor,
    value_cache: torch.Tensor, slots: torch.Tensor, rows: PagedRows, output: torch.Tensor, lse: torch.Tensor | None,
    sinks: torch.Tensor, slopes: torch.Tensor, window_left: int, chunk_size: int, *floats: float,
) -> int:  # fmt: skip
    num_threads: int = run(
        _step.pack(
            *_view(query), *_view(key), *_view(value), *_view(key_cache), *_view(value_cache), output.data_ptr(),
            0 if lse is None else lse.data_ptr(), slots.data_ptr(), rows.pages.data_ptr(), rows.first_pages.data_ptr(),
            rows.seq_lens.data_ptr(), sinks.data_ptr(), slopes.data_ptr(), len(slots), len(rows.seq_lens),
            key_cache.shape[2], key_cache.shape[1], rows.first_key, window_left, chunk_size, *floats,
        )
    )  # fmt: skip
    if not num_threads:
        raise MemoryError("no memory for the pieces of long rows")
    return num_threads


def _view(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.data_ptr(), *tensor.stride()[:3]


def _operate(run: Any, head_dim_vo: int, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    output = query.new_empty(*query.shape[:2], head_dim_vo)
    key, value, key_cache, value_cache, slots, pages, first_pages, seq_lens, *constants = arguments
    rows = PagedRows(pages, first_pages, seq_lens)
    _call(run, query, key, value, key_cache, value_cache, slots, rows, output, None, *constants)
    return output


def _operated(head_dim_vo: int, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], head_dim_vo)

"""Paged attention of rows with one new token each, in C: what TORCH decodes with on a CPU, where there is a compiler.

The kernel is compiled for a shape of layer (`PagedDecode.of`), in a third of a second, and reads pages where they lie.
It is called with pointers by `ctypes`, or without Python from a graph of torch.compile: each shape is an operator.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from attn_backends.backends.torch.native.paged_rows import (
    DTYPES,
    Compiled,
    PagedKernel,
    PagedRows,
    call,
    compile_kernel,
    readable,
)
from attn_backends.cache.kv_cache import KVCache
from attn_backends.kernels.c_shims import declarations
from attn_backends.spec import AttentionSpec

SOURCE = Path(__file__).with_name("paged_decode.c")
MOST_HEADS = 8  # query heads of a KV head that fit in registers
MOST_FLOATS = 1 << 15  # queries and outputs of a KV head's group: they lie on the stack


class PagedDecode(PagedKernel):
    """The kernel for rows of one token each."""

    @staticmethod
    def compiled(spec: AttentionSpec) -> Compiled | None:
        if spec.group_size * (spec.head_dim + spec.head_dim_vo) > MOST_FLOATS:
            return None
        return _compiled(spec.head_dim, spec.head_dim_vo, spec.group_size, DTYPES[spec.dtype])

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


_library = torch.library.Library("attn_backends", "FRAGMENT")
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
    "Tensor pages, Tensor first_pages, Tensor seq_lens, Tensor sinks, Tensor slopes, int window_left, int chunk_size, "
    "float scale, float soft_cap, float k_scale, float v_scale) -> Tensor"
)


@cache
def _compiled(head_dim: int, head_dim_vo: int, group: int, dtype: str) -> Compiled | None:
    block = max(size for size in range(1, MOST_HEADS + 1) if group % size == 0)
    name = f"paged_decode_{head_dim}_{head_dim_vo}_{group}_{dtype.lower()}"
    shim = f"aoti_torch_cpu_{name}"
    defines = {"HEAD_DIM": head_dim, "HEAD_DIM_VO": head_dim_vo, "GROUP": group, "BLOCK": block, dtype: 1}
    compiled = compile_kernel(SOURCE, defines | {"OPERATOR": shim}, "decoding")
    if compiled is None:
        return None
    if not hasattr(torch.ops.attn_backends, name):
        _library.define(name + _SCHEMA)
        _library.impl(name, partial(_operate, compiled.run, head_dim_vo), "CompositeExplicitAutograd")
        torch.library.register_fake(f"attn_backends::{name}", partial(_operated, head_dim_vo), lib=_library)
    operator = getattr(torch.ops.attn_backends, name).default
    tensors, numbers = "AtenTensorHandle, " * 11, "int64_t, int64_t, double, double, double, double, "
    declarations[operator] = [f"AOTITorchError {shim}({tensors}{numbers}AtenTensorHandle *)"]
    return compiled._replace(operator=operator)


def _operate(run: Any, head_dim_vo: int, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    output = query.new_empty(*query.shape[:2], head_dim_vo)
    key, value, key_cache, value_cache, slots, pages, first_pages, seq_lens, *constants = arguments
    rows = PagedRows(pages, first_pages, seq_lens)
    call(run, query, key, value, key_cache, value_cache, slots, rows, output, None, *constants)
    return output


def _operated(head_dim_vo: int, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], head_dim_vo)

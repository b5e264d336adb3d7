"""Paged attention of rows with one new token each, in C: what TORCH decodes with on a CPU, where there is a compiler.

The kernel is compiled for a shape of layer (`PagedDecode.of`), in a third of a second, and reads pages where they lie.
Each shape is two operators, one for graphs of torch.compile, which call it without Python, and one that writes into a
tensor, for all other steps; where an LSE is wanted it is called with pointers by `ctypes`.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from attn_backends.backends.torch.native.paged_rows import (
    DTYPES,
    Compiled,
    PagedKernel,
    PagedRows,
    call,
    checked,
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

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache,
        slots: torch.Tensor,
        rows: PagedRows,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> int:
        whole = lse is None and not rows.first_key and self.causal and output.is_contiguous()
        if not whole or key is None or value is None:
            return super().attend(query, key, value, kv_cache, slots, rows, output, lse)
        query, key, value = readable(query, key, value)
        of_rows = (rows.pages, rows.first_pages, rows.seq_lens)
        num_threads: int = self.into(query, key, value, *kv_cache, slots, *of_rows, *self.constants, output)
        return checked(num_threads)

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


_numbers = count()
_library = torch.library.Library("attn_backends", "FRAGMENT")
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
    "Tensor pages, Tensor first_pages, Tensor seq_lens, Tensor sinks, Tensor slopes, int window_left, int chunk_size, "
    "float scale, float soft_cap, float k_scale, float v_scale"
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
        _library.define(f"{name}({_ARGUMENTS}) -> Tensor")
        _library.impl(name, partial(_operate, compiled.run, head_dim_vo), "CompositeExplicitAutograd")
        torch.library.register_fake(f"attn_backends::{name}", partial(_operated, head_dim_vo), lib=_library)
    operator = getattr(torch.ops.attn_backends, name).default
    tensors, numbers = "AtenTensorHandle, " * 11, "int64_t, int64_t, double, double, double, double, "
    declarations[operator] = [f"AOTITorchError {shim}({tensors}{numbers}AtenTensorHandle *)"]
    return compiled._replace(operator=operator, into=_into(compiled, f"{name}_into_{next(_numbers)}"))


def _into(compiled: Compiled, name: str) -> Any:
    """The operator that writes into an output, of a name that no other library's has."""
    _library.define(f"{name}({_ARGUMENTS}, Tensor(z!) output) -> int")
    if compiled.library.implement(name.encode()):
        raise RuntimeError(f"torch does not take the operator {name}: set native_decode: false to do without")
    return getattr(torch.ops.attn_backends, name).default


def _operate(run: Any, head_dim_vo: int, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    output = query.new_empty(*query.shape[:2], head_dim_vo)
    key, value, key_cache, value_cache, slots, pages, first_pages, seq_lens, *constants = arguments
    rows = PagedRows(pages, first_pages, seq_lens)
    call(run, query, key, value, key_cache, value_cache, slots, rows, output, None, *constants)
    return output


def _operated(head_dim_vo: int, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], head_dim_vo)

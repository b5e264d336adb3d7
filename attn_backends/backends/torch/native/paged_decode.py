"""Paged attention of rows with one new token each, in C: what TORCH decodes with on a CPU, where there is a compiler.

The kernel is compiled for a shape of layer (`PagedDecode.of`), in a third of a second, and reads pages where they lie.
It is an operator of torch, which writes into a tensor; where an LSE is wanted it is called with pointers by `ctypes`.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path

import torch

from attn_backends.backends.torch.native.paged_rows import DTYPES, Compiled, PagedKernel, compile_kernel
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


_numbers = count()
_library = torch.library.Library("attn_backends", "FRAGMENT")
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
    "Tensor pages, Tensor first_pages, Tensor seq_lens, Tensor sinks, Tensor slopes, int window_left, int chunk_size, "
    "float scale, float soft_cap, float k_scale, float v_scale, Tensor(z!) output) -> int"
)


@cache
def _compiled(head_dim: int, head_dim_vo: int, group: int, dtype: str) -> Compiled | None:
    block = max(size for size in range(1, MOST_HEADS + 1) if group % size == 0)
    defines = {"HEAD_DIM": head_dim, "HEAD_DIM_VO": head_dim_vo, "GROUP": group, "BLOCK": block, dtype: 1}
    compiled = compile_kernel(SOURCE, defines, "decoding")
    if compiled is None:
        return None
    name = f"paged_decode_{head_dim}_{head_dim_vo}_{group}_{dtype.lower()}_{next(_numbers)}"  # no other library's
    _library.define(name + _SCHEMA)
    if compiled.library.implement(name.encode()):
        raise RuntimeError(f"torch does not take the operator {name}: set native_decode: false to do without")
    return compiled._replace(into=getattr(torch.ops.attn_backends, name).default)

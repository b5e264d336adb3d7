"""Paged attention of rows with any number of new tokens, in C: what TORCH prefills with on a CPU with a compiler.

The kernel is compiled for a shape of layer (`PagedPrefill.of`), in under two seconds, and reads pages where they lie.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attn_backends.backends.torch.native.paged_rows import DTYPES, Compiled, PagedKernel, compile_kernel
from attn_backends.spec import AttentionSpec

SOURCE = Path(__file__).with_name("paged_prefill.c")
MOST_DIMS = 1024  # of a key and a value: a block of queries lies on the stack


class PagedPrefill(PagedKernel):
    """The kernel for rows with `query_starts`."""

    @staticmethod
    def compiled(spec: AttentionSpec) -> Compiled | None:
        if spec.head_dim + spec.head_dim_vo > MOST_DIMS:
            return None
        return _compiled(spec.head_dim, spec.head_dim_vo, spec.group_size, DTYPES[spec.dtype])


@cache
def _compiled(head_dim: int, head_dim_vo: int, group: int, dtype: str) -> Compiled | None:
    return compile_kernel(
        SOURCE, {"HEAD_DIM": head_dim, "HEAD_DIM_VO": head_dim_vo, "GROUP": group, dtype: 1}, "prompts"
    )

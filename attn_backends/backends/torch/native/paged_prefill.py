"""Paged attention of rows with any number of new tokens, in C: what TORCH prefills with on a CPU with a compiler.

The kernel is compiled for a shape of layer (`PagedPrefill.of`), in under two seconds, and reads pages where they lie.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
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
from attn_backends.spec import AttentionSpec

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_prefill.c")
MOST_DIMS = 1024  # of a key and a value: a block of queries lies on the stack


class PagedPrefill:
    """The kernel for layers of one shape, with one layer's constants."""

    def __init__(
        self, run: Callable[[Any], int], spec: AttentionSpec, sinks: torch.Tensor | None, k_scale: float, v_scale: float
    ) -> None:
        self.run, self.causal = run, spec.causal
        self.constants = layer_constants(spec, sinks, k_scale, v_scale)

    @staticmethod
    def serves(spec: AttentionSpec, device: torch.device) -> bool:
        """Whether there is a kernel for such a layer. Compiles it at the first question; logs why there is none."""
        return _run_of(spec, device) is not None

    @staticmethod
    def of(
        spec: AttentionSpec, device: torch.device, sinks: torch.Tensor | None, k_scale: float, v_scale: float
    ) -> PagedPrefill | None:
        run = _run_of(spec, device)
        return None if run is None else PagedPrefill(run, spec, sinks, k_scale, v_scale)

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
        key: torch.Tensor | None,  # [num_new, num_kv_heads, head_dim], written first; None: nothing to write
        value: torch.Tensor | None,
        kv_cache: KVCache,
        slots: torch.Tensor,  # [num_new] i64; -1 is not written
        rows: PagedRows,  # with query_starts; tokens outside of them are left alone
        output: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim_vo]
        lse: torch.Tensor | None = None,  # [num_tokens, num_qo_heads] f32, contiguous; natural log, sinks included
    ) -> int:
        """Write the new tokens of a step and attend its rows; returns the number of threads that did."""
        if key is None or value is None:
            key, value, slots = query, query, slots[:0]
        query, key, value = readable(query, key, value)
        out = output.contiguous()
        tensors = (query, key, value, *kv_cache, slots)
        num_threads = call(self.run, *tensors, rows, out, lse, *self.constants, causal=self.causal)
        if out is not output:
            output.copy_(out)
        return num_threads


def _run_of(spec: AttentionSpec, device: torch.device) -> Callable[[Any], int] | None:
    if not serves(spec, device) or spec.head_dim + spec.head_dim_vo > MOST_DIMS:
        return None
    return _compiled(spec.head_dim, spec.head_dim_vo, spec.group_size, DTYPES[spec.dtype])


@cache
def _compiled(head_dim: int, head_dim_vo: int, group: int, dtype: str) -> Callable[[Any], int] | None:
    try:
        library = load(SOURCE, {"HEAD_DIM": head_dim, "HEAD_DIM_VO": head_dim_vo, "GROUP": group, dtype: 1})
    except CompileError as error:
        logger.warning("prompts in plain torch, which is slower, as their kernel cannot be compiled: %s", error)
        return None
    run: Callable[[Any], int] = library.paged_prefill
    run.argtypes = (ctypes.c_char_p,)  # type: ignore[attr-defined]
    return run

"""FlashMLA's dense decode played on a CPU, in its newer generation: schedules that the first call fills.

`flashmla_older` is the generation before, with the same attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.emulated.flashmla_kernel import Schedule, check, decode, make_schedule, num_parts

DEVICES = frozenset({"cpu", "cuda"})


@dataclass
class FlashMLASchedMeta:
    """A schedule, empty until the first call. It serves calls of one shape, while `cache_seqlens` keeps its values."""

    have_initialized: bool = False
    config: tuple[Any, ...] | None = None  # batch size, query length, heads, page size, causal
    tile_scheduler_metadata: torch.Tensor | None = None  # [num_parts, 8] i32
    num_splits: torch.Tensor | None = None  # [batch_size + 1] i32


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule, whatever it is asked with."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode, filling the schedule if it is empty. `out` is vLLM's addition.

    Raises:
        AssertionError: the schedule is none, or was filled for calls of another shape.
        RuntimeError: what the kernel's own checks refuse.
    """
    meta = tile_scheduler_metadata
    assert isinstance(meta, FlashMLASchedMeta), "tile_scheduler_metadata must be of type FlashMLASchedMeta"
    assert num_splits is None, "num_splits must be None"
    config = (*q.shape[:3], k_cache.shape[1], causal)
    assert meta.config in (None, config), f"inconsistent with sched_meta: {config}, filled for {meta.config}"
    meta.have_initialized, meta.config = True, config
    if meta.tile_scheduler_metadata is None or meta.num_splits is None:
        filled: Schedule = make_schedule(cache_seqlens, num_parts(q.shape[1] * q.shape[2]))
        meta.tile_scheduler_metadata, meta.num_splits = filled
    schedule = (meta.tile_scheduler_metadata, meta.num_splits)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    made, lse = decode(q, k_cache, head_dim_v, cache_seqlens, block_table, scale, causal, schedule)
    if out is None:
        return made, lse
    by_kv_head = (len(made), 1, made.shape[1] * made.shape[2], made.shape[3])
    check(out.shape == by_kv_head, "out must have shape (batch_size, num_heads, q_seq_per_hk, head_size_v)")
    check(out.dtype is made.dtype, "out must have the dtype of the result")
    check(out.is_contiguous(), "out must be contiguous")
    return out.view(made.shape).copy_(made), lse


def get_mla_metadata_dense_fp8(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's addition, for `flash_mla_with_kvcache_fp8`: a schedule that is made in advance."""
    return make_schedule(cache_seqlens, num_parts(num_q_tokens_per_head_k) // num_heads_k)


def flash_mla_with_kvcache_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's addition: queries and latents of float8_e4m3fn, results in bfloat16.

    Raises:
        RuntimeError: another dtype, or a scale is not given as [1] f32.
    """
    check(q.dtype is k_cache.dtype is torch.float8_e4m3fn, "q and k_cache must be float8_e4m3fn")
    for scale in (descale_q, descale_k):
        check(scale is not None and scale.shape == (1,) and scale.dtype is torch.float32, "descales are [1] float32")
    assert descale_q is not None
    assert descale_k is not None
    real = (q.float() * descale_q).bfloat16(), (k_cache.float() * descale_k).bfloat16()
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    schedule = (tile_scheduler_metadata, num_splits)
    return decode(*real, head_dim_v, cache_seqlens, block_table, softmax_scale, causal, schedule, needs_keys=True)

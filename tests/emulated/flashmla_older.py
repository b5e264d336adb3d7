"""FlashMLA's dense decode played on a CPU, in its older generation: schedules made in advance, from the lengths."""

from __future__ import annotations

import torch

from tests.emulated.flashmla_kernel import decode, make_schedule, num_parts


def get_mla_metadata(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """tile_scheduler_metadata [num_parts, 8] i32 and num_splits [batch_size + 1] i32, new ones at every call.

    Args:
        cache_seqlens: [batch_size] i32; the schedule is right while they keep their values.
        num_q_tokens_per_head_k: query tokens of a row times query heads of a KV head.
        num_heads_k: 1 here.
    """
    return make_schedule(cache_seqlens, num_parts(num_q_tokens_per_head_k) // num_heads_k)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode on a schedule.

    Raises:
        RuntimeError: what the kernel's own checks refuse.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    schedule = (tile_scheduler_metadata, num_splits)
    return decode(q, k_cache, head_dim_v, cache_seqlens, block_table, scale, causal, schedule, needs_keys=True)

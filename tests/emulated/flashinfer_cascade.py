"""The emulated `flashinfer.cascade`: attention states over parts of the keys, merged. Each lse is log2."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulated.flashinfer_checks import DType
from tests.emulated.flashinfer_modules import HALF_DTYPES
from tests.emulated.flashinfer_prefill import BatchPrefillWithPagedKVCacheWrapper
from tests.emulated.flashinfer_wrapper import PagedCache

_HEAD_DIMS = (64, 128, 256, 512)
_MAX_THREADS = 1024


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states: v [num_tokens, num_heads, head_dim] f16 or bf16, s [num_tokens, num_heads] f32.

    s = log2(2^s_a + 2^s_b), v = v_a 2^(s_a - s) + v_b 2^(s_b - s). Two states of -inf give NaN, as in the real kernel;
    the lse that its attention has for no keys is finite.

    Raises:
        RuntimeError: shapes differ, something is not contiguous, or no kernel has this dtype, head dim or head count.
    """
    s_a, s_b = s_a.float(), s_b.float()
    _check_states(v_a, s_a, v_b, s_b)
    return _merged(v_a, s_a, v_b, s_b)


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """As `merge_state`, into v and s. An s that is not float32 is converted first, and keeps what it was.

    Args:
        mask: [num_tokens] bool or u8: which tokens to merge. The others stay as they are.
    """
    s, s_other = s.float(), s_other.float()
    _check_states(v, s, v_other, s_other)
    merged, merged_s = _merged(v, s, v_other, s_other)
    if mask is not None:
        chosen = mask.view(torch.uint8) != 0
        merged = torch.where(chosen[:, None, None], merged, v)
        merged_s = torch.where(chosen[:, None], merged_s, s)
    v.copy_(merged)
    s.copy_(merged_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge v [num_tokens, num_states, num_heads, head_dim] with s [num_tokens, num_states, num_heads] over states."""
    s = s.float()
    _check_states(v.flatten(1, 2), s.flatten(1, 2), v.flatten(1, 2), s.flatten(1, 2), max_threads=None)
    highest = s.amax(1, keepdim=True)
    weights = torch.exp2(s - highest)
    total = weights.sum(1)
    merged = (v.float() * weights[..., None]).sum(1) / total[..., None]
    return merged.to(v.dtype), torch.log2(total) + highest[:, 0]


def _merged(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    highest = torch.maximum(s_a, s_b)
    weight_a, weight_b = torch.exp2(s_a - highest), torch.exp2(s_b - highest)
    total = weight_a + weight_b
    merged = v_a.float() * (weight_a / total)[..., None] + v_b.float() * (weight_b / total)[..., None]
    return merged.to(v_a.dtype), torch.log2(total) + highest


def _check_states(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    max_threads: int | None = _MAX_THREADS,
) -> None:
    if v_a.dim() != 3 or v_a.shape != v_b.shape or s_a.shape != s_b.shape or s_a.shape != v_a.shape[:2]:
        shapes = [list(t.shape) for t in (v_a, s_a, v_b, s_b)]
        raise RuntimeError(f"states must be v [n, h, d] and s [n, h], twice the same, got {shapes}")
    if not all(t.is_contiguous() for t in (v_a, s_a, v_b, s_b)):
        raise RuntimeError("states must be contiguous")
    head_dim, num_heads = v_a.shape[2], v_a.shape[1]
    if v_a.dtype not in HALF_DTYPES or v_b.dtype is not v_a.dtype:
        raise RuntimeError(f"MergeState kernel launch failed: unsupported data type {v_a.dtype} with {v_b.dtype}")
    if head_dim not in _HEAD_DIMS:
        raise RuntimeError(f"Unsupported head_dim: {head_dim}")
    threads = head_dim // max(8, head_dim // 32) * num_heads
    if max_threads is not None and threads > max_threads:
        raise RuntimeError(f"MergeState kernel launch failed: invalid configuration, {threads} threads in a block")


class MultiLevelCascadeAttentionWrapper:
    """Paged prefill wrappers, one a level from the widest shared prefix to each row's own keys, with merged states.

    Every level's `qo_indptr` ends at the same number of tokens; only the last level is causal.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        self._use_cuda_graph = use_cuda_graph
        self._num_levels = num_levels
        self._kv_layout = kv_layout
        given = (
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )
        buffers: Any = zip(*(one or () for one in given), strict=True) if use_cuda_graph else [()] * num_levels
        self._batch_prefill_wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *level)
            for level in buffers
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        """Use other workspaces: one of floats, and one of ints a level."""
        for wrapper, ints in zip(self._batch_prefill_wrappers, int_workspace_buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, ints)

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Plan every level; see `BatchPrefillWithPagedKVCacheWrapper.plan`."""
        levels = zip(
            self._batch_prefill_wrappers,
            qo_indptr_arr,
            paged_kv_indptr_arr,
            paged_kv_indices_arr,
            paged_kv_last_page_len,
            strict=True,
        )
        for level, (wrapper, *table) in enumerate(levels):
            qo_indptr, indptr, indices, last_page_len = table
            wrapper.plan(
                qo_indptr,
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level == self._num_levels - 1,
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache) -> torch.Tensor:
        """The merged output [num_tokens, num_qo_heads, head_dim]."""
        *shared, own = self._batch_prefill_wrappers
        out, lse = own.run(q, paged_kv_cache, return_lse=True)
        for wrapper in shared:
            merge_state_in_place(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return out  # type: ignore[no-any-return]

    forward = run

"""The emulated `flashinfer.decode`: one query a request over a paged cache."""

from __future__ import annotations

import torch

from tests.emulated.flashinfer_checks import DType
from tests.emulated.flashinfer_decode_wrapper import BatchDecodeWithPagedKVCacheWrapper
from tests.emulated.flashinfer_wrapper import seq_lens_of

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
]


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same with `use_cuda_graph`."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan again, after one full plan of this wrapper, without filling its buffers.

    In a graph the buffers keep what the caller has written to them; otherwise they become the tensors given here. The
    module of the full plan stays, whatever dtypes, window or soft cap are given now.

    Raises:
        ValueError: as from `plan`.
        RuntimeError: whatever the module's plan raised, or there was no full plan.
    """
    batch_size = len(last_page_len)
    if self._use_cuda_graph:
        self._check_fits(batch_size, indices)
    else:
        self._paged_kv_indptr_buf = indptr
        self._paged_kv_indices_buf = indices
        self._paged_kv_last_page_len_buf = last_page_len
        if self._use_tensor_cores:
            self._qo_indptr_buf = torch.arange(batch_size + 1, dtype=torch.int32, device=self.device)
    starts = indptr.cpu() if global_override_indptr_cpu is None else global_override_indptr_cpu
    kv_lens = None
    if self._use_tensor_cores:
        last = torch.ones(batch_size, dtype=torch.int32, device="cpu") if page_size == 1 else last_page_len.cpu()
        kv_lens = seq_lens_of(starts, last, page_size)
    try:
        self._plan_info = self._planned(
            starts, kv_lens, num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap,
            -1 if fixed_split_size is None else fixed_split_size, disable_split_kv,
        )  # fmt: skip
    except Exception as error:
        raise RuntimeError(f"Error in standard plan: {error}") from error
    self._set_constants(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)

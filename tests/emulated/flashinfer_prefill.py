"""The emulated `flashinfer.prefill`: several queries a request, over a paged cache or over keys in a row."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.emulated.flashinfer_checks import (
    DType,
    check_buffers,
    check_dtypes,
    check_num_queries,
    check_shape,
    checked_num_rows,
    lse_for,
    not_emulated,
)
from tests.emulated.flashinfer_ragged import BatchPrefillWithRaggedKVCacheWrapper
from tests.emulated.flashinfer_wrapper import PagedCache, PagedWrapper, seq_lens_of

__all__ = ["BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"]


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """As the real one on an H100: `auto` is fa3, and fa2 for an fp8 cache.

    Raises:
        ValueError: `use_cuda_graph` without its four buffers, or with sizes that do not fit.
        NotImplementedError: masks, `jit_args`, or a backend other than auto, fa2, fa3.
    """

    _causal: bool

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        not_emulated(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._fixed_batch_size = 0
        if use_cuda_graph:
            check_buffers(
                "CUDA graph",
                qo_indptr_buf=qo_indptr_buf,
                paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            )
            assert qo_indptr_buf is not None
            assert paged_kv_indptr_buf is not None
            assert paged_kv_last_page_len_buf is not None
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(paged_kv_indptr_buf) != self._fixed_batch_size + 1:
                raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")
            if len(paged_kv_last_page_len_buf) != self._fixed_batch_size:
                raise ValueError("The length of paged_kv_last_page_len_buf should be batch_size.")
        self._qo_indptr_buf = qo_indptr_buf
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self._custom_mask_buf = None
        self._mask_indptr_buf = None
        self._kv_lens_buffer = torch.empty(32768, dtype=torch.int32, device=self.device)
        self._max_total_num_rows: int | None = None
        self._plan_info = None
        self._cached_module = None
        self._block_tables: torch.Tensor | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan a batch: rows of queries, each over its own pages.

        Args:
            qo_indptr: [batch_size + 1] i32, on the host; so are `paged_kv_indptr [batch_size + 1] i32` and
                `paged_kv_last_page_len [batch_size] i32`. Outside of graphs they are copied, as they are on the way to
                a device; `paged_kv_indices [num_pages] i32` is kept as it is.

        Raises:
            ValueError: with a graph more tokens than in the first plan, another batch size than its buffers', or more
                indices than theirs holds.
            RuntimeError: a workspace is too small, or no kernel does this.
        """
        not_emulated(
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
            max_sequence_kv=max_sequence_kv,
        )
        self._set_dtypes(q_data_type, kv_data_type, o_data_type)
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        self._batch_size, self._num_qo_heads, self._num_kv_heads = len(qo_indptr) - 1, num_qo_heads, num_kv_heads
        queries, starts = qo_indptr.cpu(), paged_kv_indptr.cpu()
        if seq_lens is None:
            kv_lens = seq_lens_of(starts, paged_kv_last_page_len.cpu(), page_size)
        else:
            kv_lens = seq_lens.cpu().flatten()
        self._kv_lens_buffer[: len(kv_lens)].copy_(kv_lens, non_blocking=non_blocking)
        self._max_kv_len = int(kv_lens.max())
        self._max_q_len = max_token_per_sequence or int((queries[1:] - queries[:-1]).max())
        self._qo_indptr_last = int(queries[-1])
        table = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        if self._use_cuda_graph:
            self._fill_buffers(*table, non_blocking=non_blocking)
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device, copy=True)
            self._paged_kv_indptr_buf = paged_kv_indptr.to(self.device, copy=True)
            self._paged_kv_indices_buf = paged_kv_indices.to(self.device)
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len.to(self.device, copy=True)
        self._block_tables = block_tables
        self._plan_tiles(
            queries, starts, kv_lens, self._max_total_num_rows or self._qo_indptr_last, (num_qo_heads, num_kv_heads),
            page_size, (head_dim_qk, head_dim_vo), causal, window_left, logits_soft_cap, fixed_split_size,
            disable_split_kv, pos_encoding_mode,
        )  # fmt: skip
        self._use_fp16_qk_reduction = use_fp16_qk_reduction
        self._seq_lens_kv = seq_lens
        self._seq_lens_q = seq_lens if seq_lens_q is None else seq_lens_q
        self._set_constants(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)

    begin_forward = plan

    def _fill_buffers(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *,
        non_blocking: bool,
    ) -> None:
        self._max_total_num_rows = checked_num_rows(self._qo_indptr_last, self._max_total_num_rows)
        if self._batch_size != self._fixed_batch_size:
            raise ValueError(
                "The batch size should be fixed during the lifecycle of the wrapper in cuda graph mode, the runtime "
                f"batch size {self._batch_size} mismatches the batch size {self._fixed_batch_size}  set during "
                "initialization."
            )
        if len(indices) > len(self._paged_kv_indices_buf):
            raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
        self._qo_indptr_buf.copy_(qo_indptr, non_blocking=non_blocking)
        self._paged_kv_indptr_buf.copy_(indptr, non_blocking=non_blocking)
        self._paged_kv_last_page_len_buf.copy_(last_page_len, non_blocking=non_blocking)
        self._paged_kv_indices_buf[: len(indices)].copy_(indices, non_blocking=non_blocking)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Any:
        """Attend. `sinks` is dropped without a word, as by the real fa2 and fa3 kernels.

        Args:
            q: [num_tokens, num_qo_heads, head_dim_qk] of the planned dtype.
            paged_kv_cache: (k, v), each [num_pages, page_size, num_kv_heads, head_dim], or [num_pages, num_kv_heads,
                page_size, head_dim] in HND; or one tensor with the two along dim 1.

        Returns:
            out [num_tokens, num_qo_heads, head_dim_vo]; with `return_lse` also lse [num_tokens, num_qo_heads] f32, in
            log2.

        Raises:
            AttributeError: nothing is planned.
            ValueError: a wrong shape or dtype. AssertionError: another window than the planned one.
        """
        not_emulated(kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        key, value = self._unpacked(paged_kv_cache)
        check_dtypes(q, key, self._cached_q_data_type, self._cached_kv_data_type)
        check_num_queries(q, self._qo_indptr_last)
        if out is not None and out.dtype is not self._cached_o_data_type:
            raise ValueError(
                f"The dtype of out {out.dtype} does not match the o_data_type {self._cached_o_data_type} specified in "
                "plan function."
            )
        assert window_left is None or window_left == self._window_left
        rules = self._rules(q, self._causal, q_scale, k_scale)
        made_lse = lse_for(q, lse, return_lse)
        shape = (*q.shape[:-1], value.shape[-1])
        if out is None:
            out = torch.zeros(shape, dtype=self._cached_o_data_type, device=q.device)
        else:
            check_shape(out, shape, self._cached_o_data_type, q, "out")
        self._run_paged(q, key, value, self._qo_indptr_buf, out, made_lse, rules, v_scale)
        return (out, made_lse) if return_lse else out

    run_return_lse = functools.partialmethod(run, return_lse=True)

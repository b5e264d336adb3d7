"""The emulated ragged wrapper of `flashinfer.prefill`: keys and values that lie one row after the other."""

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
from tests.emulated.flashinfer_wrapper import Wrapper


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """As the real one on an H100: `auto` is fa3, and fa2 for fp8 keys.

    Raises:
        ValueError: `use_cuda_graph` without its two buffers, or with sizes that do not fit.
        NotImplementedError: masks, `jit_args`, or a backend other than auto, fa2, fa3.
    """

    _qo_indptr_buf: Any  # [batch_size + 1] i32
    _kv_indptr_buf: Any  # [batch_size + 1] i32
    _causal: bool

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        not_emulated(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        if use_cuda_graph:
            check_buffers("cuda graph", qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
            assert qo_indptr_buf is not None
            assert kv_indptr_buf is not None
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(kv_indptr_buf) != self._fixed_batch_size + 1:
                raise ValueError(
                    f"The length of kv_indptr_buf ({len(kv_indptr_buf)}) should be the same as qo_indptr_buf "
                    f"({len(qo_indptr_buf)})."
                )
        self._qo_indptr_buf = qo_indptr_buf
        self._kv_indptr_buf = kv_indptr_buf
        self._custom_mask_buf = None
        self._mask_indptr_buf = None
        self._max_total_num_rows: int | None = None
        self._cached_module = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
    ) -> None:
        """Plan a batch: rows of queries, each over its own run of keys.

        Args:
            qo_indptr: [batch_size + 1] i32, on the host; so is `kv_indptr [batch_size + 1] i32`. Outside of graphs
                both are copied, as they are on the way to a device.

        Raises:
            ValueError: the two lengths differ; with a graph more tokens than in the first plan, or another batch size
                than its buffers'.
            RuntimeError: a workspace is too small, or no kernel does this.
        """
        not_emulated(
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
        )
        self._set_dtypes(q_data_type, kv_data_type, o_data_type)
        self._num_qo_heads = num_qo_heads
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        batch_size = len(qo_indptr) - 1
        if len(kv_indptr) != batch_size + 1:
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        queries, starts = qo_indptr.cpu(), kv_indptr.cpu()
        self._qo_indptr_last = int(queries[-1])
        if self._use_cuda_graph:
            self._max_total_num_rows = checked_num_rows(self._qo_indptr_last, self._max_total_num_rows)
            if batch_size != self._fixed_batch_size:
                raise ValueError(
                    f"The batch size should be fixed in cudagraph mode, the runtime batch size {batch_size}  "
                    f"mismatches the batch size set during initialization {self._fixed_batch_size}."
                )
            self._qo_indptr_buf.copy_(qo_indptr, non_blocking=non_blocking)
            self._kv_indptr_buf.copy_(kv_indptr, non_blocking=non_blocking)
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device, copy=True)
            self._kv_indptr_buf = kv_indptr.to(self.device, copy=True)
        self._o_indptr_buf, self._v_indptr_buf = self._qo_indptr_buf, self._kv_indptr_buf  # cudnn's alone
        self._plan_tiles(
            queries, starts, starts[1:] - starts[:-1], self._max_total_num_rows or self._qo_indptr_last,
            (num_qo_heads, num_kv_heads), 1, (head_dim_qk, head_dim_vo), causal, window_left, logits_soft_cap,
            fixed_split_size, disable_split_kv, pos_encoding_mode,
        )  # fmt: skip
        self._use_fp16_qk_reduction = use_fp16_qk_reduction
        self._set_constants(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend. The four scales are dropped without a word, as by the real one for all but fp4 keys.

        Args:
            q: [num_tokens, num_qo_heads, head_dim_qk] of the planned dtype.
            k: [num_keys, num_kv_heads, head_dim_qk], in HND [num_kv_heads, num_keys, head_dim_qk]. So is v, with
                head_dim_vo.

        Returns:
            out [num_tokens, num_qo_heads, head_dim_vo]; with `return_lse` also lse [num_tokens, num_qo_heads] f32, in
            log2.

        Raises:
            AttributeError: nothing is planned.
            ValueError: a wrong shape or dtype.
        """
        not_emulated(kv_cache_sf=kv_cache_sf)
        check_dtypes(q, k, self._cached_q_data_type, self._cached_kv_data_type)
        check_num_queries(q, self._qo_indptr_last)
        rules = self._rules(q, self._causal)
        made_lse = lse_for(q, lse, return_lse)
        shape = (*q.shape[:-1], v.shape[-1])
        if out is None:  # of q's dtype: the planned one of the output is for an `out` that is given
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
        else:
            check_shape(out, shape, self._cached_o_data_type, q, "out")
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        self._cached_module.ragged_run(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._plan_info,
            q,
            k,
            v,
            self._qo_indptr_buf,
            self._kv_indptr_buf,
            out,
            made_lse,
            rules,
        )
        return (out, made_lse) if return_lse else out

    run_return_lse = functools.partialmethod(run, return_lse=True)

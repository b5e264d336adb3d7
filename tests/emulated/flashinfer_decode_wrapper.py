"""The emulated decode wrapper: one query a request over a paged cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.emulated.flashinfer_checks import DType, check_buffers, check_dtypes, check_shape, lse_for, not_emulated
from tests.emulated.flashinfer_modules import DECODE, FA2, compiled
from tests.emulated.flashinfer_wrapper import PagedCache, PagedWrapper, seq_lens_of


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """As the real one; `use_tensor_cores` plans and runs the fa2 prefill module.

    Raises:
        ValueError: `use_cuda_graph` without its three buffers, or with sizes that do not fit.
        NotImplementedError: `jit_args`, or a backend other than auto, fa2, fa3.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._fixed_batch_size = 0
        if use_cuda_graph:
            check_buffers(
                "cudagraph",
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )
            assert paged_kv_last_page_len_buffer is not None
            assert paged_kv_indptr_buffer is not None
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._use_tensor_cores = use_tensor_cores
        if use_tensor_cores and use_cuda_graph:
            self._qo_indptr_buf = torch.arange(self._fixed_batch_size + 1, dtype=torch.int32, device=self.device)

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
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
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan a batch: rows of pages, one query each.

        Args:
            indptr: [batch_size + 1] i32, on the host; so is `last_page_len [batch_size] i32`. Outside of graphs both
                are copied, as they are on the way to a device; `indices [num_pages] i32` is kept as it is.

        Raises:
            ValueError: with a graph another batch size than its buffers', or more indices than theirs holds; a fixed
                split without tensor cores.
            RuntimeError: a workspace is too small, or no kernel does this.
        """
        batch_size = len(last_page_len)
        self._workspace_size = self._float_workspace_buffer.numel() * self._float_workspace_buffer.element_size()
        if self._use_cuda_graph:
            self._check_fits(batch_size, indices)
            self._paged_kv_indptr_buf.copy_(indptr, non_blocking=non_blocking)
            self._paged_kv_last_page_len_buf.copy_(last_page_len, non_blocking=non_blocking)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices, non_blocking=non_blocking)
        else:
            self._paged_kv_indptr_buf = indptr.to(self.device, copy=True)
            self._paged_kv_indices_buf = indices.to(self.device)
            self._paged_kv_last_page_len_buf = last_page_len.to(self.device, copy=True)
            self._qo_indptr_buf = torch.arange(batch_size + 1, dtype=torch.int32, device=self.device)
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        self._set_dtypes(data_type if q_data_type is None else q_data_type, kv_data_type, o_data_type)
        if fixed_split_size is not None and not self._use_tensor_cores:
            raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
        self._batch_size, self._num_qo_heads, self._num_kv_heads = batch_size, num_qo_heads, num_kv_heads
        self._block_tables = block_tables
        if self._use_tensor_cores and self._backend == "auto":
            self._backend = FA2
        self._cached_module = compiled(
            self._backend if self._use_tensor_cores else DECODE,
            self._cached_q_data_type,
            self._cached_kv_data_type,
            self._cached_o_data_type,
            head_dim,
            head_dim,
            window_left != -1,
            (logits_soft_cap or 0.0) > 0,
            pos_encoding_mode,
        )
        kv_lens = seq_lens_of(indptr.cpu(), last_page_len.cpu(), page_size) if seq_lens is None else seq_lens.cpu()
        self._max_kv_len = int(kv_lens.max()) if self._use_tensor_cores else None
        self._plan_info = self._planned(
            indptr.cpu(), kv_lens, num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap,
            -1 if fixed_split_size is None else fixed_split_size, disable_split_kv,
        )  # fmt: skip
        self._set_constants(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)

    begin_forward = plan

    def _check_fits(self, batch_size: int, indices: torch.Tensor) -> None:
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"The batch size should be fixed in cudagraph mode, the runtime batch size {batch_size}  mismatches "
                f"the batch size set during initialization {self._fixed_batch_size}"
            )
        if len(indices) > len(self._paged_kv_indices_buf):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")

    def _planned(
        self,
        indptr: torch.Tensor,
        kv_lens: torch.Tensor | None,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        logits_soft_cap: float | None,
        fixed_split_size: int,
        disable_split_kv: bool,
    ) -> Any:
        batch_size = len(indptr) - 1
        sizes = (num_qo_heads, num_kv_heads, page_size, self._use_cuda_graph)
        dims = (head_dim, head_dim)
        if not self._use_tensor_cores:
            empty = [
                torch.empty(0, dtype=t, device="cpu") for t in (self._cached_q_data_type, self._cached_kv_data_type)
            ]
            return self._cached_module.plan(
                *self._workspaces(), indptr, batch_size, *sizes, window_left, logits_soft_cap or 0.0, *dims, *empty
            )
        queries = torch.arange(batch_size + 1, dtype=torch.int32, device="cpu")
        split = (fixed_split_size, disable_split_kv, 0) if self._backend == FA2 else ()
        return self._cached_module.plan(
            *self._workspaces(), queries, indptr, kv_lens, batch_size, batch_size, *sizes, *dims, False, window_left,
            *split,
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = 1,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend. `sinks` is dropped without a word, as by the real fa2, fa3 and CUDA-core kernels.

        Args:
            q: [batch_size, num_qo_heads, head_dim] of the planned dtype.
            paged_kv_cache: (k, v), each [num_pages, page_size, num_kv_heads, head_dim], or [num_pages, num_kv_heads,
                page_size, head_dim] in HND; or one tensor with the two along dim 1.

        Returns:
            out [batch_size, num_qo_heads, head_dim]; with `return_lse` also lse [batch_size, num_qo_heads] f32, log2.

        Raises:
            AttributeError: nothing is planned.
            ValueError: a wrong shape or dtype. AssertionError: another window than the planned one.
        """
        not_emulated(kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        key, value = self._unpacked(paged_kv_cache)
        check_dtypes(q, key, self._cached_q_data_type, self._cached_kv_data_type)
        batch_size = self._paged_kv_last_page_len_buf.shape[0]
        expected = batch_size * (q_len_per_req or 1)
        if q.shape[0] != expected or expected != batch_size:
            raise ValueError(
                f"q.shape[0] ({q.shape[0]}) does not match batch_size * q_len_per_req ({batch_size} * {q_len_per_req} "
                f"= {expected}). For batch decode, q must have shape [batch_size * q_len_per_req, num_heads, head_dim]."
            )
        assert window_left is None or window_left == self._window_left
        rules = self._rules(q, False, q_scale, k_scale)
        made_lse = lse_for(q, lse, return_lse)
        if out is None:
            out = torch.empty(*q.shape[:-1], value.shape[-1], dtype=self._cached_o_data_type, device=q.device)
        else:
            check_shape(out, tuple(q.shape), self._cached_o_data_type, q, "out")
        qo_indptr = self._qo_indptr_buf if self._use_tensor_cores else None
        self._run_paged(q, key, value, qo_indptr, out, made_lse, rules, v_scale)
        return (out, made_lse) if return_lse else out

    run_return_lse = functools.partialmethod(run, return_lse=True)

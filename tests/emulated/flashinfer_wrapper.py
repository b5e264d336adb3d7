"""What the emulated FlashInfer's wrappers share: workspaces, constants of a plan, checks of what a run is given."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.emulated.flashinfer_checks import DType, check_dims, dtype_of, not_emulated, prefill_backend
from tests.emulated.flashinfer_kernel import Rules, get_alibi_slopes
from tests.emulated.flashinfer_modules import FA2, FA3, compiled

INT_WORKSPACE_BYTES = 8 * 1024 * 1024
BACKENDS = ("auto", FA2, FA3)
PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Wrapper:
    """The part of a wrapper that does not depend on what it attends to."""

    _backend: str
    _plan_info: Any
    _cached_module: Any
    _cached_q_data_type: torch.dtype  # set by plan alone: a run before it fails as the real one does
    _cached_kv_data_type: torch.dtype
    _cached_o_data_type: torch.dtype
    _window_left: int
    _logits_soft_cap: float
    _sm_scale: float | None
    _pos_encoding_mode: str
    _rope_scale: float | None
    _rope_theta: float | None
    _num_qo_heads: int
    _alibi_slopes: torch.Tensor  # [num_qo_heads] f32

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str, jit_args: Any
    ) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        if backend not in BACKENDS:
            raise NotImplementedError(f"the emulation has the backends {BACKENDS}, not {backend!r}")
        not_emulated(jit_args=jit_args)
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._jit_module = None
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._workspace_size = float_workspace_buffer.numel() * float_workspace_buffer.element_size()
        self._int_workspace_buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._pin_memory_int_workspace_buffer = pinned_like(self._int_workspace_buffer)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Use other workspaces, and a new pinned buffer of the int workspace's size. What was planned is lost."""
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pin_memory_int_workspace_buffer = pinned_like(int_workspace_buffer)

    def end_forward(self) -> None:
        """Does nothing, as in the real package."""

    def _workspaces(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer

    def _set_dtypes(self, q_data_type: DType | None, kv_data_type: DType | None, o_data_type: DType | None) -> None:
        self._cached_q_data_type = dtype_of(q_data_type)
        self._cached_kv_data_type = dtype_of(q_data_type if kv_data_type is None else kv_data_type)
        self._cached_o_data_type = dtype_of(q_data_type if o_data_type is None else o_data_type)

    def _set_constants(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        self._pos_encoding_mode = pos_encoding_mode
        self._window_left = window_left
        self._logits_soft_cap = logits_soft_cap or 0.0
        self._sm_scale = sm_scale
        self._rope_scale = rope_scale
        self._rope_theta = rope_theta
        if pos_encoding_mode == "ALIBI":  # the real one keeps them from its first run on
            self._alibi_slopes = get_alibi_slopes(self._num_qo_heads).to(self.device)

    def _plan_tiles(
        self, queries: torch.Tensor, starts: torch.Tensor, kv_lens: torch.Tensor, num_rows: int,
        heads: tuple[int, int], page_size: int, head_dims: tuple[int, int], causal: bool, window_left: int,
        logits_soft_cap: float | None, fixed_split_size: int | None, disable_split_kv: bool,
        pos_encoding_mode: str,
    ) -> None:  # fmt: skip
        """Choose the module of fa2 or fa3, and call its scheduler, as both prefill wrappers do.

        Args:
            queries, starts, kv_lens: on the CPU: query starts, page or key starts, keys of each row.
            num_rows: query tokens, or as many as a graph has at most.
        """
        self._backend = prefill_backend(
            self._backend, self._cached_q_data_type, self._cached_kv_data_type, pos_encoding_mode
        )
        self._cached_module = compiled(
            self._backend,
            self._cached_q_data_type,
            self._cached_kv_data_type,
            self._cached_o_data_type,
            *head_dims,
            window_left >= 0,
            (logits_soft_cap or 0.0) > 0,
            pos_encoding_mode,
        )
        self._plan_info = self._cached_module.plan(
            *self._workspaces(),
            queries,
            starts,
            kv_lens,
            num_rows,
            len(kv_lens),
            *heads,
            page_size,
            self._use_cuda_graph,
            *head_dims,
            causal,
            window_left,
            *((fixed_split_size or -1, disable_split_kv, 0) if self._backend == FA2 else ()),
        )
        self._causal = causal

    def _rules(self, query: torch.Tensor, causal: bool, *scales: float | torch.Tensor | None) -> Rules:
        scale = 1.0 / math.sqrt(query.shape[-1]) if self._sm_scale is None else self._sm_scale
        for factor in scales:
            if isinstance(factor, torch.Tensor):
                raise TypeError("a scale of q or k is a number: kernels other than fp8's take no tensor there")
            scale *= 1.0 if factor is None else factor
        rope = None
        if self._pos_encoding_mode == "ROPE_LLAMA":
            rope = (self._rope_scale or 1.0, self._rope_theta or 1e4)
        alibi = self._alibi_slopes if self._pos_encoding_mode == "ALIBI" else None
        return Rules(scale, causal, self._window_left, self._logits_soft_cap, rope=rope, alibi=alibi)


class PagedWrapper(Wrapper):
    """The part of a wrapper that attends to pages."""

    _qo_indptr_buf: Any  # [batch_size + 1] i32; CUDA-core decode in a graph has none
    _paged_kv_indptr_buf: Any  # [batch_size + 1] i32
    _paged_kv_indices_buf: Any  # [max_num_pages] i32
    _paged_kv_last_page_len_buf: Any  # [batch_size] i32
    _num_qo_heads: int
    _num_kv_heads: int

    def _unpacked(self, paged_kv_cache: PagedCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as [num_pages, page_size, num_kv_heads, head_dim], views of the cache."""
        if isinstance(paged_kv_cache, tuple):
            key, value = paged_kv_cache
        elif isinstance(paged_kv_cache, torch.Tensor):
            check_dims(paged_kv_cache, 5, "paged_kv_cache")
            key, value = paged_kv_cache.unbind(1)
        else:
            raise KeyError(
                f"Unrecognized paged_kv_cache type {type(paged_kv_cache)}, expect a tensor or a tuple of two"
            )
        check_dims(key, 4, "k_cache")
        check_dims(value, 4, "v_cache")
        return (key, value) if self._kv_layout == "NHD" else (key.transpose(1, 2), value.transpose(1, 2))

    def _run_paged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        qo_indptr: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        rules: Rules,
        v_scale: float | torch.Tensor | None,
    ) -> None:
        """Launch; then what the real wrapper does behind the kernel: `out` times the scale of V, in its own dtype."""
        heads = (query.shape[1], key.shape[2])
        if heads != (self._num_qo_heads, self._num_kv_heads):
            planned = (self._num_qo_heads, self._num_kv_heads)
            raise RuntimeError(f"{heads} query and KV heads are not those of the plan: {planned}")
        self._cached_module.paged_run(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._plan_info,
            query,
            key,
            value,
            qo_indptr,
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
            out,
            lse,
            rules,
        )
        if v_scale is not None and not (isinstance(v_scale, float) and v_scale == 1.0):
            out.mul_(v_scale)


def pinned_like(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=torch.cuda.is_available())


def seq_lens_of(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Lengths in tokens [batch_size] i32, as the real `get_seq_lens`: of a row without pages, its last page's."""
    return torch.clamp(indptr[1:] - indptr[:-1] - 1, min=0) * page_size + last_page_len

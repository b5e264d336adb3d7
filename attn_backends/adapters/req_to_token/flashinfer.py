"""pymllm's `FlashInferAttnBackend`, by its own names and arguments, over our FLASHINFER.

Every batch brings the pool, as `token_to_kv_pool`, whose pages are the plan's. Layers come unannounced: each kind is
planned when it first calls. Who serves a step, and on which cores, is as pymllm's documentation says of FlashInfer's
wrappers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn_backends.adapters.req_to_token.attention import ReqToTokenAttention
from attn_backends.adapters.req_to_token.batch import ForwardBatchLike, HostLens
from attn_backends.adapters.req_to_token.graphs import TokenGraphs
from attn_backends.adapters.req_to_token.kv_pool import KVPool, page_size_of
from attn_backends.adapters.req_to_token.layers import AttentionLayer, LayerKind, usual_layers
from attn_backends.adapters.req_to_token.wrappers import (
    DecodeMetadata,
    IndicesUpdaterDecode,
    PrefillMetadata,
    WrapperDispatch,
    metadata_of,
    should_use_tensor_core,
    wrappers_of,
)
from attn_backends.interface.capabilities import Rejection, Unsupported

__all__ = [
    "DecodeMetadata",
    "FlashInferAttnBackend",
    "IndicesUpdaterDecode",
    "PrefillMetadata",
    "WrapperDispatch",
    "should_use_tensor_core",
]


class FlashInferAttnBackend(ReqToTokenAttention):
    """FLASHINFER in pymllm's convention. Arguments and attributes are those of pymllm's documentation.

    Args:
        num_heads, num_kv_heads, head_dim: of every layer, on this device.
        kv_cache_dtype, q_dtype: of what the pool stores, and of queries and outputs.
        max_context_len: most tokens of one row.
        req_to_token: [max_reqs, max_context_len or more] i32.
        device: where it runs.
        max_req_pool_size: most rows of a step.
        sliding_window_size: keys to the left, self excluded, that windowed layers see; others see all.
        skip_prefill: serve steps of one token a row alone.
        kv_indptr_buf, kv_last_page_len_buf: filled at every step with the CSR of its tokens.
        init_new_workspace: have a float workspace alone, instead of the one that all on this device share.

    Raises:
        Unsupported: FlashInfer does not serve such layers; the reasons say why.
        ImportError: FlashInfer is not installed.
    """

    backend_name: ClassVar[str] = "FLASHINFER"

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, kv_cache_dtype: torch.dtype, q_dtype: torch.dtype,
        max_context_len: int, req_to_token: torch.Tensor, device: torch.device, max_req_pool_size: int,
        sliding_window_size: int | None = None, skip_prefill: bool = False, kv_indptr_buf: torch.Tensor | None = None,
        kv_last_page_len_buf: torch.Tensor | None = None, init_new_workspace: bool = False,
    ) -> None:  # fmt: skip
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.kv_cache_dtype, self.q_dtype = kv_cache_dtype, q_dtype
        self.max_context_len, self.req_to_token, self.device = max_context_len, req_to_token, device
        self.skip_prefill, self.sliding_window_size = skip_prefill, sliding_window_size
        self.dispatch_reason = None if sliding_window_size is None else WrapperDispatch.SLIDING_WINDOW
        self.decode_use_tensor_cores = should_use_tensor_core(kv_cache_dtype, num_heads, num_kv_heads)
        self.prefill_wrapper_ragged: Any = None
        self.prefill_wrappers_paged: list[Any] = []
        self.decode_wrappers: list[Any] = []
        self.indices_updater_decode = IndicesUpdaterDecode(self)
        self.forward_metadata: DecodeMetadata | PrefillMetadata | None = None
        self.decode_cuda_graph_metadata: dict[int, list[Any]] = {}  # wrappers by rows
        self.prefill_cuda_graph_metadata: dict[int, list[Any]] = {}
        self._given: dict[str, Any] = {
            "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "q_dtype": q_dtype,
            "kv_cache_dtype": kv_cache_dtype, "max_context_len": max_context_len, "req_to_token": req_to_token,
            "device": device, "max_req_pool_size": max_req_pool_size, "sliding_window_size": sliding_window_size,
            "skip_prefill": skip_prefill, "kv_indptr_buf": kv_indptr_buf, "kv_last_page_len_buf": kv_last_page_len_buf,
            "init_new_workspace": init_new_workspace, "kv_pool": None,
        }  # fmt: skip
        self._kinds: dict[LayerKind, AttentionLayer] = {}
        self._batch: ForwardBatchLike | None = None
        self._most_tokens, self._page_size = max(max_context_len, max_req_pool_size), 1
        self._has_encoder = False  # whose tokens lie in front of a decoder's, so that pages are of one token
        self._learn(*usual_layers((num_heads, num_kv_heads, head_dim), sliding_window_size))

    def _learn(self, *layers: AttentionLayer) -> None:
        """Plan for these kinds of layers too, all of them anew."""
        self._kinds |= {LayerKind.of(layer): layer for layer in layers}
        sized: TokenGraphs | None = getattr(self, "graphs", None)  # none of them captured
        super().__init__(
            self.backend_name, layers=list(self._kinds.values()), max_num_tokens=self._most_tokens,
            page_size=self._page_size, **self._given,
            options={"tensor_cores": "on" if self.decode_use_tensor_cores else "off"},
        )  # fmt: skip
        if sized is not None:
            self.init_cuda_graph_state(sized.max_bs, sized.max_num_tokens, sized.buffers.indices)

    def _learn_pages(self, batch: ForwardBatchLike) -> None:
        """Plan for pages as a batch's pool has them; a batch without one is of the last.

        Graphs keep theirs, and serve every pool whose pages these divide.
        """
        pool: KVPool | None = getattr(batch, "token_to_kv_pool", None)
        self._has_encoder |= getattr(batch, "encoder_lens", None) is not None
        before = self._page_size
        size = 1 if self._has_encoder else before if pool is None else page_size_of(pool)
        if size == before or (self._has_graphs and size % before == 0):
            return
        self._check_growth(f"the batch's pool has pages of {size} slots, and so far {before}")
        self._page_size = size
        try:
            self._learn()
        except BaseException:  # no memory: the next batch tries again
            self._page_size = before
            raise

    # Eager steps.

    def init_forward_metadata(self, forward_batch: ForwardBatchLike) -> None:
        """Plan a step, once before its layers run."""
        self.forward_metadata, self._batch = None, forward_batch
        self._learn_pages(forward_batch)
        if len(forward_batch.out_cache_loc) > self._most_tokens:
            self._check_growth(f"a step of {len(forward_batch.out_cache_loc)} tokens, and so far {self._most_tokens}")
            self._most_tokens = 2 * len(forward_batch.out_cache_loc)
            self._learn()
        super().init_forward_metadata(forward_batch)
        self._note(forward_batch)

    def _note(self, batch: ForwardBatchLike | None) -> None:
        """The planned step's wrappers, in pymllm's words."""
        if self.planned is not None:
            decodes, prefills = wrappers_of(self.planned)
            self.decode_wrappers = decodes or self.decode_wrappers
            self.prefill_wrappers_paged = prefills or self.prefill_wrappers_paged
            self.forward_metadata = metadata_of(self.planned.mode, decodes, prefills, batch)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer,
        forward_batch: ForwardBatchLike, save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One layer of the planned step, whatever its mode: [T, num_heads * v_head_dim]."""
        if unknown := sorted(name for name, value in kwargs.items() if value is not None):
            reasons = [Rejection(name, "given", "left out", "pymllm's own backend reads none.") for name in unknown]
            raise Unsupported(self.backend_name, reasons)
        if LayerKind.of(layer) not in self._kinds:
            self._check_growth(f"layer {layer.layer_id} is of a kind that no step had")
            self._learn(layer)
            if self._batch is not None:
                self.init_forward_metadata(self._batch)
        return super().forward(q, k, v, layer, forward_batch, save_kv_cache)

    @property
    def _has_graphs(self) -> bool:
        return self.graphs is not None and bool(self.graphs.captured)

    def _check_growth(self, why: str) -> None:
        if self._has_graphs:
            raise RuntimeError(f"{why}; graphs were captured, whose buffers never grow: run such a step eager before")

    # CUDA graphs, which are set up once eager steps have shown every kind of layer. pymllm has none with an encoder.

    def init_forward_metadata_capture_cuda_graph(  # type: ignore[override]
        self, bs: int, num_tokens: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, forward_mode: object
    ) -> None:
        """Plan the step that is captured next: decode, or verification of drafts."""
        self._batch = None
        super().init_forward_metadata_capture_cuda_graph(bs, num_tokens, req_pool_indices, seq_lens, forward_mode)
        self._note(None)
        if isinstance(self.forward_metadata, PrefillMetadata):
            self.prefill_cuda_graph_metadata[bs] = self.forward_metadata.prefill_wrappers
        elif self.forward_metadata is not None:
            self.decode_cuda_graph_metadata[bs] = self.forward_metadata.decode_wrappers

    def init_forward_metadata_replay_cuda_graph(  # type: ignore[override]
        self, bs: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_sum: int, forward_mode: object,
        seq_lens_cpu: HostLens | None,
    ) -> None:  # fmt: skip
        """Plan the step that is replayed next."""
        super().init_forward_metadata_replay_cuda_graph(
            bs, req_pool_indices, seq_lens, seq_lens_sum, forward_mode, seq_lens_cpu
        )
        self._note(None)

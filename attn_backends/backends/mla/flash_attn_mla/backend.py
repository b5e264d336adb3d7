"""FLASH_ATTN_MLA: decode by FlashAttention 3, whose `qv` adds a second product to the logits, and prefill by it too."""

from __future__ import annotations

import torch

from attn_backends.backends.mla.backend import MLABackend, reject_other_cache_dtype
from attn_backends.backends.mla.flash_attn_mla.impl import FlashAttnMLAImpl
from attn_backends.backends.mla.flash_attn_mla.state import FlashAttnMLAState
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport, Rejection, reject_newer_gpu
from attn_backends.spec import AttentionSpec, KVCacheSpec

_HALF = frozenset({torch.float16, torch.bfloat16})


class FlashAttnMLABackend(MLABackend):
    """Latent rows of 512 + 64 in half precision, on Hopper."""

    name = "FLASH_ATTN_MLA"
    impl_cls = FlashAttnMLAImpl
    state_cls = FlashAttnMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=_HALF,
            cache_dtypes=_HALF,
            # Pages that are whole blocks of its 64 keys are copied as they are, and what lies past a row's end is
            # multiplied by 0: NaN there would reach the output (flash-attention's issues 1745, 1974, 2374).
            page_sizes=frozenset({16, 32}),
            unequal_head_dims=True,
            lse=True,
            cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
            min_compute_capability=(9, 0),
            mla=True,
            kv_lora_ranks=frozenset({512}),
            qk_rope_head_dims=frozenset({64}),
        )

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        """Caches of another dtype than the queries', and GPUs after Hopper, too."""
        found = super().reject(spec, cache, device) + reject_other_cache_dtype(spec, _HALF)
        return found + reject_newer_gpu(device, 9, "9.x", "Its kernels are Hopper's: choose another backend.")

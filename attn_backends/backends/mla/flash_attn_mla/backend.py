"""FLASH_ATTN_MLA: decode by FlashAttention 3, whose `qv` adds a second product to the logits, and prefill by it too."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_backends.backends.mla.backend import OF_512_AND_64, MLABackend
from attn_backends.backends.mla.flash_attn_mla.impl import FlashAttnMLAImpl
from attn_backends.backends.mla.flash_attn_mla.state import FlashAttnMLAState
from attn_backends.interface.capabilities import Capabilities, Rejection, reject_newer_gpu, reject_other_half
from attn_backends.spec import AttentionSpec, KVCacheSpec


class FlashAttnMLABackend(MLABackend):
    """Latent rows of 512 + 64 in half precision, on Hopper."""

    name = "FLASH_ATTN_MLA"
    impl_cls = FlashAttnMLAImpl
    state_cls = FlashAttnMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        # Pages that are whole blocks of its 64 keys are copied as they are, and what lies past a row's end is
        # multiplied by 0: NaN there would reach the output (flash-attention's issues 1745, 1974, 2374).
        return replace(OF_512_AND_64, page_sizes=frozenset({16, 32}))

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        """Caches of another dtype than the queries', and GPUs after Hopper, too."""
        found = super().reject(spec, cache, device) + reject_other_half(spec, ", as the queries")
        return found + reject_newer_gpu(device, 9, "9.x", "Its kernels are Hopper's: choose another backend.")

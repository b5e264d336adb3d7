"""FLASHMLA: DeepSeek's kernel for decode on Hopper GPUs. Prefill is the family's own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from attn_backends.backends.mla.backend import OF_512_AND_64, MLABackend
from attn_backends.backends.mla.flashmla.impl import FlashMLAImpl
from attn_backends.backends.mla.flashmla.library import FP8
from attn_backends.backends.mla.flashmla.metadata import FlashMLAMetadata, FlashMLAMetadataBuilder
from attn_backends.backends.mla.flashmla.options import FlashMLAOptions
from attn_backends.backends.mla.flashmla.state import FlashMLAState
from attn_backends.interface.capabilities import HALF, Capabilities, Rejection, reject_newer_gpu, reject_other_half
from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec

# Queries times heads of a row take tiles of 64, and each a multiprocessor of the 78 and more that a Hopper GPU has:
# so many fit with 8 verified tokens.
MAX_HEADS = 512


class FlashMLABackend(MLABackend):
    """Latent rows of 512 + 64 in pages of 64 tokens, in the dtype of the queries, or in fp8 where the provider can."""

    name = "FLASHMLA"
    impl_cls = FlashMLAImpl
    metadata_cls = FlashMLAMetadata
    builder_cls = FlashMLAMetadataBuilder
    state_cls: ClassVar[type[FlashMLAState]] = FlashMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        return replace(OF_512_AND_64, cache_dtypes=HALF | {FP8}, fp8_queries=True, page_sizes=frozenset({64}))

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        """Its one kind of GPU, the dtype of the cache and the number of heads too."""
        return cls._reject(spec, cache, device) + cls._reject_fp8(spec, "auto")

    @classmethod
    def _reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        found = super().reject(spec, cache, device)
        if isinstance(spec, MLASpec):
            found += reject_other_half(spec, ", as the queries")
            if spec.num_qo_heads > MAX_HEADS:
                hint = "Choose a backend that takes so many heads, or split the heads over GPUs."
                found.append(Rejection("num_qo_heads", str(spec.num_qo_heads), f"1 to {MAX_HEADS}", hint))
        return found + reject_newer_gpu(device, 9, "9.0 (Hopper)", "Use a Hopper GPU or another backend.")

    @classmethod
    def _reject_fp8(cls, spec: AttentionSpec, provider: str) -> list[Rejection]:
        """Latents of fp8 where the provider has no kernel for them; one that does not import is told elsewhere."""
        if not isinstance(spec, MLASpec) or spec.cache_dtype is not FP8:
            return []
        try:
            kernels = cls.state_cls.load_kernels(provider)
        except ImportError:
            return []
        if kernels.fp8 is not None:
            return []
        hint = "Leave cache.dtype out, or set backend_options.provider to one that has it: vllm."
        return [Rejection("cache_dtype", f"float8_e4m3fn of {kernels.name}", "bfloat16, float16", hint)]

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: FlashMLAOptions | None
    ) -> list[Rejection]:
        """The provider that is named, where it does not import or lacks what the cache's dtype needs."""
        if options is None:
            return cls.reject(spec, cache, device)
        found = cls._reject(spec, cache, device) + cls._reject_fp8(spec, options.provider)
        if not found:
            try:
                cls.state_cls.load_kernels(options.provider)
            except ImportError as error:
                hint = "Install it, or set backend_options.provider to auto."
                found.append(Rejection("provider", f"{options.provider} ({error})", "one that imports", hint))
        return found

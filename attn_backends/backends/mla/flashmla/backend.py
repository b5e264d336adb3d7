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
        return cls.reject_set_up(spec, cache, device, None)

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: FlashMLAOptions | None
    ) -> list[Rejection]:
        """Its one kind of GPU, the dtype of the cache and the number of heads too; the provider where it lacks what the
        cache's dtype needs, and one that is named where it does not import: `auto`'s absence is told elsewhere."""
        found, is_fp8 = super().reject(spec, cache, device), isinstance(spec, MLASpec) and spec.cache_dtype is FP8
        if isinstance(spec, MLASpec):
            found += reject_other_half(spec, ", as the queries")
            if spec.num_qo_heads > MAX_HEADS:
                hint = "Choose a backend that takes so many heads, or split the heads over GPUs."
                found.append(Rejection("num_qo_heads", str(spec.num_qo_heads), f"1 to {MAX_HEADS}", hint))
        found += reject_newer_gpu(device, 9, "9.0 (Hopper)", "Use a Hopper GPU or another backend.")
        if not is_fp8 and (options is None or found):
            return found
        try:
            kernels = cls.state_cls.load_kernels((options or FlashMLAOptions()).provider)
        except ImportError as error:
            if options is not None and not found:
                hint = "Install it, or set backend_options.provider to auto."
                found.append(Rejection("provider", f"{options.provider} ({error})", "one that imports", hint))
            return found
        if is_fp8 and kernels.fp8 is None:
            hint = "Leave cache.dtype out, or set backend_options.provider to one that has it: vllm."
            found.append(Rejection("cache_dtype", f"float8_e4m3fn of {kernels.name}", "bfloat16, float16", hint))
        return found

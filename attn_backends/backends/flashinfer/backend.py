"""FLASHINFER: what it can do, and its five classes. Importing them does not import FlashInfer: its state does."""

from __future__ import annotations

import torch

from attn_backends.backends.flashinfer.impl import FlashInferImpl
from attn_backends.backends.flashinfer.kernel_choice import reject_options
from attn_backends.backends.flashinfer.library import FA3_HEAD_DIMS
from attn_backends.backends.flashinfer.metadata import FlashInferMetadata, FlashInferMetadataBuilder
from attn_backends.backends.flashinfer.options import FlashInferOptions
from attn_backends.backends.flashinfer.state import FlashInferState
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import HALF, Capabilities, CudaGraphSupport, Rejection, reject_other_half
from attn_backends.kernels.flashinfer_package import LOWEST_LOGIT
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, KVCacheSpec

FP8_NAMES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class FlashInferBackend(AttentionBackend):
    """Decode, paged and ragged prefill by FlashInfer's wrappers."""

    contract = (1, 1)
    name = "FLASHINFER"
    impl_cls = FlashInferImpl
    metadata_cls = FlashInferMetadata
    builder_cls = FlashInferMetadataBuilder
    state_cls = FlashInferState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=HALF,
            cache_dtypes=HALF | frozenset(FP8_DTYPES),
            head_dims=FA3_HEAD_DIMS,
            layouts=frozenset({"NHD", "HND"}),
            attention_types=frozenset(AttentionType),
            window=True,
            soft_cap=True,
            sinks=True,
            standard_alibi=True,
            rope=True,
            non_causal=True,
            lse=True,
            cascade=True,
            cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
            lowest_logit=LOWEST_LOGIT,
            min_compute_capability=(8, 0),
        )

    @staticmethod
    def get_fp8_dtype_for_flashinfer(kv_cache_dtype: str) -> torch.dtype:
        """The torch dtype of a cache that vLLM's configuration names.

        Raises:
            ValueError: the name is none of its fp8 ones.
        """
        if kv_cache_dtype not in FP8_NAMES:
            raise ValueError(f"Unrecognized FP8 dtype: {kv_cache_dtype}; known: {', '.join(FP8_NAMES)}")
        return FP8_NAMES[kv_cache_dtype]

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        hint = "Leave cache.dtype out, or set it to one of these."
        found = super().reject(spec, cache, device) + reject_other_half(spec, ", float8_e4m3fn, float8_e5m2", hint)
        if spec.pos_encoding_mode != "NONE" and spec.cache_dtype in FP8_DTYPES:
            hint = "Leave cache.dtype out, or rotate queries and keys before attention."
            found.append(Rejection("rope", f"{spec.pos_encoding_mode} over {spec.cache_dtype}", "16-bit caches", hint))
        if spec.alibi_slopes is not None and spec.logits_soft_cap is not None:  # its kernels scale logits twice then
            hint = "Choose a backend that honours both: attn-backends list."
            found.append(Rejection("alibi", "alibi_slopes with logits_soft_cap", "either one", hint))
        if spec.window_left >= 0 and not spec.causal:  # where it splits keys, it leaves out those behind the window's
            hint = "Choose a backend that honours both: attn-backends list."
            found.append(Rejection("window", "a window without a causal mask", "windows of causal layers", hint))
        return found

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: FlashInferOptions | None
    ) -> list[Rejection]:
        """Kernels that options name and that do not serve such a layer, or not here."""
        found = cls.reject(spec, cache, device)
        return found or ([] if options is None else reject_options(spec, torch.device(device), options))

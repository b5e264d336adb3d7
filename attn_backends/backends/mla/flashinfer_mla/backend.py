"""FLASHINFER_MLA: decode by FlashInfer's MLA kernels (package `flashinfer-python`), planned on the host. Prefill is the
family's own."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_backends.backends.mla.backend import OF_512_AND_64, MLABackend
from attn_backends.backends.mla.flashinfer_mla.impl import FlashInferMLAImpl
from attn_backends.backends.mla.flashinfer_mla.metadata import FlashInferMLAMetadataBuilder
from attn_backends.backends.mla.flashinfer_mla.options import FlashInferMLAOptions
from attn_backends.backends.mla.flashinfer_mla.state import FlashInferMLAState
from attn_backends.interface.capabilities import Capabilities, Rejection, reject_other_half
from attn_backends.kernels.flashinfer_package import LOWEST_LOGIT
from attn_backends.machine import is_hopper
from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec


class FlashInferMLABackend(MLABackend):
    """Latent rows of 512 + 64 in pages of any size, in the dtype of the queries."""

    name = "FLASHINFER_MLA"
    impl_cls = FlashInferMLAImpl
    builder_cls = FlashInferMLAMetadataBuilder
    state_cls = FlashInferMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        return replace(OF_512_AND_64, lowest_logit=LOWEST_LOGIT, min_compute_capability=(8, 0))

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        """The dtype of the cache too."""
        found = super().reject(spec, cache, device)
        return found + (reject_other_half(spec, ", as the queries") if isinstance(spec, MLASpec) else [])

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: FlashInferMLAOptions | None
    ) -> list[Rejection]:
        """Its kernels for Hopper, elsewhere."""
        found = cls.reject(spec, cache, device)
        if not found and options is not None and options.kernels == "fa3" and not is_hopper(torch.device(device)):
            hint = "Set backend_options.kernels to auto."
            found.append(Rejection("kernels", "fa3 on another GPU than Hopper", "fa2; on Hopper fa3", hint))
        return found

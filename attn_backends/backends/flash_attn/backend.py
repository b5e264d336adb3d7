"""FLASH_ATTN: what it can do, and its five classes. Importing them imports no kernel library: providers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from attn_backends.backends.flash_attn.impl import FlashAttnImpl
from attn_backends.backends.flash_attn.metadata import FlashAttnMetadata, FlashAttnMetadataBuilder
from attn_backends.backends.flash_attn.options import FlashAttnOptions
from attn_backends.backends.flash_attn.provider import Provider, choose, together
from attn_backends.backends.flash_attn.state import PROVIDERS, FlashAttnState
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import Capabilities, Rejection, Unsupported, mismatches
from attn_backends.spec import AttentionSpec, KVCacheSpec


class FlashAttnBackend(AttentionBackend):
    """Decode, prefill and mixed batches by FlashAttention, whose lengths and page tables are on the device."""

    contract = (1, 1)
    name = "FLASH_ATTN"
    impl_cls = FlashAttnImpl
    metadata_cls = FlashAttnMetadata
    builder_cls = FlashAttnMetadataBuilder
    state_cls = FlashAttnState
    providers: ClassVar[Sequence[Provider]] = PROVIDERS  # others in tests

    @staticmethod
    def capabilities() -> Capabilities:
        """What the providers that are here can do together, or all of them where none is. `reject` refuses what no
        single one of them serves, with each one's reasons."""
        here = [provider for provider in PROVIDERS if provider.missing() is None]
        return together([provider.capabilities() for provider in here or PROVIDERS])

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        return cls.reject_set_up(spec, cache, device, None)

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: FlashAttnOptions | None
    ) -> list[Rejection]:
        """What the provider refuses that is named, or all of them."""
        device, wanted = torch.device(device), (options or FlashAttnOptions()).provider
        found = mismatches(together([provider.declared() for provider in cls.providers]), spec, cache, device)
        elsewhere = [rejection for rejection in found if rejection.code in ("device", "mla")]
        if elsewhere:  # whatever provider is here
            return elsewhere
        try:
            choose(cls.providers, spec, cache, device, wanted)
        except Unsupported as refusal:
            return list(refusal.rejections)
        return []

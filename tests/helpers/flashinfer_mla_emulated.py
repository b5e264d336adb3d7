"""FLASHINFER_MLA over emulated wrappers, on a CPU: registered as FLASHINFER_MLA_EMULATED by whoever imports this."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_backends.backends.mla.flashinfer_mla.backend import (
    FlashInferMLABackend,
    FlashInferMLAOptions,
    FlashInferMLAState,
)
from attn_backends.backends.mla.flashinfer_mla.plan import MLALibrary
from attn_backends.interface.capabilities import Capabilities
from attn_backends.registry import register_backend
from tests.emulated import flashinfer


class EmulatedState(FlashInferMLAState):
    make_library = staticmethod(lambda: MLALibrary(flashinfer))


@register_backend("FLASHINFER_MLA_EMULATED", options=FlashInferMLAOptions)
class EmulatedFlashInferMLA(FlashInferMLABackend):
    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_MLA_EMULATED"

    @staticmethod
    def get_state_cls() -> Any:
        return EmulatedState

    @staticmethod
    def capabilities() -> Capabilities:
        return replace(FlashInferMLABackend.capabilities(), devices=flashinfer.DEVICES)

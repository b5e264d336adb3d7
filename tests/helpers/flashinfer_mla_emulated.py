"""FLASHINFER_MLA over emulated wrappers, on a CPU: registered as FLASHINFER_MLA_EMULATED by whoever imports this."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.backends.mla.flashinfer_mla.backend import FlashInferMLABackend
from attn_backends.backends.mla.flashinfer_mla.options import FlashInferMLAOptions
from attn_backends.backends.mla.flashinfer_mla.plan import MLALibrary
from attn_backends.backends.mla.flashinfer_mla.state import FlashInferMLAState
from attn_backends.interface.capabilities import Capabilities
from attn_backends.registry import register_backend
from tests.emulated import flashinfer


class EmulatedState(FlashInferMLAState):
    make_library = staticmethod(lambda: MLALibrary(flashinfer))


@register_backend("FLASHINFER_MLA_EMULATED", options=FlashInferMLAOptions)
class EmulatedFlashInferMLA(FlashInferMLABackend):
    name = "FLASHINFER_MLA_EMULATED"
    state_cls = EmulatedState

    @staticmethod
    def capabilities() -> Capabilities:
        return replace(FlashInferMLABackend.capabilities(), devices=flashinfer.DEVICES)

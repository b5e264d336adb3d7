"""FLASHMLA over emulated kernels, on a CPU: both generations, registered by whoever imports this."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.backends.mla.flashmla.backend import FlashMLABackend
from attn_backends.backends.mla.flashmla.library import Kernels
from attn_backends.backends.mla.flashmla.options import FlashMLAOptions
from attn_backends.backends.mla.flashmla.state import FlashMLAState
from attn_backends.interface.capabilities import Capabilities
from attn_backends.registry import register_backend
from tests.emulated import flashmla, flashmla_older


class NewerState(FlashMLAState):
    load_kernels = staticmethod(lambda provider: Kernels(flashmla))


class OlderState(FlashMLAState):
    load_kernels = staticmethod(lambda provider: Kernels(flashmla_older))


class _Emulated(FlashMLABackend):
    @staticmethod
    def capabilities() -> Capabilities:
        return replace(FlashMLABackend.capabilities(), devices=flashmla.DEVICES)


@register_backend("FLASHMLA_EMULATED", options=FlashMLAOptions)
class EmulatedFlashMLA(_Emulated):
    name = "FLASHMLA_EMULATED"
    state_cls = NewerState


@register_backend("FLASHMLA_EMULATED_OLDER", options=FlashMLAOptions)
class EmulatedOlderFlashMLA(_Emulated):
    name = "FLASHMLA_EMULATED_OLDER"
    state_cls = OlderState

"""FLASHINFER over emulated wrappers, on a CPU: registered as FLASHINFER_EMULATED by whoever imports this."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_backends.backends.flashinfer.backend import FlashInferBackend
from attn_backends.backends.flashinfer.library import Library
from attn_backends.backends.flashinfer.options import FlashInferOptions
from attn_backends.backends.flashinfer.state import FlashInferState
from attn_backends.interface.capabilities import Capabilities
from attn_backends.registry import register_backend
from tests.emulated import flashinfer


class EmulatedLibrary(Library):
    def __init__(self, num_sms: int, module: Any = flashinfer) -> None:
        super().__init__(num_sms, module)


class EmulatedState(FlashInferState):
    make_library = EmulatedLibrary


@register_backend("FLASHINFER_EMULATED", options=FlashInferOptions)
class EmulatedFlashInfer(FlashInferBackend):
    name = "FLASHINFER_EMULATED"
    state_cls = EmulatedState

    @staticmethod
    def capabilities() -> Capabilities:
        return replace(FlashInferBackend.capabilities(), devices=flashinfer.DEVICES)

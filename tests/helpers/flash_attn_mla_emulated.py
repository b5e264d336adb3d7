"""FLASH_ATTN_MLA over emulated kernels, on a CPU: both builds, registered by whoever imports this."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.backends.mla.flash_attn_mla.backend import FlashAttnMLABackend
from attn_backends.backends.mla.flash_attn_mla.library import InterfaceKernels, VllmKernels
from attn_backends.backends.mla.flash_attn_mla.options import FlashAttnMLAOptions
from attn_backends.backends.mla.flash_attn_mla.state import FlashAttnMLAState
from attn_backends.interface.capabilities import Capabilities
from attn_backends.registry import register_backend
from tests.emulated import flash_attn_mla


class VllmState(FlashAttnMLAState):
    load_kernels = staticmethod(lambda: VllmKernels(flash_attn_mla))


class InterfaceState(FlashAttnMLAState):
    load_kernels = staticmethod(lambda: InterfaceKernels(flash_attn_mla.AUTHORS))


@register_backend("FLASH_ATTN_MLA_EMULATED", options=FlashAttnMLAOptions)
class EmulatedFlashAttnMLA(FlashAttnMLABackend):
    name = "FLASH_ATTN_MLA_EMULATED"
    state_cls = VllmState

    @staticmethod
    def capabilities() -> Capabilities:
        return replace(FlashAttnMLABackend.capabilities(), devices=frozenset({"cpu", "cuda"}))


@register_backend("FLASH_ATTN_MLA_EMULATED_INTERFACE", options=FlashAttnMLAOptions)
class EmulatedInterface(EmulatedFlashAttnMLA):
    name = "FLASH_ATTN_MLA_EMULATED_INTERFACE"
    state_cls = InterfaceState

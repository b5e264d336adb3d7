"""FLASH_ATTN_MLA over emulated kernels, on a CPU: both builds, registered by whoever imports this."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.backends.mla.flash_attn_mla.backend import (
    FlashAttnMLABackend,
    FlashAttnMLAOptions,
    FlashAttnMLAState,
)
from attn_backends.backends.mla.flash_attn_mla.library import InterfaceKernels, VllmKernels
from attn_backends.interface.capabilities import Capabilities
from attn_backends.registry import register_backend
from tests.emulated import flash_attn_mla


class VllmState(FlashAttnMLAState):
    load_kernels = staticmethod(lambda: VllmKernels(flash_attn_mla))


class InterfaceState(FlashAttnMLAState):
    load_kernels = staticmethod(lambda: InterfaceKernels(flash_attn_mla.AUTHORS))


@register_backend("FLASH_ATTN_MLA_EMULATED", options=FlashAttnMLAOptions)
class EmulatedFlashAttnMLA(FlashAttnMLABackend):
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA_EMULATED"

    @staticmethod
    def get_state_cls() -> type[FlashAttnMLAState]:
        return VllmState

    @staticmethod
    def capabilities() -> Capabilities:
        return replace(FlashAttnMLABackend.capabilities(), devices=frozenset({"cpu", "cuda"}))


@register_backend("FLASH_ATTN_MLA_EMULATED_INTERFACE", options=FlashAttnMLAOptions)
class EmulatedInterface(EmulatedFlashAttnMLA):
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA_EMULATED_INTERFACE"

    @staticmethod
    def get_state_cls() -> type[FlashAttnMLAState]:
        return InterfaceState

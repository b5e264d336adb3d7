"""FLASH_ATTN with one provider: over emulated kernels on a CPU, and over the real ones. Importing it registers all.

FLASH_ATTN_<PROVIDER>_EMULATED and FLASH_ATTN_<PROVIDER>, with the capabilities of that provider alone, for the kit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from attn_backends.backends.flash_attn.backend import FlashAttnBackend
from attn_backends.backends.flash_attn.built import Kernel, Kernels
from attn_backends.backends.flash_attn.fa2 import FlashAttn2, VllmFa2
from attn_backends.backends.flash_attn.fa3 import FlashAttnInterface, VllmFa3
from attn_backends.backends.flash_attn.fa4 import FlashAttn4
from attn_backends.backends.flash_attn.options import FlashAttnOptions
from attn_backends.backends.flash_attn.provider import Provider
from attn_backends.backends.flash_attn.state import FlashAttnState
from attn_backends.interface.capabilities import Capabilities
from attn_backends.registry import register_backend
from tests.emulated import flash_attn, flash_attn_4, flash_attn_interface, vllm_flash_attn

MODULES = {
    FlashAttn2: flash_attn.MODULES,
    FlashAttnInterface: flash_attn_interface.MODULES,
    VllmFa2: vllm_flash_attn.MODULES,
    VllmFa3: vllm_flash_attn.MODULES,
    FlashAttn4: flash_attn_4.MODULES,
}


def emulated(kind: type[Provider], built: Kernels | None = None) -> Provider:
    """A provider over emulated kernels, on any device; `built` plays a build that leaves others out."""

    class Emulated(kind):  # type: ignore[misc,valid-type]
        def declared(self) -> Capabilities:
            return replace(super().declared(), devices=flash_attn.DEVICES)

        def attend(self, given: Any, call: Any, layer: Any, want_lse: bool) -> Any:
            """The kernels that were not built are not run."""
            asked = Kernel(given.keys.dtype, self.kernel_dim(given.query.shape[-1]) or 0, layer.soft_cap > 0)
            if built is not None and asked not in built:
                raise RuntimeError(f"CUDA error: an illegal instruction was encountered ({asked})")
            return super().attend(given, call, layer, want_lse)

    made: Provider = Emulated(MODULES[kind], built)
    return made


def register(name: str, provider: Provider) -> None:
    """FLASH_ATTN with this provider alone."""

    class State(FlashAttnState):
        providers: ClassVar[Sequence[Provider]] = (provider,)

    class Backend(FlashAttnBackend):
        providers: ClassVar[Sequence[Provider]] = (provider,)

        state_cls = State

        @staticmethod
        def capabilities() -> Capabilities:
            return provider.capabilities()

    Backend.name = name
    Backend.__qualname__ = name  # pickle finds it by that
    globals()[name] = Backend
    register_backend(name, Backend, options=FlashAttnOptions)


for each in MODULES:
    register(f"FLASH_ATTN_{each.name.upper()}_EMULATED", emulated(each))
register("FLASH_ATTN_FLASH_ATTN", FlashAttn2())
register("FLASH_ATTN_VLLM_FA3", VllmFa3())
register("FLASH_ATTN_FLASH_ATTN_4", FlashAttn4())

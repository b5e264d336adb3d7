"""Options of FLASHMLA."""

from __future__ import annotations

from typing import Literal

from attn_backends.backends.mla.options import MLAOptions


class FlashMLAOptions(MLAOptions):
    """The `backend_options` of FLASHMLA."""

    provider: Literal["auto", "flash_mla", "vllm", "sgl_kernel"] = "auto"
    """Who brings the kernels: DeepSeek's package, vLLM's copy (vllm.third_party.flashmla) or SGLang's
    (sgl_kernel.flash_mla). `auto`: the first of them that imports."""

"""Options of FLASHINFER_MLA."""

from __future__ import annotations

from typing import Literal

from attn_backends.backends.mla.options import MLAOptions


class FlashInferMLAOptions(MLAOptions):
    """The `backend_options` of FLASHINFER_MLA."""

    kernels: Literal["auto", "fa2", "fa3"] = "auto"
    """Which of FlashInfer's kernels decode. `auto`: fa3 on a Hopper GPU, else fa2."""

"""The builder of FLASHINFER_MLA."""

from __future__ import annotations

from attn_backends.backends.mla.metadata import MLAMetadataBuilder


class FlashInferMLAMetadataBuilder(MLAMetadataBuilder):
    """Kernels see the lengths that were planned on the host, and no others."""

    needs_exact_lengths = True

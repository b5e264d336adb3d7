"""The builder of FLASHINFER_MLA."""

from __future__ import annotations

from attn_backends.backends.mla.metadata import MLAMetadata, MLAMetadataBuilder
from attn_backends.batch.common import CommonAttentionMetadata


class FlashInferMLAMetadataBuilder(MLAMetadataBuilder):
    """Kernels see the lengths that were planned on the host, and no others."""

    needs_exact_lengths = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:
        self.check_lengths(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

"""Which batches graphs of TORCH_MLA serve."""

from __future__ import annotations

from attn_backends.backends.mla.metadata import MLAMetadataBuilder
from attn_backends.backends.mla.torch_mla.options import graph_max_seq_len
from attn_backends.batch.common import CommonAttentionMetadata


class TorchMLAMetadataBuilder(MLAMetadataBuilder):
    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Decodes alone, with no row longer than graphs gather."""
        fits = common_attn_metadata.max_seq_len <= graph_max_seq_len(self.options, self.limits)
        return fits and super().can_run_in_cudagraph(common_attn_metadata)

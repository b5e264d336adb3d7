"""A batch as FLASHMLA takes it: the family's, whose decode rows FlashMLA schedules."""

from __future__ import annotations

from dataclasses import dataclass

from attn_backends.backends.mla.metadata import MLAMetadata, MLAMetadataBuilder


@dataclass(frozen=True)
class FlashMLAMetadata(MLAMetadata):
    """Rows of one step. What the tile scheduler makes of them is in the step that `begin_forward` returns."""


class FlashMLAMetadataBuilder(MLAMetadataBuilder):
    """The family's builder. The scheduler is asked about `num_q_heads` heads of each query token, over one KV head."""

    metadata_cls = FlashMLAMetadata

    @property
    def num_q_heads(self) -> int:
        """Query heads, under vLLM's name."""
        return self.group.spec.num_qo_heads

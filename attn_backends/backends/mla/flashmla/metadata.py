"""A batch as FLASHMLA takes it: the family's, whose decode rows FlashMLA schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_backends.backends.mla.metadata import MLAMetadata, MLAMetadataBuilder


@dataclass(frozen=True)
class FlashMLAMetadata(MLAMetadata):
    """Rows of one step. What the tile scheduler makes of them is in the step that `begin_forward` returns."""


class FlashMLAMetadataBuilder(MLAMetadataBuilder):
    """The family's builder. The scheduler is asked about `num_q_heads` heads of each query token, over one KV head."""

    metadata_cls = FlashMLAMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_q_heads: int = self.group.spec.num_qo_heads

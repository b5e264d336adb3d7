"""A batch as rows whose lengths and pages the kernels read on the device. No shape of it depends on host lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.backends.flash_attn.call import HostLens, Rows
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.order import (
    SwappableRows,
    leading_decodes,
    reorder_batch_to_split_decodes_and_prefills,
)
from attn_backends.batch.views import prefix_to_share
from attn_backends.interface import AttentionMetadata, AttentionMetadataBuilder
from attn_backends.spec import AttentionType

# A shared prefix is attended once for all rows if that saves reading this many bytes. FLASHINFER's figure, measured by
# benchmarks/rules/cascade.py: the kernels read as fast. There is none of these kernels' own yet.
CASCADE_MIN_BYTES = 192 << 20


@dataclass(frozen=True)
class FlashAttnMetadata(AttentionMetadata):
    """Rows of one step, decodes (one query token) first."""

    fast_build: bool  # no schedule is made for it
    rows: Rows  # all rows with tokens of their own; padding only in a graph
    prefix: Rows | None  # the shared prefix as one row, its queries the tokens of all decode rows

    def decode_fields(self) -> dict[str, Any]:
        tokens, longest = slice(0, self.num_decode_tokens), self.rows.max_query_len if self.for_graph else 1
        return {"rows": self.rows.part(0, self.num_decodes, tokens, longest)}

    def prefill_fields(self) -> dict[str, Any]:
        tokens = slice(self.num_decode_tokens, self.rows.num_tokens)
        rows = self.rows.part(self.num_decodes, self.rows.num_rows, tokens, self.rows.max_query_len)
        return {"rows": rows, "prefix": None}


class FlashAttnMetadataBuilder(AttentionMetadataBuilder[FlashAttnMetadata]):
    """Lengths on the host may be upper bounds: kernels read those on the device."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttnMetadata:
        common = common_attn_metadata
        self.check_batch(common)
        if common.for_graph:
            # All rows are decodes, padding included: a padded row has no keys.
            if not self.can_run_in_cudagraph(common):
                raise ValueError("graphs of FLASH_ATTN serve attention over cached keys, of rows of equal query "
                                 "lengths: run this batch eager")  # fmt: skip
            rows = _rows(common, True, self.group.spec.attention_type)
            return graph_metadata(self.group.index, common.slot_mapping, rows)
        spec, actual, prefix_len, prefix = self.group.spec, common.num_actual_reqs, 0, None
        cached = not common.is_profile_run and spec.attention_type is not AttentionType.ENCODER
        num_decodes = leading_decodes(common) if cached else 0
        if common_prefix_len:
            prefix_len = prefix_to_share(common, common_prefix_len, spec, num_decodes, CASCADE_MIN_BYTES)
        if prefix_len:
            # The shared prefix is one row of all decode rows' tokens.
            host = torch.tensor([0, num_decodes, prefix_len], dtype=torch.int32, device="cpu")
            on_device = host.to(common.page_table.device, non_blocking=True)
            pages = common.page_table[:1, : prefix_len // common.page_size]
            prefix = Rows(1, num_decodes, num_decodes, prefix_len, on_device[:2], on_device[2:], pages)
        rows = _rows(common, cached, spec.attention_type)
        return FlashAttnMetadata.of_batch(
            common,
            self.group.index,
            num_decodes,
            common_prefix_len=prefix_len,
            fast_build=fast_build,
            rows=rows.part(0, actual, slice(0, common.num_actual_tokens), common.max_query_len),
            prefix=prefix,
        )

    def reorder_batch(self, batch: SwappableRows, query_lens: Sequence[int]) -> bool:
        """Decodes first: FlashAttention 2 splits keys for them alone, and a shared prefix is for them."""
        return reorder_batch_to_split_decodes_and_prefills(batch, query_lens)

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Attention over cached keys, of rows of equal query lengths."""
        return self.reads_cached_keys(common_attn_metadata) and not common_attn_metadata.is_mixed


def graph_metadata(group_index: int, slot_mapping: torch.Tensor, rows: Rows) -> FlashAttnMetadata:
    """Metadata whose rows all count as decodes, of one query token or of several."""
    return FlashAttnMetadata.of_graph(
        group_index, slot_mapping, rows.num_rows, rows.num_tokens, fast_build=False, rows=rows, prefix=None
    )


def _rows(common: CommonAttentionMetadata, cached: bool, attention_type: AttentionType) -> Rows:
    """All rows of a batch; keys in their pages, or those that the step brings."""
    is_cross = attention_type is AttentionType.CROSS
    table = common.page_table if cached else None
    if is_cross and table is not None:  # a row without keys may be lent one, and its table holds anything
        table = table.masked_fill((common.seq_lens == 0)[:, None], 0)
    are_exact = not common.seq_lens_are_upper_bounds
    on_host = None if common.for_graph else HostLens(common.query_start_loc_cpu, common.seq_lens_cpu, are_exact)
    return Rows(
        common.num_reqs,
        common.num_tokens,
        common.max_query_len,
        max(1, common.max_seq_len),
        common.query_start_loc,
        common.seq_lens,
        table,
        common.for_graph or is_cross,
        on_host,
    )

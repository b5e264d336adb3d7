"""NAIVE: paged attention as plain loops, for a CPU: every row, every new token, every page.

A third party's: it uses attn_backends' public names alone. What it does not declare, attn_backends refuses for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor

import attn_backends as ab


class NaiveOptions(BaseModel, frozen=True, extra="forbid"):
    """The `backend_options` of NAIVE."""

    accumulate: Literal["float32", "float64"] = "float64"  # sums are kept in this, or in the layer's dtype if wider


class Row(NamedTuple):
    first_token: int  # in the batch
    query_len: int
    context_len: int
    pages: tuple[int, ...]  # none in a profile run: the keys are this step's own


@dataclass(frozen=True)
class NaiveMetadata(ab.AttentionMetadata):
    rows: tuple[Row, ...]  # without padding

    def decode_fields(self) -> dict[str, Any]:
        return {"rows": self.rows[: self.num_decodes]}

    def prefill_fields(self) -> dict[str, Any]:
        first, rows = self.num_decode_tokens, self.rows[self.num_decodes :]
        return {"rows": tuple(row._replace(first_token=row.first_token - first) for row in rows)}


class NaiveMetadataBuilder(ab.AttentionMetadataBuilder[NaiveMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: ab.CommonAttentionMetadata, fast_build: bool = False
    ) -> NaiveMetadata:
        common = common_attn_metadata
        starts, lens = common.query_start_loc_cpu.tolist(), common.query_lens_cpu.tolist()
        contexts, tables = common.context_lens_cpu.tolist(), common.page_table.tolist()
        rows = tuple(Row(starts[i], lens[i], contexts[i], tuple(tables[i])) for i in range(common.num_actual_reqs))
        num_decodes = next((i for i, row in enumerate(rows) if row.query_len > self.decode_threshold), len(rows))
        return NaiveMetadata.of_batch(
            common, self.group.index, num_decodes, num_decode_tokens=starts[num_decodes], rows=rows
        )


class NaiveState(ab.AttentionState[NaiveMetadata]):
    backend_name = "NAIVE"

    def begin_forward(self, metadata: NaiveMetadata) -> ab.AttentionStep[NaiveMetadata]:
        return ab.AttentionStep(metadata)  # plain loops need no plan


class NaiveImpl(ab.AttentionImpl[ab.AttentionStep[NaiveMetadata]]):
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: ab.KVCache | None,
        step: ab.AttentionStep[NaiveMetadata], output: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        for row in step.metadata.rows:
            for token in range(row.first_token, row.first_token + row.query_len):
                output[token], token_lse = self._attend(query[token], self._pages(row, token, key, value, kv_cache))
                if lse is not None:
                    lse[token] = token_lse

    def _pages(
        self, row: Row, token: int, key: Tensor | None, value: Tensor | None, kv_cache: ab.KVCache | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The keys and values that a token of a row sees, page by page: [1..page_size, num_kv_heads, head_dim]."""
        if row.pages and kv_cache is not None:
            num_keys = row.context_len + token - row.first_token + 1
            for page, first in zip(row.pages, range(0, num_keys, self.cache.page_size), strict=False):
                used = slice(0, num_keys - first)  # never a page's tail: what lies there may be anything
                yield kv_cache.key[page, used] * self.k_scale, kv_cache.value[page, used] * self.v_scale
        elif key is not None and value is not None:
            yield key[row.first_token : token + 1], value[row.first_token : token + 1]
        else:
            raise ValueError("this step has neither a cache nor keys: pass kv_cache, or key and value")

    def _attend(self, query: Tensor, pages: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """One token's output and LSE, by the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867)."""
        wide = torch.promote_types(query.dtype, getattr(torch, (self.options or NaiveOptions()).accumulate))
        query = query.to(wide).view(self.spec.num_kv_heads, self.spec.group_size, -1) * self.spec.scale
        out, lse = torch.zeros_like(query), query.new_full((*query.shape[:2], 1), -torch.inf)  # of the pages so far
        for key, value in pages:
            logits = torch.einsum("hgd,thd->hgt", query, key.to(wide))
            total = torch.logaddexp(lse, logits.logsumexp(-1, keepdim=True))
            out = out * (lse - total).exp() + torch.einsum("hgt,thd->hgd", (logits - total).exp(), value.to(wide))
            lse = total
        return out.flatten(0, 1), lse.flatten()


@ab.register_backend("NAIVE", options=NaiveOptions)  # completes the entry point's row, which names the class alone
class NaiveBackend(ab.AttentionBackend):
    name, impl_cls, metadata_cls = "NAIVE", NaiveImpl, NaiveMetadata
    builder_cls, state_cls = NaiveMetadataBuilder, NaiveState

    @staticmethod
    def capabilities() -> ab.Capabilities:
        floats = frozenset({torch.float32, torch.float64})
        return ab.Capabilities(devices=frozenset({"cpu"}), dtypes=floats, cache_dtypes=floats, lse=True)

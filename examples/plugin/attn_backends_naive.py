"""NAIVE, a third party's: paged attention as plain loops, for a CPU, every row, every new token. It uses attn_backends'
public names alone. What it does not declare, attn_backends refuses for it."""

from __future__ import annotations

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


@dataclass(frozen=True)
class NaiveMetadata(ab.AttentionMetadata):
    rows: tuple[Row, ...]  # without padding
    page_table: Tensor  # [rows, max_pages] i32; no columns in a profile run: the keys are this step's own

    def decode_fields(self) -> dict[str, Any]:
        return {"rows": self.rows[: self.num_decodes], "page_table": self.page_table[: self.num_decodes]}

    def prefill_fields(self) -> dict[str, Any]:
        first, rows = self.num_decode_tokens, self.rows[self.num_decodes :]
        rows = tuple(row._replace(first_token=row.first_token - first) for row in rows)
        return {"rows": rows, "page_table": self.page_table[self.num_decodes :]}


class NaiveMetadataBuilder(ab.AttentionMetadataBuilder[NaiveMetadata]):
    needs_exact_lengths = True  # loops run over lengths of the host

    def build(
        self, common_prefix_len: int, common_attn_metadata: ab.CommonAttentionMetadata, fast_build: bool = False
    ) -> NaiveMetadata:
        self.check_batch(common := common_attn_metadata)
        starts, live = common.query_start_loc_cpu.tolist(), common.num_actual_reqs
        rows = tuple(map(Row, starts[:live], common.query_lens_cpu.tolist(), common.context_lens_cpu.tolist()))
        num_decodes = next((i for i, row in enumerate(rows) if row.query_len > self.decode_threshold), live)
        return NaiveMetadata.of_batch(common, self.group.index, num_decodes, num_decode_tokens=starts[num_decodes],
                                      rows=rows, page_table=common.page_table[:live])  # fmt: skip


class NaiveState(ab.AttentionState[NaiveMetadata]):
    backend_name = "NAIVE"  # plain loops need no plan, and have no graphs


class NaiveImpl(ab.AttentionImpl[ab.AttentionStep[NaiveMetadata]]):
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: ab.KVCache | None,
        step: ab.AttentionStep[NaiveMetadata], output: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        """New keys are in the cache by now, padded tokens are zeros, and every tensor has the shape it should have."""
        for row, pages in zip(step.metadata.rows, step.metadata.page_table, strict=True):
            pages = pages[: -(-(row.context_len + row.query_len) // self.cache.page_size)]  # no telling what is behind
            for i, token in enumerate(range(row.first_token, row.first_token + row.query_len)):
                if len(pages) and kv_cache is not None:  # never a page's tail: what lies there may be anything
                    keys, values = (cached[pages].flatten(0, 1)[: row.context_len + i + 1] for cached in kv_cache)
                    keys, values = keys.double() * self.k_scale, values.double() * self.v_scale
                elif key is not None and value is not None:
                    keys, values = (new[row.first_token : token + 1] for new in (key, value))
                else:
                    raise ValueError("this step has neither a cache nor keys: pass kv_cache, or key and value")
                output[token], token_lse = self._attend(query[token], keys, values)
                if lse is not None:
                    lse[token] = token_lse

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One token's output and LSE ("Attention Is All You Need", equation 1)."""
        wide = torch.promote_types(query.dtype, getattr(torch, (self.options or NaiveOptions()).accumulate))
        query = query.to(wide).view(self.spec.num_kv_heads, self.spec.group_size, -1) * self.spec.scale
        logits = torch.einsum("hgd,thd->hgt", query, keys.to(wide))
        lse = logits.logsumexp(-1, keepdim=True)
        out = torch.einsum("hgt,thd->hgd", (logits - lse).exp(), values.to(wide))
        return out.flatten(0, 1), lse.flatten()


@ab.register_backend("NAIVE", options=NaiveOptions)  # completes the entry point's row, which names the class alone
class NaiveBackend(ab.AttentionBackend):
    contract, name = (1, 0), "NAIVE"  # of attn_backends that it was written for: docs/contract.md
    impl_cls, metadata_cls, builder_cls, state_cls = NaiveImpl, NaiveMetadata, NaiveMetadataBuilder, NaiveState

    @staticmethod
    def capabilities() -> ab.Capabilities:
        floats = frozenset({torch.float32, torch.float64})
        return ab.Capabilities(devices=frozenset({"cpu"}), dtypes=floats, cache_dtypes=floats, unequal_head_dims=True,
                               layouts=frozenset({"NHD", "HND"}), any_scale=True, lse=True)  # fmt: skip

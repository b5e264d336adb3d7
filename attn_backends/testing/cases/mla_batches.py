"""Batches of MLA layers: rows of latent parts, one scale, and the weight that expands them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_backends.spec import MLASpec
from attn_backends.testing.cases.batches import Batch, Row, stored
from attn_backends.testing.reference import reference_mla


@dataclass(frozen=True)
class MLABatch(Batch):
    """`Row.key` holds latent rows [seq_len, kv_lora_rank], `Row.value` shared keys [seq_len, qk_rope_head_dim]."""

    spec: MLASpec
    kv_b_proj: torch.Tensor = field(
        kw_only=True
    )  # [num_qo_heads * (qk_nope_head_dim + head_dim_vo), kv_lora_rank] of spec.dtype

    @property
    def weights(self) -> dict[str, Any]:
        return {**super().weights, "kv_b_proj": self.kv_b_proj}

    def attended(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        if self.pool is None:
            return row.key.double(), row.value.double()
        rows, _ = self._stored(row)
        latent, rope_key = (rows.double() * self.k_scale).split([row.key.shape[1], row.value.shape[1]], dim=1)
        return latent, rope_key

    def multiplied(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed queries, and latent rows as keys of one head."""
        by_head = self.kv_b_proj.double().view(self.spec.num_qo_heads, -1, self.spec.kv_lora_rank)
        nope, rope = row.query.double().split([self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim], dim=2)
        absorbed = torch.einsum("thd,hdr->thr", nope, by_head[:, : self.spec.qk_nope_head_dim])
        return torch.cat([absorbed, rope], dim=2), torch.cat(self.attended(row), dim=1)[:, None]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            reference_mla(row.query, *self.attended(row), self.kv_b_proj, self.spec, context_len=row.data.context_len)
            for row in self.rows
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def one_hot(self, first_key: int) -> Batch:
        """Latent rows that are one-hot, and a weight that takes values from their first columns as they are."""
        spec, rows = self.spec, []
        weight = self.kv_b_proj.new_zeros(spec.num_qo_heads, spec.head_dim - spec.qk_rope_head_dim + spec.head_dim_vo,
                                          spec.kv_lora_rank)  # fmt: skip
        weight[:, spec.qk_nope_head_dim :, : spec.head_dim_vo] = torch.eye(spec.head_dim_vo)
        for row in self.rows:
            latent = torch.zeros_like(row.key)
            for d in range(min(spec.head_dim_vo, len(latent) - first_key)):
                latent[first_key + d, d] = 1
            rows.append(replace(row, query=torch.zeros_like(row.query), key=latent))
        return replace(self, rows=tuple(rows), kv_b_proj=weight.flatten(0, 1))

    def _stored(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        rows = stored(torch.cat([row.key, row.value], dim=1), self.spec.cache_dtype, self.k_scale)
        return rows, rows[:, :0]

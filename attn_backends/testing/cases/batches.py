"""A batch whose right answer is known: requests with queries, keys and values, over a pool that holds their past.

Those of MLA layers have rows of latent parts, one scale, and the weight that expands them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import FP8_DTYPES, AttentionSpec, KVCacheSpec, MLASpec
from attn_backends.testing.cases.cases import load_cases
from attn_backends.testing.reference import reference_attention, reference_mla


@dataclass(frozen=True)
class Row:
    """One request's step and all that it attends to, cached and new."""

    data: SequenceData
    query: torch.Tensor  # [query_len, num_qo_heads, head_dim]
    key: torch.Tensor  # [seq_len, num_kv_heads, head_dim], before it is quantised for the cache; MLA: latent rows
    value: torch.Tensor  # [seq_len, num_kv_heads, head_dim_vo]; MLA: shared keys

    @property
    def num_cached(self) -> int:
        """Keys that are in the pool before the step."""
        return self.data.seq_len - self.data.new_kv_len


@dataclass(frozen=True)
class Batch:
    """Rows over one pool. The pool is a template: a run works on a clone of it."""

    spec: AttentionSpec
    cache: KVCacheSpec
    device: torch.device
    rows: tuple[Row, ...]
    pool: KVCache | None  # holds what is cached before the step, poison elsewhere; None: nothing is cached
    sinks: torch.Tensor | None  # [num_qo_heads] f32
    k_scale: float
    v_scale: float
    fp8_queries: bool = False  # attended with queries and weights that are rounded to fp8 (Capabilities.fp8_queries)

    @property
    def tolerance(self) -> float:
        """Largest relative error of a token's output."""
        return load_cases().tolerance(torch.float8_e4m3fn if self.fp8_queries else self.spec.dtype)

    @property
    def has_exact_scales(self) -> bool:
        """Whether all ways to divide by the scales give the same: they are powers of two."""
        return is_power_of_two(self.k_scale) and is_power_of_two(self.v_scale)

    @property
    def groups(self) -> tuple[SequenceGroup, ...]:
        return tuple(SequenceGroup(f"request-{i}", (row.data,)) for i, row in enumerate(self.rows))

    @property
    def query(self) -> torch.Tensor:  # [num_tokens, num_qo_heads, head_dim]
        return torch.cat([row.query for row in self.rows]).to(self.device)

    @property
    def key(self) -> torch.Tensor:  # [num_new_kv, num_kv_heads, head_dim]
        return torch.cat([row.key[row.num_cached :] for row in self.rows]).to(self.device)

    @property
    def value(self) -> torch.Tensor:  # [num_new_kv, num_kv_heads, head_dim_vo]
        return torch.cat([row.value[row.num_cached :] for row in self.rows]).to(self.device)

    def common(self, num_padded_reqs: int = 0) -> CommonAttentionMetadata:
        return CommonAttentionMetadata.from_sequence_groups(
            self.groups, self.cache.page_size, self.device, num_padded_reqs
        )

    def fresh_pool(self) -> KVCache | None:
        return None if self.pool is None else KVCache(*(tensor.clone() for tensor in self.pool))

    @property
    def weights(self) -> dict[str, Any]:
        """What the layer's Impl is given of the model's weights."""
        return {} if self.sinks is None else {"sinks": self.sinks}

    def pool_after(self) -> KVCache | None:
        """What the pool must hold after the step: the new keys and values in their slots, all else as before."""
        pool = self.fresh_pool()
        if pool is not None:
            for row in self.rows:
                self.store(pool, row, row.num_cached, row.data.seq_len)
        return pool

    def attended(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """A row's keys and values in float64, as they read back from the cache if there is one."""
        if self.pool is None:
            return row.key.double(), row.value.double()
        key, value = self._stored(row)
        return key.double() * self.k_scale, value.double() * self.v_scale

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference: out [num_tokens, num_qo_heads, head_dim_vo] and lse [num_tokens, num_qo_heads], f64."""
        parts = [self._expected(row) for row in self.rows]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def _expected(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_attention(
            self._query(row), *self.attended(row), self.spec, context_len=row.data.context_len, sinks=self.sinks
        )

    def multiplied(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """What a row's logits are products of: queries [query_len, num_qo_heads, dim] and keys [seq_len, num_kv_heads,
        dim], f64."""
        return self._query(row).double(), self.attended(row)[0]

    def _query(self, row: Row) -> torch.Tensor:
        """A row's queries as they are attended: rounded to fp8 alike, or as they are."""
        return stored(row.query, torch.float8_e4m3fn, 1.0) if self.fp8_queries else row.query

    def one_hot(self, first_key: int) -> Batch:
        """With queries of zeros, and values that are one-hot for `head_dim_vo` keys from `first_key` on."""
        rows = []
        for row in self.rows:
            value = torch.zeros_like(row.value)
            for d in range(min(value.shape[2], value.shape[0] - first_key)):
                value[first_key + d, :, d] = 1
            rows.append(replace(row, query=torch.zeros_like(row.query), value=value))
        return replace(self, rows=tuple(rows))

    def cut(self, parts: Sequence[tuple[int, int, int]]) -> Batch:
        """The batch of some rows' query tokens: (row, first, stop) each. Reorders, drops and chunks requests."""
        return replace(self, rows=tuple(_cut(self.rows[row], first, stop) for row, first, stop in parts))

    def reordered(self, order: Sequence[int]) -> Batch:
        return replace(self, rows=tuple(self.rows[i] for i in order))

    def _stored(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self.spec.cache_dtype
        return stored(row.key, dtype, self.k_scale), stored(row.value, dtype, self.v_scale)

    def store(self, pool: KVCache, row: Row, first: int, stop: int) -> None:
        """Put positions `first` to `stop` of a row where its page list says."""
        positions = np.arange(first, stop)
        pages = np.asarray(row.data.pages, np.int64)[positions // self.cache.page_size]
        place = torch.from_numpy(np.stack([pages, positions % self.cache.page_size])).to(pool.key.device).unbind()
        for cached, real in zip(pool, self._stored(row), strict=True):
            as_bits(cached)[place] = as_bits(real[first:stop].to(cached.device))


def _cut(row: Row, first: int, stop: int) -> Row:
    context_len, query_len = row.data.context_len + first, stop - first
    seq_len = context_len + query_len
    data = SequenceData(context_len, query_len, row.data.pages)
    return Row(data, row.query[first:stop], row.key[:seq_len], row.value[:seq_len])


def is_power_of_two(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


def stored(tensor: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What a cache of `dtype` holds for real values: `tensor / scale`, fp8 saturated at the largest finite value.

    The division is done in float64 where either side is that, and in float32 elsewhere.
    """
    scaled = (tensor.double() if torch.float64 in (tensor.dtype, dtype) else tensor.float()) / scale
    limit = torch.finfo(dtype).max if dtype in FP8_DTYPES else torch.inf
    return scaled.clamp(-limit, limit).to(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


@dataclass(frozen=True)
class MLABatch(Batch):
    """`Row.key` holds latent rows [seq_len, kv_lora_rank], `Row.value` shared keys [seq_len, qk_rope_head_dim]."""

    spec: MLASpec
    # [num_qo_heads * (qk_nope_head_dim + head_dim_vo), kv_lora_rank] of spec.dtype
    kv_b_proj: torch.Tensor = field(kw_only=True)

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

    def _expected(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        context_len = row.data.context_len
        return reference_mla(row.query, *self.attended(row), self.kv_b_proj, self.spec, context_len=context_len)

    def one_hot(self, first_key: int) -> Batch:
        """Latent rows that are one-hot, and a weight that takes values from their first columns as they are."""
        spec, rows = self.spec, []
        weight = self.kv_b_proj.new_zeros(spec.num_qo_heads, spec.head_dim - spec.qk_rope_head_dim + spec.head_dim_vo,
                                          spec.kv_lora_rank)  # fmt: skip
        weight[:, spec.qk_nope_head_dim :, : spec.head_dim_vo].diagonal(dim1=1, dim2=2).fill_(1)
        for row in self.rows:
            latent = torch.zeros_like(row.key)
            for d in range(min(spec.head_dim_vo, len(latent) - first_key)):
                latent[first_key + d, d] = 1
            rows.append(replace(row, query=torch.zeros_like(row.query), key=latent))
        return replace(self, rows=tuple(rows), kv_b_proj=weight.flatten(0, 1))

    def _stored(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        rows = stored(torch.cat([row.key, row.value], dim=1), self.spec.cache_dtype, self.k_scale)
        return rows, rows[:, :0]

"""A decode batch of MLA over a paged latent cache to time, in two forms that share caches and lengths.

`latent`: absorbed queries in, weighted latent rows out, as kernels take and give them. `layer`: a model's queries in,
values out, with the two absorbing products around the same attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from attn_backends import KVCacheSpec, MLASpec
from attn_backends.cache.kv_cache import KVCache, gather_pages
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import Capabilities
from benchmarks.attention.paged_problem import COLD_BYTES, MOST_COPIES, Problem, Shape, common_of, num_pages, reference

LAYERS = 27  # of DeepSeek-V2-Lite


@dataclass(frozen=True)
class MLAShape(Shape):
    """`heads` are the query heads, 1, and the width of a latent row."""

    rank: int = 512

    @property
    def name(self) -> str:
        lens = f"{len(self.seq_lens)} x {self.seq_lens[0]}" if len(set(self.seq_lens)) == 1 else f"{self.seq_lens}"
        return f"{lens}, {self.heads[0]} heads{self.verified}"

    def num_bytes(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
        """Latent rows read once by each request, absorbed queries read, weighted latent rows written."""
        heads, _, width = self.heads
        new = sum(self.query_lens) * heads * (width + self.rank)
        return cache_dtype.itemsize * sum(self.seq_lens) * width + dtype.itemsize * new

    @property
    def flops(self) -> float:
        """2 · keys · heads · (width + rank) a query token."""
        heads, _, width = self.heads
        return 2 * heads * (width + self.rank) * self.query_len * sum(self.seq_lens)


@dataclass(frozen=True, eq=False)
class MLAProblem(Problem):
    kv_b_proj: torch.Tensor | None = None  # of the layer's form; None: the latent one

    @property
    def passes(self) -> int:
        """So many that there is a call for each layer of a model: FlashMLA's schedule is filled by the first."""
        return max(super().passes, math.ceil(LAYERS / len(self.caches)))

    def _expected(self, query: torch.Tensor, cache: KVCache) -> torch.Tensor:
        spec = self.spec
        assert isinstance(spec, MLASpec)
        rank, nope, weight = spec.kv_lora_rank, spec.qk_nope_head_dim, self.kv_b_proj
        if weight is not None:
            w_uk, w_uv = weight.double().view(spec.num_qo_heads, -1, rank).split([nope, spec.head_dim_vo], dim=1)
            absorbed = torch.einsum("thd,hdr->thr", query[..., :nope].double(), w_uk)
            query = torch.cat([absorbed, query[..., nope:].double()], dim=-1)
        answers = []
        for row, seq_len, pages in zip(query.split(self.shape.query_lens), self.shape.seq_lens, self.common.page_table,
                                       strict=True):  # fmt: skip
            rows = gather_pages(cache.key, pages[: -(-seq_len // self.cache.page_size)])[:seq_len, None]
            answers.append(reference(row, rows, rows[..., :rank], spec.scale))
        attended = torch.cat(answers)
        return attended if weight is None else torch.einsum("thr,hdr->thd", attended, w_uv)

    def repaged(self, page_size: int) -> MLAProblem:
        if page_size == self.cache.page_size:
            return self
        cache = KVCacheSpec(self.cache.num_slots // page_size, page_size)
        if self.cache.num_slots % page_size or num_pages(self.shape, page_size) > cache.num_pages:
            raise ValueError(f"lengths of {self.shape.name} are no multiples of page size {page_size}")
        caches = [latent_cache(cached.key.view(-1, page_size, cached.key.shape[-1])) for cached in self.caches]
        return replace(self, cache=cache, common=common_of(self.shape, cache, self.device), caches=caches)

    def fitting(self, backend: type[AttentionBackend], can: Capabilities | None = None) -> MLAProblem:
        """With the backend's page size: the largest that it has up to the problem's, else its smallest."""
        sizes = (can or backend.capabilities()).page_sizes or {self.cache.page_size}
        return self.repaged(max((size for size in sizes if size <= self.cache.page_size), default=min(sizes)))


class Forms(NamedTuple):
    latent: MLAProblem
    layer: MLAProblem


def make_forms(shape: MLAShape, dtype: torch.dtype, page_size: int, device: torch.device) -> Forms:
    """Random latent rows, queries and weights of DeepSeek-V2's and V3's head dims; pages in random order.

    Args:
        dtype: as for `make_problem`.
    """
    cache_dtype, dtype = dtype, torch.bfloat16 if dtype.itemsize == 1 else dtype
    spec = MLASpec(shape.heads[0], dtype=dtype, cache_dtype=cache_dtype)
    cache = KVCacheSpec(sum(-(-seq_len // page_size) for seq_len in shape.seq_lens), page_size)
    num_tokens, made = sum(shape.query_lens), {"device": device, "dtype": dtype}
    cache_bytes = cache.num_slots * spec.latent_dim * cache_dtype.itemsize
    num_copies = 2 if device.type == "cpu" else _num_copies(cache_bytes, num_tokens * spec.num_qo_heads)
    caches = [latent_cache(torch.randn(cache.num_pages, page_size, spec.latent_dim, **made).to(cache_dtype))
              for _ in range(num_copies)]  # fmt: skip
    common = common_of(shape, cache, device)

    def form(width: int, width_out: int, weight: torch.Tensor | None) -> MLAProblem:
        queries = [torch.randn(num_tokens, spec.num_qo_heads, width, **made) for _ in range(num_copies)]
        outputs = [query.new_empty(num_tokens, spec.num_qo_heads, width_out) for query in queries]
        return MLAProblem(shape, spec, cache, common, caches, queries, outputs, kv_b_proj=weight)

    rows = spec.num_qo_heads * (spec.qk_nope_head_dim + spec.head_dim_vo)
    weight = torch.randn(rows, spec.kv_lora_rank, **made) / math.sqrt(spec.kv_lora_rank)
    return Forms(form(spec.latent_dim, spec.kv_lora_rank, None), form(spec.head_dim, spec.head_dim_vo, weight))


def latent_cache(rows: torch.Tensor) -> KVCache:
    return KVCache(rows, rows[..., :0])


def _num_copies(cache_bytes: int, num_queries: int) -> int:
    """Enough to be cold in the L2, four at least, and as many as the memory holds with float64 answers."""
    room = int(torch.cuda.mem_get_info()[0] * 0.4) // (cache_bytes + num_queries * 640 * (2 * 4 + 8))
    return max(1, min(MOST_COPIES, room, max(4, math.ceil(COLD_BYTES / cache_bytes))))

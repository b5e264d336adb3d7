"""The numbers of a case: requests whose keys lie in shuffled pages, made on the device, in a pool of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random

import torch

from attn_backends.batch.common import SequenceData
from attn_backends.cache.kv_cache import KVCache, allocate_kv_cache
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, KVCacheSpec, MLASpec, new_kv_shapes
from attn_backends.testing.cases.batches import Batch, MLABatch, Row, is_power_of_two, stored
from attn_backends.testing.cases.random_batch import SPARE_PAGES, fill_pool
from attn_backends.testing.harness import Backend
from attn_backends.testing.verify.cases import Case, Episode

_FEW = 32  # sums of fewer numbers may all be near zero, and then no relative error is small


def cache_of(case: Case) -> KVCacheSpec:
    """The pool that all episodes of a case share, as large as the largest needs."""
    size = case.form.page_size
    pages = max(sum(_own_pages(case, episode)) + episode.shared_len // size for episode in case.episodes)
    return KVCacheSpec(pages + SPARE_PAGES, size, case.form.layout)


def _own_pages(case: Case, episode: Episode) -> list[int]:
    """Pages of each request beyond the shared ones; a few more than it needs, which a table of its length has not."""
    lens = episode.seq_lens(len(episode.steps) - 1, case.form.specs[0].attention_type is AttentionType.CROSS)
    numbers = Random(f"pages {case.seed}")
    shared, ahead = episode.shared_len // case.form.page_size, (0,) if case.over_table else (0, 0, 1)
    return [-(-length // case.form.page_size) - shared + numbers.choice(ahead) for length in lens]


def page_lists(case: Case, episode: Episode, number: int) -> list[list[int]]:
    """Shuffled pages of each request, the shared ones first. Page 0 and one other page belong to none."""
    numbers, own = Random(f"pages {case.seed} {number}"), _own_pages(case, episode)
    shared = episode.shared_len // case.form.page_size
    free = numbers.sample(range(1, cache_of(case).pages - 1), k=shared + sum(own))
    edges = list(accumulate(own, initial=shared))
    return [free[:shared] + free[start:stop] for start, stop in pairwise(edges)]


class LayerData:
    """One layer's weights, which are the same in all of its batches, and those batches."""

    def __init__(self, backend: Backend, case: Case, layer: int, device: torch.device) -> None:
        self.case, self.layer, self.device = case, layer, device
        self.spec = case.form.specs[layer]
        self.cache = cache_of(case)
        self.generator = torch.Generator(device).manual_seed(case.seed * 8 + layer)
        self.template = empty_pool(backend, self.spec, self.cache, device, case.form.interleaved)
        self.sinks = self._random(self.spec.num_qo_heads) if self.spec.sinks else None
        self.fp8_queries = backend.capabilities().fp8_queries and self.spec.cache_dtype in FP8_DTYPES

    def batch(self, number: int) -> Batch:
        """Episode `number` with all of its steps as one; the template then holds what is cached before."""
        episode, pool = self.case.episodes[number], self.template
        rows = self._rows(episode, page_lists(self.case, episode, number) if episode.cached else None)
        k_scale, v_scale = self.case.form.scales[self.layer]
        cached = pool if episode.cached else None
        given = (self.spec, self.cache, self.device, rows, cached, self.sinks, k_scale, v_scale)
        batch = Batch(*given, fp8_queries=self.fp8_queries and episode.cached)
        if isinstance(self.spec, MLASpec):
            batch = MLABatch(**{**vars(batch), "kv_b_proj": self._expansion(self.spec)})
        if episode.cached:
            fill_pool(pool, torch.nan)
            for row in rows:
                batch.store(pool, row, 0, row.num_cached)
        return batch

    def _rows(self, episode: Episode, pages: Sequence[list[int]] | None) -> tuple[Row, ...]:
        spec, is_cross = self.spec, self.spec.attention_type is AttentionType.CROSS
        query_lens = episode.done(len(episode.steps))
        seq_lens = episode.seq_lens(len(episode.steps) - 1, is_cross)
        key_shape, value_shape = new_kv_shapes(spec)
        queries = (self._random(sum(query_lens), spec.num_qo_heads, spec.head_dim) * episode.gain).to(spec.dtype)
        keys, values = (self._random(sum(seq_lens), *shape) for shape in (key_shape, value_shape))
        if self.has_few_outputs:
            (keys if isinstance(spec, MLASpec) else values).abs_()
        k_scale, v_scale = self.case.form.scales[self.layer]
        scales = (k_scale, k_scale if isinstance(spec, MLASpec) else v_scale)  # a latent row has one
        keys, values = (as_read(new, spec, scale) for new, scale in zip((keys, values), scales, strict=True))
        rows, parts = [], (queries.split(query_lens), keys.split(seq_lens), values.split(seq_lens))
        for i, (query, key, value) in enumerate(zip(*parts, strict=True)):
            own = None if pages is None else pages[i]
            if is_cross:
                new = (episode.new_kv_lens or seq_lens)[i]
                data = SequenceData(0, query_lens[i], own, seq_len=seq_lens[i], new_kv_len=new)
            else:
                data = SequenceData(seq_lens[i] - query_lens[i], query_lens[i], own)
            for mine, first in ((key, parts[1][0]), (value, parts[2][0])):
                mine[: episode.shared_len] = first[: episode.shared_len]
            rows.append(Row(data, query, key, value))
        return tuple(rows)

    def _expansion(self, spec: MLASpec) -> torch.Tensor:
        """`kv_b_proj`, the same for all batches of the layer."""
        own = torch.Generator(self.device).manual_seed(self.case.seed * 8 + self.layer)
        width = spec.num_qo_heads * (spec.qk_nope_head_dim + spec.head_dim_vo)
        shape = (width, spec.kv_lora_rank)
        weight = torch.randn(shape, generator=own, dtype=torch.float32, device=self.device) * spec.kv_lora_rank**-0.5
        if self.has_few_outputs:
            weight.abs_()
        expansion: torch.Tensor = weight.to(spec.dtype)
        return expansion

    @property
    def has_few_outputs(self) -> bool:
        """Whether a token's outputs follow from so few numbers that all may be near zero, were these of either sign."""
        spec = self.spec
        if isinstance(spec, MLASpec):
            return min(spec.kv_lora_rank, spec.num_qo_heads * spec.head_dim_vo) < _FEW
        return spec.num_kv_heads * spec.head_dim_vo < _FEW

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)


def as_read(new: torch.Tensor, spec: AttentionSpec, scale: float) -> torch.Tensor:
    """Random numbers in the layer's dtype that a coarser cache gives back nearly as they were.

    A quotient by a scale that is no power of two may lie at the middle of two numbers of the cache, where a GPU's own
    division takes one and a CPU's the other: outputs would differ by what no kernel is to blame for.
    """
    if not is_power_of_two(scale) and torch.finfo(spec.cache_dtype).eps > torch.finfo(spec.dtype).eps:
        new = stored(new.to(spec.dtype), spec.cache_dtype, scale).double() * scale
    return new.to(spec.dtype)


def empty_pool(
    backend: Backend, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device, interleaved: bool
) -> KVCache:
    """One layer's cache. Interleaved: one tensor whose pages hold their keys, then their values."""
    if not interleaved:
        return allocate_kv_cache(backend, {0: spec}, cache, device).layers[0]
    shape = backend.get_kv_cache_shapes(spec, cache)[0]
    order = backend.get_kv_cache_stride_order(cache.layout)
    inner = [shape[dim] for dim in order[1:]]
    both = torch.zeros(shape[0], 2, *inner, dtype=spec.cache_dtype, device=device)
    inverse = [order.index(dim) for dim in range(len(order))]
    return KVCache(both[:, 0].permute(inverse), both[:, 1].permute(inverse))

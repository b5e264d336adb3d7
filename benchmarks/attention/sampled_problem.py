"""Problems in quick succession: all caches are cut from one pool of random data, and a part of each answer is checked.

A reference in float64 over all keys of a large cache takes longer than all its measurements, and new random data for
every shape likewise. So a few requests of two copies are compared, by some of their heads and a run of their tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property

import torch

from attn_backends import AttentionSpec, KVCacheSpec
from attn_backends.cache.kv_cache import KVCache, gather_pages
from benchmarks.attention.contest import CACHE_DTYPES
from benchmarks.attention.paged_problem import (
    COLD_BYTES,
    MOST_COPIES,
    Answer,
    Problem,
    Shape,
    common_of,
    num_pages,
    random_queries,
    reference,
    spec_of,
)
from benchmarks.attention.shape_draws import BOUNDS, LARGEST_PAGE, Drawn

FILLED = 1 << 26  # elements at a time
MOST_REQUESTS, MOST_TOKENS, MOST_ELEMENTS = 8, 64, 1 << 24  # that are compared: of a copy, a request; of its keys
GRAPH_US, LEAST_US = 1_000, 8  # that a graph should take; that the shortest call does, about
LONG_US = 2_000  # a call as long as this finds nothing of use in the L2, so one copy is enough


class Pool:
    """Random data for caches, one piece of memory a dtype, made when it is first asked for."""

    def __init__(self, num_bytes: int, device: torch.device, fill: bool = True) -> None:
        self.num_bytes, self.device, self.fill = num_bytes, device, fill
        self._data: dict[torch.dtype, torch.Tensor] = {}

    def data(self, dtype: torch.dtype) -> torch.Tensor:
        """[num_bytes // itemsize]"""
        if dtype not in self._data:
            made = torch.empty(self.num_bytes // dtype.itemsize, dtype=dtype, device=self.device)
            wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
            for part in made.split(FILLED) if self.fill else ():
                part.copy_(torch.randn(part.shape, dtype=wide, device=self.device))
            self._data[dtype] = made
        return self._data[dtype]

    def caches(self, spec: AttentionSpec, cache: KVCacheSpec, num_copies: int) -> list[KVCache]:
        """Keys and values of copies, side by side; tokens before heads.

        Raises:
            ValueError: the pool is too small.
        """
        size, data = cache.num_slots * spec.num_kv_heads * spec.head_dim, self.data(spec.cache_dtype)
        if 2 * num_copies * size > len(data):
            raise ValueError(f"{num_copies} caches of {2 * size} elements do not fit into a pool of {len(data)}")
        shape = (2 * num_copies, -1, cache.page_size, spec.num_kv_heads, spec.head_dim)
        parts = iter(data[: 2 * num_copies * size].view(shape))
        return [KVCache(key, value) for key, value in zip(parts, parts, strict=True)]


@dataclass(frozen=True, eq=False)
class SampledProblem(Problem):
    """A problem whose answers are a sample, drawn by `seed`."""

    seed: str = ""

    @property
    def passes(self) -> int:
        """How often one graph runs over all copies: a graph of many launches takes long to capture."""
        if self.device.type == "cpu":
            return 1
        least_us = max(LEAST_US, self.num_bytes / 4e6, self.shape.flops / 5e8)
        return max(1, round(GRAPH_US / (least_us * len(self.caches))))

    @cached_property
    def answers(self) -> list[Answer]:
        dice, count = random.Random(self.seed), len(self.shape.seq_lens)
        by_length = sorted(range(count), key=self.shape.seq_lens.__getitem__)
        wanted = {0, count - 1, by_length[0], by_length[-1]}
        wanted |= {int(dice.random() * count) for _ in range(MOST_REQUESTS - len(wanted))}
        copies = sorted({0, len(self.caches) - 1})
        return [self._answer(copy, request, dice) for copy in copies for request in sorted(wanted)]

    def _answer(self, copy: int, request: int, dice: random.Random) -> Answer:
        shape, spec = self.shape, self.spec
        seq_len, query_len = shape.seq_lens[request], shape.query_lens[request]
        num_tokens = min(query_len, MOST_TOKENS)
        num_heads = max(1, min(spec.num_kv_heads, MOST_ELEMENTS // (seq_len * spec.head_dim)))
        token = int(dice.random() * (query_len - num_tokens + 1))
        head = int(dice.random() * (spec.num_kv_heads - num_heads + 1))
        start, group = sum(shape.query_lens[:request]), spec.num_qo_heads // spec.num_kv_heads
        tokens = slice(start + token, start + token + num_tokens)
        heads = slice(group * head, group * (head + num_heads))
        num_keys = seq_len - query_len + token + num_tokens  # that the last of these tokens sees
        pages = self.common.page_table[request, : -(-num_keys // self.cache.page_size)]
        key, value = (gather_pages(t[:, :, head : head + num_heads], pages)[:num_keys] for t in self.caches[copy])
        query = self.queries[copy][tokens, heads]
        query = query.to(spec.cache_dtype) if self.fp8_queries else query
        return Answer(copy, tokens, heads, reference(query, key, value, spec.scale, spec.window_left))


def sampled_problem(
    shape: Shape, dtype: torch.dtype, page_size: int, pool: Pool, seed: str, num_copies: int | None = None
) -> SampledProblem:
    """The shape over a part of the pool that is large enough for pages of LARGEST_PAGE too.

    Args:
        num_copies: None: enough to be cold in the L2, as many as the pool holds.
    """
    spec = spec_of(shape, dtype)
    cache = KVCacheSpec(_slots(shape, page_size) // page_size, page_size)
    num_copies = num_copies or _num_copies(shape, spec, cache, pool)
    torch.manual_seed(hash_of(seed))
    caches = pool.caches(spec, cache, num_copies)
    queries = random_queries(shape, spec, num_copies, pool.device)
    outputs = [torch.empty_like(query) for query in queries]
    common = common_of(shape, cache, pool.device)
    return SampledProblem(shape, spec, cache, common, caches, queries, outputs, seed=seed)


def hash_of(text: str) -> int:
    """The same everywhere, unlike Python's."""
    return random.Random(text).getrandbits(32)


def problem_of(each: Drawn, device: torch.device, *, is_cold: bool = True) -> SampledProblem:
    """A drawn shape's problem over memory of its own: as many copies as are cold in the L2, up to two of the largest
    shape, or one that holds anything, to compile for."""
    dtype = CACHE_DTYPES[each.dtype]
    spec = spec_of(each.shape, dtype)
    copies = _cold_copies(each.shape, spec, device) if is_cold else 1
    num_bytes = copies * _slots(each.shape, each.page_size) * _slot_bytes(spec)
    pool = Pool(min(num_bytes, 2 * BOUNDS[device.type].num_bytes), device, fill=is_cold)
    return sampled_problem(each.shape, dtype, each.page_size, pool, each.id, None if is_cold else 1)


def _slots(shape: Shape, page_size: int) -> int:
    """In whole pages of that size, and enough for pages of LARGEST_PAGE too."""
    slots = max(num_pages(shape, size) * size for size in (page_size, LARGEST_PAGE))
    return -(-slots // page_size) * page_size


def _slot_bytes(spec: AttentionSpec) -> int:
    return 2 * spec.num_kv_heads * spec.head_dim * spec.cache_dtype.itemsize


def _num_copies(shape: Shape, spec: AttentionSpec, cache: KVCacheSpec, pool: Pool) -> int:
    room = pool.num_bytes // (_slot_bytes(spec) * cache.num_slots)
    return max(1, min(room, _cold_copies(shape, spec, pool.device)))


def _cold_copies(shape: Shape, spec: AttentionSpec, device: torch.device) -> int:
    if device.type == "cpu" or shape.flops / 5e8 > LONG_US:
        return 1 if shape.is_prefill else 2
    return min(MOST_COPIES, max(2, math.ceil(COLD_BYTES / (_slot_bytes(spec) * sum(shape.seq_lens)))))

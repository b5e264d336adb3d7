"""A batch over a paged cache to time attention with: several copies of the cache, random pages, a float64 answer.

Every copy has keys, values and queries of its own, so that running over all copies in one graph finds none of them in
the L2. All contenders for a shape read the same data; a backend that wants another layout or page size gets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch

from attn_backends import (
    AttentionSpec,
    CommonAttentionMetadata,
    KVCacheSpec,
    Limits,
    SequenceData,
    SequenceGroup,
    allocate_kv_cache,
)
from attn_backends.cache.kv_cache import KVCache, gather_pages, get_kv_cache_layout
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import Capabilities
from benchmarks.lib.gpu_harness import Run, capture

COLD_BYTES = 256 << 20  # of all copies together at least: several times the L2
MOST_COPIES = 64
GRAPH_US = 2_000  # that one graph should take, so that the gap between two graphs is nothing
FILLED_PAGES = 1 << 12  # at a time
MOST_RUNS = 4  # of equal lengths that a name tells
CHUNK = 1 << 27  # logits that the reference holds at a time

ERROR_LIMITS = {torch.float8_e4m3fn: 8e-2, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}

Call = Callable[[int], torch.Tensor]  # attends over the i-th copy; returns its output


@dataclass(frozen=True)
class Shape:
    """Lengths and heads. Decode has `query_len` query tokens a request, one if none are verified, and prefill all of
    them but for the first `decodes`."""

    seq_lens: tuple[int, ...]
    heads: tuple[int, int, int]  # query heads, KV heads, head dim
    is_prefill: bool = False
    decodes: int = 0
    shared_prefix: int = 0  # leading tokens that all requests have in the same pages
    window_left: int = -1  # keys that a query sees before its own; -1: all
    capacity: int = 0  # of a row: what the host knows of lengths, where it knows no more; 0: the longest row's
    query_len: int = 1
    chunk_lens: tuple[int, ...] = ()  # new tokens of each prefill whose beginning is cached; (): all tokens are new

    @property
    def name(self) -> str:
        lens = in_words(self.seq_lens)
        kind = f"{f', {self.decodes} decodes and' if self.decodes else ','} prefill" if self.is_prefill else ""
        window = f", window {self.window_left}" if self.window_left >= 0 else ""
        unknown = f" of up to {self.capacity}" if self.capacity else ""
        heads = f"{self.heads[0]}/{self.heads[1]}, {self.heads[2]}"
        chunks = f" of the last {in_words(self.chunk_lens)}" if self.chunk_lens else ""
        return f"{lens}{unknown}, {heads}{window}{kind}{chunks}{self.verified}"

    @property
    def verified(self) -> str:
        """The end of a name."""
        return f", {self.query_len} tokens" if self.query_len > 1 else ""

    @property
    def query_lens(self) -> tuple[int, ...]:
        decodes = self.decodes if self.is_prefill else len(self.seq_lens)
        return (self.query_len,) * decodes + (self.chunk_lens or self.seq_lens[decodes:])

    @property
    def all_are_new(self) -> bool:
        """Whether every key is of a token in this batch."""
        return self.query_lens == self.seq_lens

    def num_bytes(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
        """K and V that a request sees read once by it, queries read, outputs written."""
        num_qo_heads, num_kv_heads, head_dim = self.heads
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        seen = sum(n if self.window_left < 0 else min(n, self.window_left + queries) for queries, n in lens)
        cached, new = seen * num_kv_heads, sum(self.query_lens) * num_qo_heads
        return 2 * head_dim * (cache_dtype.itemsize * cached + dtype.itemsize * new)

    @property
    def flops(self) -> float:
        """4 · keys · heads · dim a query token; of a causal prefill's own keys half, as is the custom. In a window what
        is seen counts."""
        per_key = 4 * self.heads[0] * self.heads[2]
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        return per_key * sum(self._seen(queries, n) for queries, n in lens)

    def _seen(self, queries: int, n: int) -> float:
        """Keys that all queries of a request see, summed."""
        if self.window_left < 0:
            return queries * n - (queries * queries / 2 if self.is_prefill and queries > 1 else 0)
        window = self.window_left + 1
        return sum(min(position + 1, window) for position in range(n - queries, n))


def in_words(lens: tuple[int, ...]) -> str:
    """Lengths as a part of a name: runs of equal ones, or how many there are and of what size.

    >>> in_words((4096,) * 64 + (512,)), in_words((1, 2, 3, 4, 5))
    ('64 x 4096 + 1 x 512', '5 x 1 to 5 (mean 3)')
    """
    runs = [(length, len(list(same))) for length, same in groupby(lens)]
    if len(runs) > MOST_RUNS:
        return f"{len(lens)} x {min(lens)} to {max(lens)} (mean {round(sum(lens) / len(lens))})"
    return " + ".join(f"{count} x {length}" for length, count in runs)


class Answer(NamedTuple):
    """What a copy's output is in float64, or a part of it."""

    copy: int
    tokens: slice
    heads: slice  # query heads
    values: torch.Tensor  # [tokens, heads, head_dim] f64


@dataclass(frozen=True, eq=False)
class Problem:
    """One shape, its cache and its inputs. `outputs` are shared: a contender's are checked right after its replay."""

    shape: Shape
    spec: AttentionSpec
    cache: KVCacheSpec
    common: CommonAttentionMetadata
    caches: list[KVCache]  # a copy each
    queries: list[torch.Tensor]  # [num_tokens, num_qo_heads, head_dim]
    outputs: list[torch.Tensor]  # like the queries
    fp8_queries: bool = False  # attended with queries and weights that are rounded to fp8, as its cache is

    @property
    def device(self) -> torch.device:
        return self.queries[0].device

    @property
    def limits(self) -> Limits:
        longest = max(*self.shape.seq_lens, self.shape.capacity)
        return Limits(len(self.shape.seq_lens), sum(self.shape.query_lens), longest)

    @cached_property
    def answers(self) -> list[Answer]:
        """All of every copy's output."""
        each = zip(self.queries, self.caches, strict=True)
        return [Answer(i, slice(None), slice(None), self._expected(*given)) for i, given in enumerate(each)]

    def _expected(self, query: torch.Tensor, cache: KVCache) -> torch.Tensor:
        rows, table = query.split(self.shape.query_lens), self.common.page_table
        answers = []
        for row, seq_len, pages in zip(rows, self.shape.seq_lens, table, strict=True):
            used = pages[: -(-seq_len // self.cache.page_size)]
            key, value = (gather_pages(cached, used)[:seq_len] for cached in cache)
            row = row.to(self.spec.cache_dtype) if self.fp8_queries else row
            answers.append(reference(row, key, value, self.spec.scale, self.spec.window_left))
        return torch.cat(answers)

    @property
    def error_limit(self) -> float:
        """Of any token's output, relative."""
        return ERROR_LIMITS[self.spec.cache_dtype if self.fp8_queries else self.spec.dtype]

    @property
    def num_bytes(self) -> int:
        return self.shape.num_bytes(self.spec.dtype, self.spec.cache_dtype)

    @property
    def passes(self) -> int:
        """How often one graph runs over all copies."""
        if self.device.type == "cpu":
            return 1
        least_us = max(self.num_bytes / 4e6, self.shape.flops / 5e8)
        return max(1, min(50, math.ceil(GRAPH_US / (least_us * len(self.caches)))))

    def repaged(self, page_size: int) -> Problem:
        """The same memory in pages of another size: other tokens belong together, so the answer is another too.

        Raises:
            ValueError: lengths are no multiples of that size.
        """
        if page_size == self.cache.page_size:
            return self
        cache = KVCacheSpec(self.cache.num_slots // page_size, page_size)
        if num_pages(self.shape, page_size) > cache.num_pages or self.shape.shared_prefix % page_size:
            raise ValueError(f"lengths of {self.shape.name} are no multiples of page size {page_size}")
        used = cache.num_slots
        caches = [KVCache(*(t.flatten(0, 1)[:used].view(-1, page_size, *t.shape[2:]) for t in cached))
                  for cached in self.caches]  # fmt: skip
        return replace(self, cache=cache, common=common_of(self.shape, cache, self.device), caches=caches)

    @cached_property
    def rounded(self) -> Problem:
        """For kernels that round queries to the dtype of a cache of 8 bits; with a wider one they round nothing."""
        return replace(self, fp8_queries=True) if self.spec.cache_dtype.itemsize == 1 else self

    def fitting(self, backend: type[AttentionBackend], can: Capabilities | None = None) -> Problem:
        """The problem as a backend can serve it: with its page size, layout and shape of the pool.

        Args:
            can: what the backend honours as it is set up here; None: its `capabilities()`.
        """
        can = can or backend.capabilities()
        page_size = math.lcm(self.cache.page_size, can.page_size_multiple)
        if can.page_sizes is not None and page_size not in can.page_sizes:
            page_size = max((size for size in can.page_sizes if size <= page_size), default=min(can.page_sizes))
        problem = self.repaged(page_size)
        problem = problem.rounded if can.fp8_queries else problem
        cache = replace(problem.cache, layout=get_kv_cache_layout(can.layouts))
        if _geometry(backend, self.spec, cache) == _geometry(AttentionBackend, self.spec, problem.cache):
            return problem
        caches = _allocate(backend, self.spec, cache, self.device, len(self.caches))
        for new, old in zip(caches, problem.caches, strict=True):
            for to, source in zip(new, old, strict=True):
                to.copy_(source)
        return replace(problem, cache=cache, caches=caches)


def make_problem(shape: Shape, dtype: torch.dtype, page_size: int, device: torch.device) -> Problem:
    """Random keys, values and queries; pages in random order, keys and values apart, tokens before heads (NHD).

    Args:
        dtype: of all; one of 8 bits is the cache's alone, and queries and outputs are bfloat16.
    """
    spec = spec_of(shape, dtype)
    dtype = spec.dtype
    cache = KVCacheSpec(num_pages(shape, page_size), page_size)
    num_copies = _num_copies(shape, cache, spec, device)
    caches = _allocate(AttentionBackend, spec, cache, device, num_copies)
    for page in (page for cached in caches for tensor in cached for page in tensor.split(FILLED_PAGES)):
        page.copy_(torch.randn(page.shape, dtype=dtype, device=device))  # not every dtype has `normal_`
    queries = random_queries(shape, spec, num_copies, device)
    outputs = [torch.empty_like(query) for query in queries]
    return Problem(shape, spec, cache, common_of(shape, cache, device), caches, queries, outputs)


def spec_of(shape: Shape, dtype: torch.dtype) -> AttentionSpec:
    """The layer. A dtype of 8 bits is the cache's alone, and queries and outputs are bfloat16."""
    wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
    return AttentionSpec(*shape.heads, dtype=wide, cache_dtype=dtype, window_left=shape.window_left)


def random_queries(shape: Shape, spec: AttentionSpec, num_copies: int, device: torch.device) -> list[torch.Tensor]:
    """[num_tokens, num_qo_heads, head_dim] a copy."""
    tokens = (sum(shape.query_lens), spec.num_qo_heads, spec.head_dim)
    return [torch.randn(tokens, device=device, dtype=spec.dtype) for _ in range(num_copies)]


def num_pages(shape: Shape, page_size: int) -> int:
    """Pages that the requests have, a shared prefix once."""
    own = sum(-(-(seq_len - shape.shared_prefix) // page_size) for seq_len in shape.seq_lens)
    return own + shape.shared_prefix // page_size


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window_left: int = -1
) -> torch.Tensor:
    """Causal attention of one request in float64, a chunk of queries at a time.

    Args:
        query: [num_queries, num_qo_heads, head_dim], the last tokens.
        key: [num_keys, num_kv_heads, head_dim].
        value: [num_keys, num_kv_heads, head_dim_vo].
        window_left: keys that a query sees before its own; -1: all.
    """
    (num_queries, num_qo_heads, head_dim), (num_keys, num_kv_heads, _) = query.shape, key.shape
    keys, values = key.double().transpose(0, 1), value.double().transpose(0, 1)  # [Hkv, num_keys, head_dim]
    positions = torch.arange(num_keys, device=query.device)
    grouped = query.double().view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1)  # [Hkv, Tq, G, head_dim]
    out = grouped.new_empty(*grouped.shape[:-1], value.shape[-1])
    chunk = max(1, CHUNK // (num_qo_heads * num_keys))
    for start in range(0, num_queries, chunk):
        rows = grouped[:, start : start + chunk]
        first = num_keys - num_queries + start  # position of the first of these queries
        seen = first + rows.shape[1]  # keys that the last of them sees
        logits = rows.flatten(1, 2) @ keys[:, :seen].mT * scale
        logits = logits.view(*rows.shape[:3], seen)
        ahead = positions[:seen] - positions[first:seen, None]
        hidden = ahead > 0 if window_left < 0 else (ahead > 0) | (ahead < -window_left)
        logits.masked_fill_(hidden[:, None], -torch.inf)
        weights = logits.softmax(-1).flatten(1, 2)
        out[:, start : start + chunk] = (weights @ values[:, :seen]).view(*rows.shape[:3], -1)
    return out.transpose(0, 1).reshape(num_queries, num_qo_heads, -1)


@dataclass(frozen=True, eq=False)
class Contender:
    """A graph that attends over every copy of a problem, `passes` times."""

    problem: Problem
    replay: Run
    outputs: list[torch.Tensor]
    held: object  # what the graph reads through and nothing else holds

    def worst_error(self) -> float:
        """Replay, and compare: the largest relative error of any token's output, over all copies."""
        for output in self.problem.outputs:
            output.fill_(torch.nan)
        self.replay()
        return float(torch.stack([_relative_error(self.outputs, answer) for answer in self.problem.answers]).max())

    def check(self) -> float:
        """`worst_error`, if it is small enough.

        Raises:
            ValueError: it is not.
        """
        error, limit = self.worst_error(), self.problem.error_limit
        if not error <= limit:  # NaN is not, either
            raise ValueError(f"wrong output: relative error {error:.3g} against float64, limit {limit:g}")
        return error

    def us(self, replay_us: float) -> float:
        """Time of one attention call, from that of a replay."""
        return replay_us / (self.problem.passes * len(self.problem.caches))


def make_contender(problem: Problem, call: Call, held: object = None) -> Contender:
    """Capture a kernel over all copies. An output that the kernel allocates itself is as good as one in place."""
    outputs = list(problem.outputs)

    def run() -> torch.Tensor:
        for _ in range(problem.passes):
            for i in range(len(outputs)):
                outputs[i] = call(i)
        return outputs[-1]

    return Contender(problem, capture(run, problem.device), outputs, (call, held))


def _relative_error(outputs: list[torch.Tensor], answer: Answer) -> torch.Tensor:
    """The largest of any token; NaN if one is NaN."""
    values, output = answer.values, outputs[answer.copy]
    output = output.reshape(len(output), -1, values.shape[-1])[answer.tokens, answer.heads]
    return ((output.double() - values).flatten(1).norm(dim=1) / values.flatten(1).norm(dim=1)).max()


def common_of(shape: Shape, cache: KVCacheSpec, device: torch.device) -> CommonAttentionMetadata:
    pages = torch.randperm(cache.num_pages, dtype=torch.int32)[: num_pages(shape, cache.page_size)]
    prefix, rest = pages.split([count := shape.shared_prefix // cache.page_size, len(pages) - count])
    owned = rest.split([-(-(seq_len - shape.shared_prefix) // cache.page_size) for seq_len in shape.seq_lens])
    groups = [
        SequenceGroup(str(i), (SequenceData(seq_len - query_len, query_len, torch.cat([prefix, own]).numpy()),))
        for i, (seq_len, query_len, own) in enumerate(zip(shape.seq_lens, shape.query_lens, owned, strict=True))
    ]
    return CommonAttentionMetadata.from_sequence_groups(groups, cache.page_size, device)


def _num_copies(shape: Shape, cache: KVCacheSpec, spec: AttentionSpec, device: torch.device) -> int:
    """Enough to be cold in the L2, four at least, and as many as the memory holds."""
    if device.type == "cpu":
        return 2
    cache_bytes = 2 * cache.num_slots * spec.num_kv_heads * spec.head_dim * spec.cache_dtype.itemsize
    token_bytes = sum(shape.query_lens) * spec.num_qo_heads * spec.head_dim * (2 * spec.dtype.itemsize + 16)
    room = int(torch.cuda.mem_get_info(device)[0] * 0.4) // (cache_bytes + token_bytes)
    return max(1, min(MOST_COPIES, room, max(4, math.ceil(COLD_BYTES / cache_bytes))))


def _geometry(backend: type[AttentionBackend], spec: AttentionSpec, cache: KVCacheSpec) -> object:
    return backend.get_kv_cache_shapes(spec, cache), backend.get_kv_cache_stride_order(cache.layout)


def _allocate(
    backend: type[AttentionBackend], spec: AttentionSpec, cache: KVCacheSpec, device: torch.device, num_copies: int
) -> list[KVCache]:
    return list(allocate_kv_cache(backend, dict.fromkeys(range(num_copies), spec), cache, device).layers.values())

"""A small engine over SGLang's pools and layers, or what stands for them, which knows every key that it has made.

Layers get random queries, keys and values through our `SGLangAttention`; each answer is compared with the float64
reference over all tokens of its request. Slots that nothing was written to hold NaN, but for the padding page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from attn_backends.adapters.sglang.backend import SGLangAttention
from attn_backends.graphs.recorder import Graph
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.cases import load_cases
from attn_backends.testing.graphs.harness import make_recorder
from attn_backends.testing.harness import output_error
from attn_backends.testing.reference import reference_attention

Rows = Sequence[tuple[int, int]]  # request and how many new tokens


@dataclass(frozen=True)
class Kind:
    """What a layer asks for."""

    window: int = -1
    logit_cap: float = 0.0
    sinks: bool = False
    scaling: float = 0.25


@dataclass(frozen=True)
class Shape:
    """A model and its pools."""

    kinds: tuple[Kind, ...] = (Kind(), Kind(window=5), Kind(logit_cap=3.0, scaling=0.5))
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    scales: tuple[float, float] | None = None  # of keys and values
    swa_pool: bool = False  # windowed layers have a pool of their own
    hnd: bool = False
    max_reqs: int = 6
    context: int = 128
    options: dict[str, Any] = field(default_factory=dict)


class _Attention(torch.nn.Module):
    """A layer as SGLang's models hold it, with its sinks beside it."""

    def __init__(self, shape: Shape, kind: Kind, layer_id: int, numbers: torch.Generator) -> None:
        super().__init__()
        self.attn = RadixAttention(
            shape.heads, shape.head_dim, kind.scaling, shape.kv_heads, layer_id, logit_cap=kind.logit_cap,
            sliding_window_size=kind.window,
        )  # fmt: skip
        self.sinks = torch.randn(shape.heads, generator=numbers) if kind.sinks else None
        if shape.scales is not None:
            self.attn.k_scale, self.attn.v_scale = (torch.tensor(scale) for scale in shape.scales)
            self.attn.k_scale_float, self.attn.v_scale_float = shape.scales


@dataclass
class Step:
    """One step's inputs by layer, and its batch."""

    rows: list[tuple[int, int]]
    batch: Any
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class Engine:
    """Requests, their slots, and what they have in the pool by layer: [tokens, heads, dim]."""

    def __init__(self, name: str, shape: Shape, seed: int = 0) -> None:
        self.shape, self.numbers = shape, torch.Generator().manual_seed(seed)
        modules = [_Attention(shape, kind, i, self.numbers) for i, kind in enumerate(shape.kinds)]
        self.layers = [module.attn for module in modules]
        self.sinks = [module.sinks for module in modules]
        pages = shape.max_reqs * -(-shape.context // shape.page_size)
        self.pool = self._make_pool(pages * shape.page_size)
        self.free = (1 + torch.randperm(pages, generator=self.numbers)).tolist()
        self.table = torch.zeros(shape.max_reqs, shape.context, dtype=torch.int32)
        self.runner = SimpleNamespace(
            model=torch.nn.ModuleList(modules), dtype=shape.dtype, kv_cache_dtype=shape.cache_dtype, device="cpu",
            page_size=shape.page_size, req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool, use_mla_backend=False, server_args=SimpleNamespace(),
        )  # fmt: skip
        self.attention = SGLangAttention(name, self.runner, shape.options)
        self.lens = [0] * shape.max_reqs
        self.keys: dict[tuple[int, int], torch.Tensor] = {}  # by request and layer
        self.values: dict[tuple[int, int], torch.Tensor] = {}

    def _make_pool(self, size: int) -> Any:
        shape = self.shape
        sizes = {
            "page_size": shape.page_size, "dtype": shape.cache_dtype, "head_num": shape.kv_heads,
            "head_dim": shape.head_dim, "device": "cpu", "enable_memory_saver": False,
        }  # fmt: skip
        ids = range(len(shape.kinds))
        if shape.swa_pool:
            swa = [i for i in ids if shape.kinds[i].window >= 0]
            if "enable_kvcache_transpose" in signature(SWAKVPool).parameters:  # in old versions
                sizes["enable_kvcache_transpose"] = False
            pool = SWAKVPool(
                size, size, swa_attention_layer_ids=swa, full_attention_layer_ids=[i for i in ids if i not in swa],
                **sizes,
            )  # fmt: skip
            order = 1 + torch.randperm(size // shape.page_size, generator=self.numbers)
            moved = torch.cat([torch.zeros(1, dtype=torch.int64), order])[:, None] * shape.page_size
            mapping = (moved + torch.arange(shape.page_size)).flatten()
            pool.register_mapping(torch.cat([mapping, mapping.new_tensor([-1])]))
        else:
            pool = MHATokenToKVPool(size, layer_num=len(shape.kinds), enable_alt_stream=False, **sizes)
        if shape.hnd:
            if not hasattr(pool, "use_hnd"):
                pytest.skip("this version of SGLang has no such pools")
            for buffers in (pool.k_buffer, pool.v_buffer):
                buffers[:] = [b.unflatten(0, (-1, shape.page_size)).transpose(1, 2).contiguous() for b in buffers]
            pool.use_hnd, pool.num_pages = True, size // shape.page_size + 1
        for i in ids:
            for buffer in pool.get_kv_buffer(i):
                buffer[1 if shape.hnd else shape.page_size :].fill_(torch.nan)
        return pool

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.numbers).to(self.shape.dtype)

    def make(self, mode: str, rows: Rows) -> Step:
        """A step's slots and numbers. In a verify `seq_lens` come without the drafts."""
        slots: list[torch.Tensor] = []
        for request, new in rows:
            first, page = self.lens[request], self.shape.page_size
            for position in range(first, first + new):
                if position % page == 0:
                    self.table[request, position] = self.free.pop() * page
                else:
                    self.table[request, position] = self.table[request, position - 1] + 1
            slots.append(self.table[request, first : first + new])
        counted = 0 if mode == "TARGET_VERIFY" else 1
        lens = torch.tensor([self.lens[r] + counted * new for r, new in rows])
        tokens = sum(new for _, new in rows)
        batch = SimpleNamespace(
            forward_mode=ForwardMode[mode], batch_size=len(rows), seq_lens=lens, seq_lens_cpu=lens.clone(),
            req_pool_indices=torch.tensor([r for r, _ in rows]), out_cache_loc=torch.cat(slots).long(),
            input_ids=torch.zeros(tokens, dtype=torch.int64), extend_seq_lens_cpu=[new for _, new in rows],
            extend_prefix_lens_cpu=[self.lens[r] for r, _ in rows], spec_info=None, out_cache_loc_is_physical=False,
        )  # fmt: skip
        shape, ids = self.shape, range(len(self.layers))
        queries = [self.random(tokens, shape.heads, shape.head_dim) * 2 for _ in ids]
        keys, values = ([self.random(tokens, shape.kv_heads, shape.head_dim) for _ in ids] for _ in range(2))
        return Step(list(rows), batch, queries, keys, values)

    def run(self, mode: str, rows: Rows) -> None:
        """An eager step, compared."""
        step = self.make(mode, rows)
        self.attention.init_forward_metadata(step.batch)
        self.check(step, [self.call(i, step.batch, step.queries[i], step.keys[i], step.values[i])
                          for i in range(len(self.layers))])  # fmt: skip

    def call(self, i: int, batch: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        sinks = {} if self.sinks[i] is None else {"sinks": self.sinks[i]}
        layer = self.layers[i]
        return self.attention.forward(query.flatten(1), key.clone(), value.clone(), layer, batch, True, **sinks)

    def check(self, step: Step, outputs: Sequence[torch.Tensor]) -> None:
        """The answers; the step's tokens are then the requests'."""
        for i, output in enumerate(outputs):
            self._remember(step, i)
            expected = self._expected(step, i)
            error = output_error(output[: len(expected)].unflatten(1, (self.shape.heads, -1)), expected)
            allowed = load_cases().tolerance(self.shape.dtype)
            assert error <= allowed, f"{self.shape.kinds[i]}, {step.rows}: off by {error:.1e}, allowed {allowed:.0e}"
        for request, new in step.rows:
            self.lens[request] += new

    def _remember(self, step: Step, i: int) -> None:
        start = 0
        for request, new in step.rows:
            for known, given, which in ((self.keys, step.keys[i], 0), (self.values, step.values[i], 1)):
                part = self._stored(given[start : start + new], which)
                known[request, i] = torch.cat([known.get((request, i), part[:0]), part])
            start += new

    def _stored(self, numbers: torch.Tensor, which: int) -> torch.Tensor:
        """What the pool keeps of them, in float64."""
        if self.shape.cache_dtype is self.shape.dtype:
            return numbers.double()
        scale = 1.0 if self.shape.scales is None else self.shape.scales[which]
        return (numbers / scale).to(self.shape.cache_dtype).double() * scale

    def _expected(self, step: Step, i: int) -> torch.Tensor:
        shape, kind, parts, start = self.shape, self.shape.kinds[i], [], 0
        spec = AttentionSpec(
            shape.heads, shape.kv_heads, shape.head_dim, scale=kind.scaling, window_left=kind.window,
            logits_soft_cap=kind.logit_cap or None, sinks=kind.sinks,
        )  # fmt: skip
        for request, new in step.rows:
            query, keys, values = step.queries[i][start : start + new], self.keys[request, i], self.values[request, i]
            parts.append(reference_attention(query, keys, values, spec, sinks=self.sinks[i])[0])
            start += new
        return torch.cat(parts)

    def forget(self, request: int, num_tokens: int) -> None:
        """Take the last tokens back, as rejected drafts are."""
        self.lens[request] -= num_tokens
        for i in range(len(self.layers)):
            for known in (self.keys, self.values):
                known[request, i] = known[request, i][: self.lens[request]]
        page = self.shape.page_size
        used = -(-self.lens[request] // page)
        freed = self.table[request, used * page : self.lens[request] + num_tokens : page] // page
        self.free += freed.tolist()


class GraphRunner:
    """One captured size and its static buffers: `out_graph` before, `in_graph` and the layers inside, as in SGLang."""

    def __init__(self, engine: Engine, bs: int, mode: str = "DECODE", query_len: int = 1, recorder: Any = None) -> None:
        self.engine, self.bs, self.query_len, shape = engine, bs, query_len, engine.shape
        self.fill = engine.attention.get_cuda_graph_seq_len_fill_value()
        tokens = bs * query_len
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode[mode], batch_size=bs, seq_lens=torch.full((bs,), self.fill),
            seq_lens_cpu=torch.full((bs,), self.fill), req_pool_indices=torch.zeros(bs, dtype=torch.int64),
            out_cache_loc=torch.zeros(tokens, dtype=torch.int64), input_ids=torch.zeros(tokens, dtype=torch.int64),
            spec_info=None, out_cache_loc_is_physical=False,
        )  # fmt: skip
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        self.inputs = [
            [torch.zeros(tokens, count, shape.head_dim, dtype=shape.dtype) for count in heads] for _ in engine.layers
        ]
        engine.attention.init_forward_metadata_out_graph(self.batch, in_capture=True)
        buffers = [engine.pool.get_kv_buffer(i) for i in range(len(engine.layers))]
        mapping = getattr(engine.pool, "full_to_swa_index_mapping", None)
        held = [engine.attention.pools, engine.sinks, self.batch, self.inputs, buffers, mapping, engine.layers]
        self.graph: Graph = (recorder or make_recorder("cpu")).capture(self._run, held)

    def _run(self) -> torch.Tensor:
        self.engine.attention.init_forward_metadata_in_graph(self.batch)
        return torch.stack([self.engine.call(i, self.batch, *given) for i, given in enumerate(self.inputs)])

    def run(self, rows: Sequence[int]) -> None:
        """A replayed step over some requests, compared."""
        engine, batch, mode = self.engine, self.batch, self.batch.forward_mode.name
        step = engine.make(mode, [(request, self.query_len) for request in rows])
        for name in ("seq_lens", "seq_lens_cpu"):
            getattr(batch, name).fill_(self.fill)
        batch.out_cache_loc.zero_()
        batch.req_pool_indices.zero_()
        for name in ("seq_lens", "seq_lens_cpu", "req_pool_indices", "out_cache_loc"):
            given = getattr(step.batch, name)
            getattr(batch, name)[: len(given)].copy_(given)
        for i, static in enumerate(self.inputs):
            for tensor, new in zip(static, (step.queries[i], step.keys[i], step.values[i]), strict=True):
                tensor[: len(new)].copy_(new)
        engine.attention.init_forward_metadata_out_graph(batch)
        engine.check(step, list(self.graph.replay()))

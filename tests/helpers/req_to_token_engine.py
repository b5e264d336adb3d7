"""A small engine in the req_to_token convention, which knows every key and value that it has made.

Layers get random queries, keys and values; each answer is compared with the float64 reference over all tokens of its
request, and the whole pool with what was written. Unused slots hold NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_backends.adapters.req_to_token.attention import ReqToTokenAttention
from attn_backends.adapters.req_to_token.batch import ForwardBatch, ForwardMode
from attn_backends.adapters.req_to_token.kv_pool import TokenKVPool
from attn_backends.adapters.req_to_token.layers import Layer
from attn_backends.graphs.recorder import Graph
from attn_backends.registry import get_backend
from attn_backends.spec import AttentionSpec, AttentionType
from attn_backends.testing.cases.cases import load_cases
from attn_backends.testing.graphs.harness import make_recorder
from attn_backends.testing.harness import output_error
from attn_backends.testing.reference import reference_attention
from tests.helpers import flashinfer_emulated  # noqa: F401 (registers)

BACKENDS = ["TORCH", "FLASHINFER_EMULATED"]
DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
HEADS = {"tp_q_head_num": 4, "tp_k_head_num": 2, "qk_head_dim": 64, "v_head_dim": 64}  # what all backends serve
SCALARS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
Rows = Sequence[tuple[int, int]]  # request and how many new tokens


def layer(layer_id: int, **how: Any) -> Layer:
    return Layer(layer_id, **(HEADS | {"scaling": 64**-0.5} | how))


FULL = layer(0)
MIXED = (FULL, layer(1, sliding_window_size=3), layer(2, logit_cap=2.0, scaling=0.5), layer(3, sliding_window_size=3))
CROSS = (FULL, layer(1, is_cross_attention=True))


def dtype_of(name: str) -> torch.dtype:
    """The finest that a backend serves."""
    served = get_backend(name).capabilities().dtypes
    return next(dtype for dtype in (torch.float32, torch.float16) if dtype in served)


@dataclass
class Request:
    """What a request has in the pool, by layer: [tokens, heads, dim], the encoder's apart."""

    encoder_len: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    num_tokens: int = 0  # of the decoder


@dataclass
class Step:
    """One step's inputs, by layer, and its batch."""

    rows: list[tuple[int, int]]
    batch: ForwardBatch
    queries: dict[int, torch.Tensor]
    keys: dict[int, torch.Tensor | None]
    values: dict[int, torch.Tensor | None]


class Engine:
    """Args as the adapter's, where they are named alike; in the finest dtype that the backend serves."""

    def __init__(
        self,
        name: str,
        layers: Sequence[Layer],
        *,
        max_reqs: int = 5,
        max_context_len: int = 40,
        num_slots: int = 220,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        seed: int = 0,
        page_size: int = 1,
        **how: Any,
    ) -> None:
        self.layers, first = layers, layers[0]
        self.device = device
        self.dtype = dtype = dtype or dtype_of(name)
        self.random = torch.Generator().manual_seed(seed)
        self.page_size, self.says_rows = page_size, False
        self.pool = TokenKVPool(num_slots, layers, dtype, device, page_size)
        for each in layers:
            for buffer in self.pool.get_kv_buffer(each.layer_id):
                buffer.fill_(torch.nan)
        self.written = {each.layer_id: [b.clone() for b in self.pool.get_kv_buffer(each.layer_id)] for each in layers}
        self.free = (1 + torch.randperm(num_slots // page_size, generator=self.random)).tolist()  # pages
        self.req_to_token = torch.zeros(max_reqs, max_context_len + 8, dtype=torch.int32, device=device)
        self.requests: dict[int, Request] = {}
        heads: dict[str, Any] = {
            "num_heads": first.tp_q_head_num,
            "num_kv_heads": first.tp_k_head_num,
            "head_dim": first.qk_head_dim,
        }
        how = heads | {"kv_cache_dtype": dtype, "q_dtype": dtype, "layers": layers, "kv_pool": self.pool} | how
        self.adapter = ReqToTokenAttention(
            name, max_context_len=max_context_len, req_to_token=self.req_to_token, device=device,
            max_req_pool_size=max_reqs, **how,
        )  # fmt: skip

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.device, self.dtype)

    def enter(self, request: int, encoder_len: int = 0) -> None:
        """A request with its row; an encoder's tokens get the front of it."""
        self.requests[request] = Request(encoder_len)
        self.req_to_token[request, :encoder_len] = self.take(encoder_len).int()
        for each in self.layers:
            for cached in (self.requests[request].keys, self.requests[request].values):
                cached[each.layer_id] = self.numbers(0, each.tp_k_head_num, each.qk_head_dim)

    def take(self, count: int) -> torch.Tensor:
        slots, self.free = self.free[:count], self.free[count:]
        return torch.tensor(slots, dtype=torch.int64)

    def slots_for(self, request: int, first: int, new: int) -> torch.Tensor:
        """Slots for a request's next tokens, of which those of a page follow one another."""
        slots: list[int] = []
        for position in range(first, first + new):
            if position % self.page_size == 0:
                slots.append(int(self.take(1)) * self.page_size)
            else:
                slots.append((slots[-1] if slots else int(self.req_to_token[request, position - 1])) + 1)
        return torch.tensor(slots, dtype=torch.int64)

    def encoder_slots(self, rows: Rows) -> torch.Tensor:
        fresh = [r for r, _ in rows if self.requests[r].encoder_len and not self.requests[r].num_tokens]
        parts = [self.req_to_token[r, : self.requests[r].encoder_len] for r in fresh]
        return torch.cat(parts).long() if parts else torch.zeros(0, dtype=torch.int64, device=self.device)

    def make(self, mode: ForwardMode, rows: Rows) -> Step:
        """A step's slots and numbers. In a verify, lengths are without the drafts."""
        slots, prefixes, encoder_slots = [], [], self.encoder_slots(rows)
        for request, new in rows:
            known = self.requests[request]
            first = known.encoder_len + known.num_tokens
            slots.append(self.slots_for(request, first, new))
            self.req_to_token[request, first : first + new] = slots[-1].int()
            prefixes.append(known.num_tokens)
        drafts = mode is ForwardMode.TARGET_VERIFY
        lens = [prefix + (0 if drafts else new) for prefix, (_, new) in zip(prefixes, rows, strict=True)]
        encoders = [self.requests[request].encoder_len for request, _ in rows]
        has_encoder = any(each.is_cross_attention for each in self.layers)
        batch = ForwardBatch(
            mode,
            torch.tensor([request for request, _ in rows], device=self.device),
            torch.tensor(lens, device=self.device),
            torch.cat(slots).to(self.device),
            torch.tensor(lens),
            prefixes if mode in (ForwardMode.EXTEND, ForwardMode.MIXED) else None,
            torch.tensor(encoders, device=self.device) if has_encoder else None,
            encoders if has_encoder else None,
            encoder_slots,
            [request for request, _ in rows] if self.says_rows else None,
        )
        step = Step(list(rows), batch, {}, {}, {})
        for each in self.layers:
            new = len(encoder_slots) if each.is_cross_attention else len(batch.out_cache_loc)
            step.queries[each.layer_id] = (
                self.numbers(len(batch.out_cache_loc), each.tp_q_head_num, each.qk_head_dim) * 2
            )
            for given in (step.keys, step.values):
                given[each.layer_id] = self.numbers(new, each.tp_k_head_num, each.qk_head_dim) if new else None
        return step

    def run(self, mode: ForwardMode, rows: Rows) -> None:
        """An eager step, compared."""
        step = self.make(mode, rows)
        self.adapter.init_forward_metadata(step.batch)
        self.check(step, [self.attend(step, each) for each in self.layers])

    def attend(self, step: Step, each: Layer, **how: Any) -> torch.Tensor:
        i = each.layer_id
        call = self.adapter.forward_decode if step.batch.forward_mode is ForwardMode.DECODE else None
        call = call or self.adapter.forward_extend
        k, v = (None if t is None else t.flatten(1) for t in (step.keys[i], step.values[i]))
        return call(step.queries[i].flatten(1), k, v, each, step.batch, **how)

    def check(self, step: Step, outputs: Sequence[torch.Tensor]) -> None:
        """The answers and the pool. The step's tokens are then the requests'."""
        for each, output in zip(self.layers, outputs, strict=True):
            self.remember(step, each)
            expected = self.expected(step, each)
            error = output_error(output[: len(expected)].view(expected.shape), expected)
            allowed = load_cases().tolerance(self.dtype)
            assert error <= allowed, f"{each}, {step.rows}: off by {error:.1e}, allowed {allowed:.0e}"
        for request, new in step.rows:
            self.requests[request].num_tokens += new
        self.check_pool()

    def check_pool(self) -> None:
        """Padding's page may hold anything; all others what was written there, and NaN."""
        for each in self.layers:
            for got, want in zip(self.pool.get_kv_buffer(each.layer_id), self.written[each.layer_id], strict=True):
                differs = ~((got == want) | (got.isnan() & want.isnan())).flatten(1).all(1)
                assert not differs[self.page_size :].any(), (
                    f"layer {each.layer_id}: slots {differs.nonzero().flatten().tolist()}"
                )

    def remember(self, step: Step, each: Layer) -> None:
        i, key, value = each.layer_id, step.keys[each.layer_id], step.values[each.layer_id]
        if key is None or value is None:
            return
        slots = step.batch.encoder_out_cache_loc if each.is_cross_attention else step.batch.out_cache_loc
        for written, new in zip(self.written[i], (key, value), strict=True):
            written[slots] = new
        start = 0
        for request, new_tokens in step.rows:
            known = self.requests[request]
            fresh = known.encoder_len if not known.num_tokens else 0
            count = fresh if each.is_cross_attention else new_tokens
            known.keys[i] = torch.cat([known.keys[i], key[start : start + count]])
            known.values[i] = torch.cat([known.values[i], value[start : start + count]])
            start += count

    def expected(self, step: Step, each: Layer) -> torch.Tensor:
        i, parts, start = each.layer_id, [], 0
        spec = AttentionSpec(
            each.tp_q_head_num, each.tp_k_head_num, each.qk_head_dim, scale=each.scaling,
            window_left=each.sliding_window_size or 0,
            logits_soft_cap=each.logit_cap or None, causal=not each.is_cross_attention,
            attention_type=AttentionType.CROSS if each.is_cross_attention else AttentionType.DECODER,
        )  # fmt: skip
        for request, new in step.rows:
            known = self.requests[request]
            query = step.queries[i][start : start + new]
            parts.append(reference_attention(query, known.keys[i], known.values[i], spec)[0])
            start += new
        return torch.cat(parts)

    def forget(self, request: int, num_tokens: int) -> None:
        """Take the last tokens back, as rejected drafts are."""
        known = self.requests[request]
        known.num_tokens -= num_tokens
        for each in self.layers:
            if not each.is_cross_attention:
                known.keys[each.layer_id] = known.keys[each.layer_id][: known.num_tokens]
                known.values[each.layer_id] = known.values[each.layer_id][: known.num_tokens]


def filled(name: str, *lens: int, layers: Sequence[Layer] = MIXED, **how: Any) -> Engine:
    """An engine whose requests 0, 1, … have so many tokens."""
    engine = Engine(name, layers, **how)
    for request in range(len(lens)):
        engine.enter(request)
    engine.run(EXTEND, list(enumerate(lens)))
    return engine


class GraphRunner:
    """One captured size and its static buffers, as engines of this convention hold them."""

    def __init__(self, engine: Engine, bs: int, query_len: int = 1, recorder: Any = None) -> None:
        self.engine, self.bs, self.query_len = engine, bs, query_len
        self.mode = ForwardMode.DECODE if query_len == 1 else ForwardMode.TARGET_VERIFY
        self.fill = engine.adapter.get_cuda_graph_seq_len_fill_value()
        tokens, device = bs * query_len, engine.device
        self.static = {
            "req_pool_indices": torch.zeros(bs, dtype=torch.int64, device=device),
            "seq_lens": torch.full((bs,), self.fill, device=device),
            "out_cache_loc": torch.zeros(tokens, dtype=torch.int64, device=device),
        }
        self.seq_lens_cpu = torch.full((bs,), self.fill)
        self.inputs = {
            each.layer_id: [
                torch.zeros(tokens, heads, each.qk_head_dim, dtype=engine.dtype, device=device)
                for heads in (each.tp_q_head_num, each.tp_k_head_num, each.tp_k_head_num)
            ]
            for each in engine.layers
        }
        self.batch = ForwardBatch(
            self.mode, **self.static, seq_lens_cpu=self.seq_lens_cpu, token_to_kv_pool=engine.pool
        )
        self.has_encoder = any(each.is_cross_attention for each in engine.layers)
        self.encoder_lens = torch.zeros(bs, dtype=torch.int64, device=device)
        encoder = {"encoder_lens": self.encoder_lens} if self.has_encoder else {}
        engine.adapter.init_forward_metadata_capture_cuda_graph(
            bs, tokens, self.static["req_pool_indices"], self.static["seq_lens"], self.mode, **encoder
        )
        held = [engine.adapter, engine.pool, self.static, self.inputs]
        self.graph: Graph = (recorder or make_recorder(device)).capture(self._run, held)

    def _run(self) -> torch.Tensor:
        outputs = [
            self.engine.adapter.forward(q, *((None, None) if each.is_cross_attention else (k, v)), each, self.batch)
            for each, (q, k, v) in zip(self.engine.layers, self.inputs.values(), strict=True)
        ]
        return torch.stack(outputs)

    def run(self, rows: Rows, *, with_host_lens: bool = True) -> torch.Tensor:
        """A replayed step, compared; what was left in padded rows' indices stays there."""
        engine, step = self.engine, self.engine.make(self.mode, [(request, self.query_len) for request, _ in rows])
        self.static["seq_lens"].fill_(self.fill)
        self.seq_lens_cpu.fill_(self.fill)
        self.static["out_cache_loc"].zero_()
        for name, static in self.static.items():
            static[: len(getattr(step.batch, name))].copy_(getattr(step.batch, name))
        self.seq_lens_cpu[: len(rows)].copy_(step.batch.seq_lens)
        for i, inputs in self.inputs.items():
            for static, new in zip(inputs, (step.queries[i], step.keys[i], step.values[i]), strict=True):
                if new is not None:  # an encoder's are there already
                    static[: len(new)].copy_(new)
        encoders = [engine.requests[request].encoder_len for request, _ in rows] + [0] * (self.bs - len(rows))
        self.encoder_lens.copy_(torch.tensor(encoders))
        encoder = {"encoder_lens": self.encoder_lens, "encoder_lens_cpu": encoders} if self.has_encoder else {}
        engine.adapter.init_forward_metadata_replay_cuda_graph(
            self.bs, self.static["req_pool_indices"], self.static["seq_lens"], int(self.seq_lens_cpu.sum()), self.mode,
            self.seq_lens_cpu if with_host_lens else None, **encoder,
        )  # fmt: skip
        outputs = self.graph.replay()
        engine.check(step, list(outputs))
        return outputs

"""A pool of SGLang's with the layers that live in it: one backend's plans, over page tables of that pool's slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from attn_backends.adapters.req_to_token.batch import StepRows
from attn_backends.adapters.req_to_token.plans import as_pages
from attn_backends.adapters.req_to_token.table import TokenTable
from attn_backends.cache.kv_cache import KVCache
from attn_backends.graphs.inputs import HeldTensors
from attn_backends.interface import AttentionStep
from attn_backends.interface.capabilities import Rejection, Unsupported
from attn_backends.interface.plans import Plans
from attn_backends.registry import select_backend, validate_options
from attn_backends.spec import AttentionSpec, KVCacheSpec, Layout, Limits


class LayerPool:
    """The layers of one pool. A model with an SWA pool has two, as windowed layers have slots of their own there.

    Args:
        name: a backend's name, used or refused; or AUTO.
        specs: the layers, by `layer_id`.
        pool: SGLang's, which holds them.
        table: page tables of the pool's slots.
        options: the backend's own.

    Raises:
        Unsupported: the backend refuses a layer, or the pool lies in memory as none of ours reads it.
    """

    def __init__(
        self, name: str, specs: Mapping[int, AttentionSpec], pool: Any, table: TokenTable, limits: Limits,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.pool, self.table = pool, table
        self.held: HeldTensors | None = None
        self.steps: Mapping[int, AttentionStep[Any]] = {}
        buffers = pool.get_kv_buffer(next(iter(specs)))
        layout, num_pages = _layout(name, buffers, table.page_size)
        self.cache = KVCacheSpec(num_pages, table.page_size, layout)
        device = table.req_to_token.device
        selection = select_backend(name, list(specs.values()), self.cache, device, options=options)
        valid = validate_options(selection.name, options)
        self.plans = Plans(selection.backend, specs, self.cache, limits, device, valid)

    def hold(self, max_rows: int, max_tokens: int) -> None:
        """Allocate what graphs of up to so many rows and tokens read."""
        limits, device = self.plans.limits, self.table.req_to_token.device
        max_pages = -(-limits.max_model_len // self.table.page_size)
        self.held = HeldTensors.make(max_rows, max_tokens, max_pages, device)
        self.plans.state.hold_graph_buffers(max_rows, self.held)

    def plan(self, rows: StepRows) -> None:
        """Plan a step, before its layers run. A graph's tensors are filled here, at capture as at replay."""
        common = self.table.self_attention(rows, held=self.held if rows.for_graph else None)
        self.steps = self.plans.plan(common)

    def bind(self, layer: Any, sinks: torch.Tensor | None) -> None:
        """Make a layer's impl at its first call, when its weights and scales are loaded.

        Raises:
            Unsupported: it has sinks where its plan has none, or the other way round.
        """
        spec = self.plans.specs[layer.layer_id]
        if (sinks is not None) != spec.sinks:
            got = f"layer {layer.layer_id} called {'with' if sinks is not None else 'without'} sinks"
            hint = "The module that holds the layer has them as `sinks` or `attention_sink_bias`, or has neither."
            raise Unsupported(self.plans.backend.get_name(), [Rejection("sinks", got, f"sinks={spec.sinks}", hint)])
        # The pool divides keys by the scale where it stores another dtype, and only there.
        scaled = spec.cache_dtype is not spec.dtype
        scales = {
            name: value if scaled and (value := getattr(layer, f"{name}_float", None)) is not None else 1.0
            for name in ("k_scale", "v_scale")
        }
        self.plans.bind(layer.layer_id, sinks=sinks, **scales)

    def write(self, layer: Any, loc: KVWriteLoc, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put a step's keys and values into SGLang's pool, by its own kernel."""
        scales = () if layer.k_scale is None else (layer.k_scale, layer.v_scale)
        key = key.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        self.pool.set_kv_buffer(layer, loc, key, value.view(-1, layer.tp_v_head_num, layer.v_head_dim), *scales)

    def kv_cache(self, layer_id: int) -> KVCache:
        """A layer's pages, as views; where they are loaded layer by layer, SGLang waits for them here."""
        return KVCache(*(self._pages(buffer) for buffer in self.pool.get_kv_buffer(layer_id)))

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.transpose(1, 2) if self.cache.layout == "HND" else as_pages(buffer, self.cache.page_size)


def _layout(name: str, buffers: tuple[torch.Tensor, torch.Tensor], page_size: int) -> tuple[Layout, int]:
    """How a pool lies in memory, and its pages: [slots, heads, dim], or [pages, heads, page_size, dim]."""
    key, _ = buffers
    if key.dim() == 3:
        return "NHD", len(key) // page_size
    if key.dim() == 4 and key.shape[2] == page_size:
        return "HND", len(key)
    hint = "Leave SGLang's own layouts out."
    raise Unsupported(name, [Rejection("kv_cache_layout", f"buffers of shape {list(key.shape)}", "nhd, hnd", hint)])

"""An engine that calls pymllm's `FlashInferAttnBackend` as its documentation does: its pool comes with every batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_backends.adapters.req_to_token.batch import ForwardMode
from attn_backends.adapters.req_to_token.flashinfer import DecodeMetadata, FlashInferAttnBackend, PrefillMetadata
from attn_backends.adapters.req_to_token.layers import Layer
from attn_backends.testing.graphs.harness import make_recorder
from tests.helpers.req_to_token_engine import DECODE, EXTEND, Engine, GraphRunner, Rows, Step, layer

MAX_CONTEXT_LEN, MAX_ROWS = 40, 5
FULL_PAGES = 256  # slots, of pages of 1 and of 16


class Emulated(FlashInferAttnBackend):
    """Over FlashInfer as it is emulated."""

    backend_name = "FLASHINFER_EMULATED"


class PymllmEngine(Engine):
    """The engine of the other tests, with the documented class, whose arguments are `how`."""

    def __init__(
        self, layers: Sequence[Layer], made: type[FlashInferAttnBackend] = Emulated, *,
        dtype: torch.dtype = torch.float16, device: str = "cpu", page_size: int = 1, **how: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            made.backend_name, layers, max_reqs=MAX_ROWS, max_context_len=MAX_CONTEXT_LEN, num_slots=FULL_PAGES,
            dtype=dtype, device=device, page_size=page_size,
        )  # fmt: skip
        first = layers[0]
        self.adapter: Any = made(
            num_heads=first.tp_q_head_num, num_kv_heads=first.tp_k_head_num, head_dim=first.qk_head_dim,
            kv_cache_dtype=dtype, q_dtype=dtype, max_context_len=MAX_CONTEXT_LEN, req_to_token=self.req_to_token,
            device=torch.device(device), max_req_pool_size=MAX_ROWS, **how,
        )  # fmt: skip

    def make(self, mode: ForwardMode, rows: Rows) -> Step:
        step = super().make(mode, rows)
        return replace(step, batch=replace(step.batch, token_to_kv_pool=self.pool))


def serve(
    made: type[FlashInferAttnBackend], device: str, page_size: int, num_heads: int, window: int | None = None
) -> PymllmEngine:
    """Prompts, decodes, and decodes in a graph, each compared with the reference: bfloat16, head dim 128, 2 KV heads.

    FlashInfer's modules for these are compiled ahead.
    """
    heads = {"tp_q_head_num": num_heads, "qk_head_dim": 128, "v_head_dim": 128, "scaling": 128**-0.5}
    layers = [layer(0, **heads)] + ([] if window is None else [layer(1, sliding_window_size=window, **heads)])
    engine = PymllmEngine(
        layers, made, dtype=torch.bfloat16, device=device, page_size=page_size, sliding_window_size=window
    )
    attn = engine.adapter
    for request in range(3):
        engine.enter(request)
    engine.run(EXTEND, [(0, 17), (1, 2), (2, 12)])
    assert isinstance(attn.forward_metadata, PrefillMetadata)
    engine.run(EXTEND, [(1, 5), (0, 3)])  # behind prefixes
    engine.run(DECODE, [(2, 1), (0, 1), (1, 1)])
    assert isinstance(attn.forward_metadata, DecodeMetadata)
    assert len(attn.forward_metadata.decode_wrappers) == len(layers)
    attn.init_cuda_graph_state(4, 4)
    graph = GraphRunner(engine, 4, 1, make_recorder(device))
    for rows in ([(0, 1), (1, 1), (2, 1)], [(2, 1)], [(1, 1), (0, 1)]):
        graph.run(rows)
        assert attn.forward_metadata.decode_wrappers == attn.decode_cuda_graph_metadata[4]
    engine.run(EXTEND, [(2, 6)])
    engine.run(DECODE, [(1, 1), (2, 1)])
    assert attn.plans.plans.cache.page_size == page_size
    return engine

"""Drives captured steps through the interface alone: one state, some layers, one padded size, one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.cache.kv_cache import KVCache
from attn_backends.graphs.recorder import CudaRecorder, GraphRecorder
from attn_backends.interface import AttentionState, AttentionStep
from attn_backends.spec import KVCacheSpec, Limits
from attn_backends.step.device import DeviceCopy
from attn_backends.step.table import StepTable
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.graphs.simulator import GraphSimulator
from attn_backends.testing.harness import Layer, Result


def make_recorder(device: torch.device | str) -> GraphRecorder:
    """CUDA graphs on a GPU; on a CPU the simulator."""
    return CudaRecorder() if torch.device(device).type == "cuda" else GraphSimulator()


def graph_batch(batch: Batch, num_rows: int, query_len: int) -> CommonAttentionMetadata:
    """A batch, padded to the rows of a graph."""
    common = CommonAttentionMetadata.from_sequence_groups(
        batch.groups, batch.cache.page_size, batch.device, num_rows - len(batch.rows), query_len
    )
    return replace(common, for_graph=True)


def step_table(limits: Limits, cache: KVCacheSpec, device: torch.device | str) -> StepTable:
    """One that has a CSR on its device, on a CPU too."""
    device = torch.device(device)
    copied = None if device.type == "cuda" else lambda rows: DeviceCopy(rows, device)
    return StepTable(limits, cache, device, make_side=copied)


def batch_of_table(table: StepTable, batch: Batch, num_rows: int, query_len: int) -> CommonAttentionMetadata:
    """`graph_batch`, as the next step of a table that is cleared for it."""
    rows = [row.data for row in batch.rows]
    for name in [*table.request_ids]:
        table.leave(name)
    for i, row in enumerate(rows):
        assert row.pages is not None
        table.enter(str(i), row.pages)
    lens = [row.context_len for row in rows], [row.query_len for row in rows]
    padded = num_rows - len(rows)
    return table.step(*lens, num_padded_reqs=padded, padded_query_len=query_len, for_graph=True).common


def capture(
    layers: Sequence[Layer], examples: Sequence[Batch], num_rows: int, query_len: int, table: StepTable | None = None
) -> CapturedStep:
    """A step of layers that share a state, captured in a clone of that; with a table its batches alone are served."""
    state, device = layers[0].state, examples[0].device
    inputs, make_common = (table.side.buffers, partial(batch_of_table, table)) if table else (None, graph_batch)
    with state.graph_capture(num_rows, inputs):
        clone = state.graph_clone(num_rows, query_len)
        return CapturedStep(layers, clone, examples, num_rows, query_len, make_recorder(device), make_common)


class CapturedStep:
    """A graph over layers that share a state, each with inputs and a pool that stay where they are.

    Args:
        layers: as `make_layers` makes them.
        clone: of their state, for `num_rows` rows of `query_len` tokens; of mixed batches for `num_tokens` in all.
        examples: one batch a layer, to capture with.
        make_common: what pads a batch of so many rows, of so many tokens each.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        clone: AttentionState[Any],
        examples: Sequence[Batch],
        num_rows: int,
        query_len: int,
        recorder: GraphRecorder,
        make_common: Callable[[Batch, int, int], CommonAttentionMetadata] = graph_batch,
        num_tokens: int = 0,
    ) -> None:
        self.layers = layers
        self.make_common = make_common
        self.clone = clone
        self.num_rows = num_rows
        self.query_len = query_len
        self.num_tokens = num_tokens or num_rows * query_len
        self.guards = layers[0].guards
        place = self.guards.place
        self.inputs = [self._empty_inputs(batch) for batch in examples]
        shapes = [(self.num_tokens, each.spec.num_qo_heads, each.spec.head_dim_vo) for each in examples]
        self.outputs = [place(batch.query.new_zeros(shape)) for batch, shape in zip(examples, shapes, strict=True)]
        self.caches = [KVCache(*map(place, pool)) for batch in examples if (pool := batch.fresh_pool()) is not None]
        self.put_in(examples)
        with self.guards.watching():
            steps = [
                clone.begin_forward(layer.builder.build_for_cudagraph_capture(self._common(batch)))
                for layer, batch in zip(layers, examples, strict=True)
            ]
            held = [clone, self.inputs, self.outputs, self.caches, [layer.impl for layer in layers]]
            self.graph = recorder.capture(lambda: self._run(steps), held)
        self.guards.check("after the capture")

    def _common(self, batch: Batch) -> CommonAttentionMetadata:
        return self.make_common(batch, self.num_rows, self.query_len)

    def _empty_inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Query, key and value; a layer whose batches bring no keys is given none."""
        empty = batch.query, batch.key, batch.value
        query, key, value = (self.guards.place(t.new_zeros(self.num_tokens, *t.shape[1:])) for t in empty)
        return (query, key, value) if len(batch.key) else (query, None, None)

    def _run(self, steps: Sequence[AttentionStep[Any]]) -> torch.Tensor:
        for layer, step, given, cache, output in zip(
            self.layers, steps, self.inputs, self.caches, self.outputs, strict=True
        ):
            layer.impl.forward(*given, cache, step, output)
        return self.outputs[-1]

    def put_in(self, batches: Sequence[Batch], keep_pools: bool = False) -> None:
        """Write a batch a layer where the graph reads layers' inputs and pools; nothing is planned."""
        for given, cache, batch in zip(self.inputs, self.caches, batches, strict=True):
            for static, new in zip(given, (batch.query, batch.key, batch.value), strict=True):
                if static is not None:
                    static.fill_(torch.nan)  # what stands in padded rows must not matter
                    static[: len(new)].copy_(new)
            if not keep_pools:
                for cached, now in zip(cache, batch.pool or (), strict=True):
                    cached.copy_(now)

    def fill(self, batches: Sequence[Batch], keep_pools: bool = False) -> None:
        """Put a batch a layer, of equal rows, where the graph reads. `keep_pools`: what the last replay left in the
        pools is what the batches have cached."""
        self.put_in(batches, keep_pools)
        with self.guards.watching():
            for layer, batch in zip(self.layers, batches, strict=True):
                self.clone.begin_forward(layer.builder.build(0, self._common(batch)))

    def run(self, batches: Sequence[Batch]) -> list[Result]:
        """`fill`, and what `replay` makes of it."""
        self.fill(batches)
        return self.replay()

    def replay(self) -> list[Result]:
        """What the graph made of it, a result a layer; the outputs of padded rows behind the others.

        Raises:
            GuardError: something was written beyond a tensor.
        """
        self.graph.replay()
        self.guards.check("after a replay")
        return [
            Result(output.clone(), None, KVCache(*(tensor.clone() for tensor in cache)))
            for output, cache in zip(self.outputs, self.caches, strict=True)
        ]

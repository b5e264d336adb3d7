"""`accelerate: compile`: the Hugging Face model as one graph, made by torch.compile for a CPU or a GPU.

On a CPU a graph holds a whole decode step, attention included, if the backend lets the compiler see through it
(`AttentionImpl.trace`): no Python runs between the layers. Other steps, those with prompts, run as without it.

Elsewhere attention is one operator in the graph (context.py), which runs Python of ours; on a GPU the forward
can be captured like any other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch.utils.dlpack import from_dlpack

from attn_backends.batch.common import SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import KVCache
from attn_backends.engine.models.context import AttentionContext, NewTokens, Operator, StepContext, during
from attn_backends.engine.models.fused.cpu import FusedLayer
from attn_backends.engine.models.fused.linears import MergedSlice, MklLinear, PackedLinear
from attn_backends.engine.models.fused.native import NativeLayer, NativeLinear
from attn_backends.engine.models.loaded_model import LoadedModel, run_module
from attn_backends.engine.models.torch_graphs import (
    CPP,
    ONE,
    SEVERAL,
    TUNED,
    TWO,
    Graph,
    GraphsBySize,
    Others,
    check_compiler,
    make_graph,
    nothing,
    run_graph,
)
from attn_backends.engine.outputs import Report, silent
from attn_backends.interface import AttentionImpl, AttentionMetadataBuilder

Inputs = tuple[tuple[torch.Tensor, ...], ...]  # what a traced step reads, by plan group
Caches = tuple[KVCache, ...]  # by layer

TRACED_KEYS = 64  # that a decode graph is made with, a row


@dataclass(frozen=True)
class CompiledModel(LoadedModel):
    """A model whose forward is a graph, attention an operator in it; it runs as it is where there is no graph."""

    graphs: GraphsBySize = field(kw_only=True)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        graph = self.graphs.fit(len(token_ids))
        if graph is None:
            return super().forward(token_ids, positions, logits_at, context)
        with during(context):
            return run_graph(graph, token_ids, positions, logits_at)


@dataclass(frozen=True)
class TracedModel(LoadedModel):
    """A model whose decode steps are a graph, attention in it; other steps run the model as it is."""

    graphs: GraphsBySize = field(kw_only=True)
    first_layers: tuple[int, ...] = field(kw_only=True)  # one of each plan group
    caches: Caches = field(kw_only=True)  # as the graphs take them

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        graph = self.graphs.fit(len(token_ids))
        inputs = self._inputs(cast(StepContext, context)) if graph is not None else None
        if graph is None or inputs is None:
            return super().forward(token_ids, positions, logits_at, context)
        return run_graph(graph, token_ids, positions, logits_at, inputs, self.caches)

    def _inputs(self, step: StepContext) -> Inputs | None:
        inputs = []
        for layer in self.first_layers:
            of_group = step.impls[layer].trace_inputs(step.steps[layer].metadata)
            if of_group is None:
                return None
            inputs.append(of_group)
        return tuple(inputs)


@dataclass(frozen=True)
class ModelToCompile(LoadedModel):
    """A model for a CPU, compiled once its layers' impls and caches are known."""

    report: Report = field(kw_only=True)

    def prepared(
        self,
        builders: Sequence[AttentionMetadataBuilder[Any]],
        impls: Mapping[int, AttentionImpl[Any]],
        caches: Mapping[int, KVCache],
    ) -> LoadedModel:
        """The compiled model. Its first runs write to the caches: they hold nothing yet."""
        module = self.module if _has_operators(self.module) else self.source
        with _told(self.report):
            if _example_inputs(builders, impls, 2) is None:
                return CompiledModel(**_kept(self), graphs=_cpu_graphs(module, _with_operator(module)))
            own = tuple(_alone(cache) for _, cache in sorted(caches.items()))
            traced = _with_attention(module, builders, impls)
            graphs = _cpu_graphs(module, traced, lambda rows: (_example_inputs(builders, impls, rows), own))
        first_layers = tuple(builder.group.layers[0] for builder in builders)
        return TracedModel(**_kept(self), graphs=graphs, first_layers=first_layers, caches=own)


def compile_model(model: LoadedModel, device: torch.device, report: Report = silent) -> LoadedModel:
    """Compile a model; on a CPU, have it compiled by `prepared`.

    Raises:
        ModelError: no C++ compiler for a CPU, or the model's code cannot be one graph.
    """
    if device.type == "cpu":
        check_compiler()
        # torch writes a product of one token as a loop, which takes longer than two tokens.
        return ModelToCompile(**_kept(model) | {"min_tokens": 2}, report=report)
    with _told(report):
        whole = _with_operator(model.source)
        graphs = GraphsBySize(
            make_graph(whole, ONE, {}, device=device), 1, make_graph(whole, SEVERAL, {}, device=device)
        )
    return CompiledModel(**_kept(model), graphs=graphs)


def _has_operators(module: torch.nn.Module) -> bool:
    """Whether a model's products are operators of ours, every one, and its layers fused."""
    kinds = {type(each) for each in module.modules()}
    ours = {FusedLayer, MklLinear} <= kinds or {NativeLayer, NativeLinear} <= kinds
    return ours and not kinds & {torch.nn.Linear, PackedLinear, MergedSlice}


def _cpu_graphs(module: Any, whole: Graph, others: Others = nothing) -> GraphsBySize:
    if _has_operators(module):
        return GraphsBySize(None, 0, make_graph(whole, SEVERAL, CPP, others))
    if next(module.parameters()).dtype is torch.float32:
        # Products of two tokens are faster on the weights as they are; of more, in the layers of the eager model.
        return GraphsBySize(make_graph(whole, TWO, CPP, others), 2, None)
    return GraphsBySize(None, 0, make_graph(whole, SEVERAL, TUNED, others))


def _with_operator(module: Any) -> Graph:
    """The module's forward, attention as the operator."""

    def whole(token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor) -> torch.Tensor:
        return run_module(module, token_ids, positions, logits_at, Operator())

    return whole


class _Traced:
    """The attention context that a decode graph is traced with: each layer's impl, inputs and cache."""

    def __init__(self, impls: Mapping[int, AttentionImpl[Any]], inputs: Mapping[int, Any], caches: Caches) -> None:
        self.impls, self.inputs, self.caches = impls, inputs, caches

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        layer = module.layer_idx
        return self.impls[layer].trace(*new, self.caches[layer], self.inputs[layer])


def _with_attention(
    module: Any, builders: Sequence[AttentionMetadataBuilder[Any]], impls: Mapping[int, AttentionImpl[Any]]
) -> Graph:
    """The module's forward, attention in it, given the inputs of each plan group and each layer's cache."""
    impls = dict(impls)
    groups = {layer: index for index, builder in enumerate(builders) for layer in builder.group.layers}

    def whole(
        token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor, inputs: Inputs, caches: Caches
    ) -> torch.Tensor:
        context = _Traced(impls, {layer: inputs[group] for layer, group in groups.items()}, caches)
        return run_module(module, token_ids, positions, logits_at, context)

    return whole


def _example_inputs(
    builders: Sequence[AttentionMetadataBuilder[Any]], impls: Mapping[int, AttentionImpl[Any]], num_rows: int
) -> Inputs | None:
    """What the layers read of a step of rows that decode; None if a group cannot be traced."""
    inputs = []
    for builder in builders:
        pages = [0] * (-(-TRACED_KEYS // builder.cache.page_size))
        row = SequenceData(TRACED_KEYS - 1, 1, pages)
        groups = [SequenceGroup(str(index), (row,)) for index in range(num_rows)]
        of_group = impls[builder.group.layers[0]].trace_inputs(builder.build_from_groups(groups))
        if of_group is None:
            return None
        inputs.append(tuple(tensor.clone() for tensor in of_group))  # the graph would hold on to how views came about
    return tuple(inputs)


def _alone(cache: KVCache) -> KVCache:
    """The same memory, as tensors that share it with no other layer's, else the compiler copies whole caches."""
    alone = KVCache(*map(from_dlpack, cache))
    for tensor in alone:
        torch._dynamo.mark_static(tensor)
    return alone


@contextmanager
def _told(report: Report) -> Iterator[None]:
    report("compiling the model: a minute or two, less when it was compiled before")
    started = time.perf_counter()
    yield
    report(f"compiled the model in {time.perf_counter() - started:.0f} s")


def _kept(model: LoadedModel) -> dict[str, Any]:
    return {each.name: getattr(model, each.name) for each in fields(LoadedModel)}

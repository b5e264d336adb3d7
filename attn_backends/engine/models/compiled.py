"""`accelerate: compile`: the Hugging Face model as graphs, made by torch.compile for a GPU.

Attention is one operator in them (context.py), which runs Python of ours; the forward can be captured like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.exc import TorchDynamoException

from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.context import AttentionContext, Blank, Operator, during
from attn_backends.engine.models.loaded_model import LoadedModel, run_module
from attn_backends.engine.outputs import Report, silent

Graph = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # tokens, positions, logits_at to logits

# Tokens and logits that a graph is made with. A size of 1 would be constant: a graph for any size is for 2 and more.
SEVERAL, ONE = (16, 15), (1, 1)

_numbers = count()  # of compiled functions


@dataclass(frozen=True)
class CompiledModel(LoadedModel):
    """A model whose forward is a graph, attention an operator in it."""

    one: Graph = field(kw_only=True)  # for a step of one token
    several: Graph = field(kw_only=True)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        with during(context):
            return run_graph(self.one if len(token_ids) == 1 else self.several, token_ids, positions, logits_at)


def compile_model(model: LoadedModel, device: torch.device, report: Report = silent) -> CompiledModel:
    """Compile a model whose layers are as transformers made them.

    Raises:
        ModelError: the model's code cannot be one graph.
    """
    report("compiling the model: a minute or two, less when it was compiled before")
    started = time.perf_counter()
    one, several = (_make_graph(model.module, sizes, device) for sizes in (ONE, SEVERAL))
    report(f"compiled the model in {time.perf_counter() - started:.0f} s")
    return CompiledModel(
        **{each.name: getattr(model, each.name) for each in fields(LoadedModel)}, one=one, several=several
    )


def run_graph(graph: Graph, token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor) -> torch.Tensor:
    padded = F.pad(logits_at, (0, max(0, min(2, len(token_ids)) - len(logits_at))))
    return graph(token_ids, positions, padded)[: len(logits_at)]


def _make_graph(module: Any, sizes: tuple[int, int], device: torch.device) -> Graph:
    """The graph for 2 tokens and logits or more, or for `ONE` and nothing else; made by a first run."""

    def whole(token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor) -> torch.Tensor:
        return run_module(module, token_ids, positions, logits_at, Operator())

    # A model does not change once loaded: all that can is its input's sizes.
    options: dict[str, Any] = {"guard_filter_fn": _only_sizes}
    graph: Graph = torch.compile(_own(whole), fullgraph=True, dynamic=sizes is not ONE, options=options)
    tokens, logits = (torch.arange(size, device=device) for size in sizes)
    try:
        with torch.no_grad(), during(Blank()):
            graph(torch.zeros_like(tokens), tokens, logits)
    except TorchDynamoException as error:
        raise ModelError(
            f"the model cannot be compiled as one graph; set accelerate: on to run it without: {error}"
        ) from error
    return graph


def _own(function: Any) -> Any:
    """The function with its own code, by which torch keeps graphs: another model's, unguarded, would serve for it."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)


def _only_sizes(guards: Any) -> list[bool]:
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]

"""`compile: model`: the Hugging Face model as one graph, made by torch.compile for a CPU or a GPU.

Python objects cannot enter a graph. Attention is one operator in it, `attn_backends::attend`, which has its layer's
number and finds its step in a context variable, set around each forward and restored behind it. Between the layers
there is no Python of ours, so that on a GPU the forward can be captured like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from attn_backends.engine.checkpoint import ModelError, Report, silent
from attn_backends.engine.hf import AttentionContext, LoadedModel

Graph = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # tokens, positions, logits_at to logits

# Tokens and logits that a graph is made with, and its products tuned for. torch would keep equal ones equal, and a size
# of 1 constant: a graph for any size is for 2 and more.
SEVERAL, TWO, ONE = (16, 15), (3, 2), (1, 1)

FROZEN = {"freezing": True}  # weights reordered into constants of the graph; the originals stay
# Per shape, the faster of oneDNN's product and torch's own, with AMX where the CPU has it: measured while compiling.
TUNED = FROZEN | {
    "max_autotune": True,
    "max_autotune_gemm_backends": "ATEN,CPP",
    "max_autotune_report_choices_stats": False,
    "autotune_num_choices_displayed": 0,
}

_numbers = count()  # of compiled functions
_step: ContextVar[AttentionContext] = ContextVar("attn_backends_step")


@contextmanager
def during(context: AttentionContext) -> Iterator[None]:
    """`context` is the step of every `attend` inside."""
    token = _step.set(context)
    try:
        yield
    finally:
        _step.reset(token)


@cache
def _place(layer: int) -> torch.nn.Module:
    """Stands for an attention module, of which a context needs the number."""
    place = torch.nn.Module()
    place.layer_idx = layer  # type: ignore[assignment]
    return place


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    """As `AttentionContext.attend` of the current step; the layer's impl has the constants."""
    with torch.inference_mode():  # as without a graph: a backend's buffers may have been made in it
        return _step.get().attend(_place(layer), query, key, value, {})


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    """What it returns, by shape alone: [num_tokens, num_qo_heads, head_dim_vo]."""
    return query.new_empty(*query.shape[:2], value.shape[2])


# By hand, as `torch.library.custom_op` checks every call for aliases, once a layer and step.
_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer) -> Tensor")
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("attn_backends::attend", _attended, lib=_library)


class _InGraph:
    """The attention context that a graph is traced with: puts the operator where attention is."""

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, constants: Mapping[str, Any]
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attn_backends.attend(query, key, value, module.layer_idx)
        return out


class _Blank:
    """The step of a graph's first run, which makes it: attention gives zeros."""

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, constants: Mapping[str, Any]
    ) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], value.shape[2])


@dataclass(frozen=True)
class CompiledModel(LoadedModel):
    """A model whose forward is compiled: one graph for few tokens, if it has one, and one for more."""

    few: Graph | None = field(default=None, kw_only=True)
    most_few: int = field(default=0, kw_only=True)  # tokens
    more: Graph = field(kw_only=True)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        graph = self.few if self.few is not None and len(token_ids) <= self.most_few else self.more
        padded = F.pad(logits_at, (0, max(0, min(2, len(token_ids)) - len(logits_at))))
        with during(context):
            return graph(token_ids, positions, padded)[: len(logits_at)]


def compile_model(model: LoadedModel, device: torch.device, report: Report = silent) -> CompiledModel:
    """Compile a model that no layer of was replaced.

    Raises:
        ModelError: no C++ compiler for a CPU, or the model's code cannot be one graph.
    """
    if device.type == "cpu":
        _check_compiler()
    report("compiling the model: a minute or two, less when it was compiled before")
    started = time.perf_counter()
    dtype = next(model.module.parameters()).dtype
    kept: dict[str, Any] = {each.name: getattr(model, each.name) for each in fields(LoadedModel)}
    graphs: dict[str, Any]
    if device.type != "cpu":
        graphs = {"few": _graph(model.module, device, ONE, {}), "most_few": 1}
        graphs["more"] = _graph(model.module, device, SEVERAL, {})
    elif dtype is torch.float32:  # products of two tokens are faster on the weights as they are, which are kept anyway
        graphs = {"few": _graph(model.module, device, TWO, {}), "most_few": 2}
        graphs["more"] = _graph(model.module, device, SEVERAL, FROZEN)
        kept["min_tokens"] = 2  # torch writes a product of one token as a loop, which takes longer
    else:
        graphs = {"more": _graph(model.module, device, SEVERAL, TUNED)}
        kept["min_tokens"] = 2
    report(f"compiled the model in {time.perf_counter() - started:.0f} s")
    return CompiledModel(**kept, **graphs)


def _graph(module: Any, device: torch.device, sizes: tuple[int, int], settings: Mapping[str, Any]) -> Graph:
    """The graph for 2 tokens and logits or more, or for `ONE` and nothing else; made by a first run."""

    def whole(token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_at,
            attention_context=_InGraph(),
        ).logits[0]
        return logits

    # A model does not change once loaded: all that can is its input's sizes.
    options: dict[str, Any] = {"guard_filter_fn": _only_sizes}
    graph: Graph = torch.compile(_own(whole), fullgraph=True, dynamic=sizes is not ONE, options=options)
    tokens, logits = (torch.arange(size, device=device) for size in sizes)
    try:
        # Around the run, not in the options: tracing has to see `freezing` too.
        with torch.no_grad(), inductor_config.patch(dict(settings)), during(_Blank()):
            graph(torch.zeros_like(tokens), tokens, logits)
    except (TorchDynamoException, CppCompileError) as error:
        raise ModelError(
            f"{type(module).__name__} cannot be compiled as one graph; set compile: none to run it as it is: {error}"
        ) from error
    return graph


def _own(function: Any) -> Any:
    """With code of its own, by which torch keeps graphs: another model's, unguarded, would serve for this one's."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)


def _only_sizes(guards: Any) -> list[bool]:
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


def _check_compiler() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ModelError(
            "compile: model needs a C++ compiler on a CPU, and there is none: install one (on Debian: apt install g++) "
            "or set compile: none"
        ) from error

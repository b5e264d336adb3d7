"""One graph of a model's forward by torch.compile, for one number of tokens or for any: how it is made, and called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch.fx.experimental import _config

from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.context import Blank, during
from attn_backends.kernels.c_shims import c_shims

Graph = Callable[..., torch.Tensor]  # tokens, positions, logits_at, … to logits
Others = Callable[[int], tuple[Any, ...]]  # a number of tokens to a graph's other arguments, as its first run has them

# Tokens and logits that a graph is made with, and its products tuned for. A size of 1 would be constant: a graph for
# any size is for 2 and more.
SEVERAL, TWO, ONE = (16, 15), (3, 2), (1, 1)

# Calls of kernels and of the libraries' products from C++, not from Python; those calls compiled without much effort.
CPP = {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
# Weights reordered into constants of the graph; the originals stay. Per shape, the faster of oneDNN's product and
# torch's own, with AMX where the CPU has it: measured while compiling.
TUNED = CPP | {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "ATEN,CPP",
    "max_autotune_report_choices_stats": False,
    "autotune_num_choices_displayed": 0,
}

CPU = torch.device("cpu")
shapes_config: Any = _config  # its `patch` is made at run time
_numbers = count()  # of compiled functions


def nothing(num_tokens: int) -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True)
class GraphsBySize:
    """One graph for few tokens and one for more; either may be missing."""

    few: Graph | None
    most_few: int  # tokens
    more: Graph | None

    def fit(self, num_tokens: int) -> Graph | None:
        return self.few if self.few is not None and num_tokens <= self.most_few else self.more


def run_graph(
    graph: Graph, token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor, *others: Any
) -> torch.Tensor:
    padded = F.pad(logits_at, (0, max(0, min(2, len(token_ids)) - len(logits_at))))
    return graph(token_ids, positions, padded, *others)[: len(logits_at)]


def make_graph(
    whole: Graph,
    sizes: tuple[int, int],
    settings: Mapping[str, Any],
    others: Others = nothing,
    device: torch.device = CPU,
) -> Graph:
    """The graph for 2 tokens and logits or more, or for `ONE` and nothing else; made by a first run."""
    # A model does not change once loaded: all that can is its input's sizes.
    options: dict[str, Any] = {"guard_filter_fn": _only_sizes}
    graph: Graph = torch.compile(_own(whole), fullgraph=True, dynamic=sizes is not ONE, options=options)
    tokens, logits = (torch.arange(size, device=device) for size in sizes)
    try:
        # Around the run, not in the options: tracing has to see `freezing` too. Numbers of keys that are equal in the
        # example need not stay equal: no duck shapes.
        with (
            torch.no_grad(),
            inductor_config.patch({**settings, "aot_inductor.custom_ops_to_c_shims": c_shims()}),
            shapes_config.patch(use_duck_shape=others is nothing),
            during(Blank()),
        ):
            graph(torch.zeros_like(tokens), tokens, logits, *others(sizes[0]))
    except (TorchDynamoException, CppCompileError) as error:
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


def check_compiler() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ModelError(
            "accelerate: compile needs a C++ compiler on a CPU, and there is none: install one (on Debian: apt install "
            "g++) or set accelerate: on"
        ) from error

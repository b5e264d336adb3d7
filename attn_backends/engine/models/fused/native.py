"""Decoder layers of the Llama form as two operators in C around attention: what a CPU with AVX-512 decodes with.

Before attention: norm, the product for queries, keys and values, rotation. Behind it: the output's product, residual,
norm, the gated MLP, residual. Weights keep their form, are shared with the original layer, and lie in the order in
which a step reads them. The operators are torch's own (C calls C), so whatever records torch sees them.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_backends.engine.models.fused.huge_pages import settle
from attn_backends.engine.models.fused.llama_form import Angles, LlamaLayer
from attn_backends.kernels.c_compiler import CompileError, load

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("layer.c")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
LEAST_ROWS = 6  # of a product: a tile's
OTHER_TOKENS = "tokens {} in {} for weights in {}: give [..., {}] of that dtype"
OTHER_ANGLES = "angles {} in {} for heads of {} in {}: give one of that dtype for each of a head's numbers"
CONVERTED = "weights in {} were made {} after they were loaded: load the model in that dtype"


class Operators(NamedTuple):
    """The operators of `layer.c` for one dtype, all of whose tensors are contiguous."""

    before: Any
    behind: Any
    product: Any


_SCHEMAS = {
    "llama_before": "(Tensor hidden, Tensor norm, Tensor weight, Tensor cos, Tensor sin, int head_dim, int queries, "
    "float epsilon) -> (Tensor, Tensor, Tensor)",
    "llama_behind": "(Tensor hidden, Tensor attended, Tensor out, Tensor norm, Tensor gate, Tensor up, Tensor down, "
    "float epsilon) -> Tensor",
    "rows_product": "(Tensor tokens, Tensor weight, Tensor bias) -> Tensor",
}
_library = torch.library.Library("attn_backends", "FRAGMENT")


@cache
def operators(dtype: torch.dtype) -> Operators | None:
    """Compiled at the first question; None where there are none, which is logged if a compiler is to blame."""
    # The vectors that the C is written with; for bfloat16, products of it.
    if dtype not in DTYPES or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    if dtype is not torch.float32 and not torch.cpu._is_avx512_bf16_supported():
        return None
    name = DTYPES[dtype]
    try:
        library = load(SOURCE, {name.upper(): 1, "DTYPE": name})
    except CompileError as error:
        logger.warning("layers in torch's operators, which is slower, as C cannot be compiled: %s", error)
        return None
    return Operators(*_defined(name, library))


def _defined(name: str, library: ctypes.CDLL) -> list[Any]:
    """The operators of a dtype, which torch takes once a process."""
    if not hasattr(torch.ops.attn_backends, f"llama_before_{name}"):
        for each, schema in _SCHEMAS.items():
            _library.define(f"{each}_{name}{schema}")
        if library.implement():
            raise RuntimeError(f"torch {torch.__version__} does not take operators from C: set accelerate: off")
    return [getattr(torch.ops.attn_backends, f"{each}_{name}").default for each in _SCHEMAS]


def serves(layer: Any) -> bool:
    """Whether the products of a layer of the Llama form are as large as a tile, and its heads have two halves."""
    attention, mlp = layer.self_attn, layer.mlp
    head_dim: int = attention.head_dim
    rows = (head_dim, *(len(linear.weight) for linear in (attention.k_proj, mlp.up_proj, mlp.down_proj)))
    return min(rows) >= LEAST_ROWS and head_dim % 2 == 0


class NativeLinear(torch.nn.Module):
    """`torch.nn.Linear` for inference, over its weight as it lies."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, torch.nn.Parameter) else torch.nn.Parameter(weight, False)
        settle([self.weight])
        self.bias = weight.new_empty(0) if bias is None else bias.detach().to(weight.dtype).contiguous()
        self.dtype = weight.dtype  # of the operator, whatever a weight is made later
        found = operators(weight.dtype)
        assert found is not None
        self.product = found.product

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [..., in_features] -> [..., out_features]
        weight = self.weight
        if weight.dtype is not self.dtype:
            raise ValueError(CONVERTED.format(self.dtype, weight.dtype))
        if tokens.dtype is not self.dtype or tokens.shape[-1] != weight.shape[1]:
            raise ValueError(OTHER_TOKENS.format(list(tokens.shape), tokens.dtype, self.dtype, weight.shape[1]))
        out: torch.Tensor = self.product(tokens.contiguous(), weight, self.bias)
        return out


class NativeLayer(LlamaLayer):
    """Takes the place of a decoder layer; `attention_context` gets q, k and v as from the original."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
        first, second = (norm.weight.detach().float().contiguous() for norm in norms)
        heads = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        others = [attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
        flat = settle(heads + others)
        merged = flat[: sum(weight.numel() for weight in heads)].view(-1, first.shape[0])
        out, gate, up, down = (weight.detach() for weight in others)
        self.first, self.second = (first, merged), (out, second, gate, up, down)
        self.epsilons = tuple(float(norm.variance_epsilon) for norm in norms)
        found = operators(merged.dtype)
        assert found is not None
        self.operators = found
        self.dtype, self.width = merged.dtype, first.shape[0]

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden]
        *,
        position_embeddings: Angles | None,
        attention_context: Any,
        **unused: Any,
    ) -> torch.Tensor:
        angles = self.angles(hidden_states, position_embeddings)
        if hidden_states.dtype is not self.dtype or hidden_states.shape[-1] != self.width:
            raise ValueError(
                OTHER_TOKENS.format(list(hidden_states.shape), hidden_states.dtype, self.dtype, self.width)
            )
        for each in angles:
            if each.dtype is not self.dtype or each.shape[-1] != self.head_dim:
                raise ValueError(OTHER_ANGLES.format(list(each.shape), each.dtype, self.head_dim, self.dtype))
        hidden, cos, sin = (each.contiguous() for each in (hidden_states, *angles))
        heads = self.operators.before(hidden, *self.first, cos, sin, self.head_dim, self.num_queries, self.epsilons[0])
        attended = attention_context.attend(self.place, heads, {"scaling": self.place.scaling})
        out: torch.Tensor = self.operators.behind(hidden, attended.contiguous(), *self.second, self.epsilons[1])
        return out

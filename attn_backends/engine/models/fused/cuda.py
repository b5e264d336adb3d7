"""Decoder layers of the Llama form with few launches: what a GPU decodes with.

The Hugging Face layer is some thirty launches, each a few microseconds, however few its tokens. Here q, k and v are one
product and gate and up another; products add the residual; normalisation, rotation and gate are a launch each, and for
one token part of the products. A layer is replaced only if its fused form agrees with it on random input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from attn_backends.engine.models.context import NewTokens
from attn_backends.engine.models.fused.kernels import gated, one_token_linear, pays, rms_norm, rotate_
from attn_backends.engine.models.fused.llama_form import Angles, LlamaLayer, merged_weights, replace_layers

TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 3e-2}  # relative, ‖fused - original‖ / ‖original‖


class Norm(torch.nn.Module):
    """An RMS norm as one launch."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [..., size]
        return rms_norm(hidden.flatten(0, -2), self.weight, self.epsilon).view_as(hidden)


class FusedCudaLayer(LlamaLayer):
    """Takes the place of a decoder layer; `attention_context` gets q, k and v as from the original."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = torch.nn.ModuleList([Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)])
        self.qkv = merged_weights(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.down = attention.o_proj.weight, mlp.down_proj.weight
        self.gate_up = merged_weights(mlp.gate_proj, mlp.up_proj)

    def heads(self, hidden: torch.Tensor, angles: Angles) -> NewTokens:
        heads = self._normed_product(hidden, 0, self.qkv).unflatten(1, (-1, self.head_dim))
        rotate_(heads, self.num_rotated, *(each[0] for each in angles))
        query, key, value = heads.tensor_split((self.num_queries, self.num_rotated), 1)
        return query, key, value

    def behind(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = _plus(hidden, attended, self.out)
        activated = self._normed_product(hidden, 1, self.gate_up, is_gated=True)
        return _plus(hidden, activated, self.down)

    def _normed_product(
        self, hidden: torch.Tensor, norm: int, weight: torch.Tensor, is_gated: bool = False
    ) -> torch.Tensor:
        weights: Any = self.norms[norm]
        if len(hidden) == 1 and pays(weight, True):
            return one_token_linear(hidden, weight, norm=weights.weight, epsilon=weights.epsilon, is_gated=is_gated)
        product = F.linear(weights(hidden), weight)
        return gated(product) if is_gated else product


def _plus(hidden: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`hidden`, which nobody needs any more, and a product."""
    if len(hidden) == 1 and pays(weight, False):
        return one_token_linear(tokens, weight, residual=hidden)
    return hidden.addmm_(tokens, weight.T)


def fuse_cuda_layers(model: Any) -> int:
    """Replace a model's layers that are of the Llama form and agree with theirs; returns how many were.

    Where all were, its last norm goes the same way.
    """
    base = model.base_model
    replaced = replace_layers(base.layers, base.rotary_emb, FusedCudaLayer, _is_plain, TOLERANCES, (1, 7))
    if replaced == len(base.layers) and hasattr(getattr(base, "norm", None), "variance_epsilon"):
        base.norm = Norm(base.norm)
    return replaced


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.is_cuda and weight.dtype in TOLERANCES

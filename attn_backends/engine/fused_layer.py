"""Decoder layers of the Llama form with fewer, fused operations: what a CPU decodes with.

A Hugging Face decoder layer is many small operations, each with an overhead that counts at a few tokens. Here q, k and
v are one product, both rotations are one, and oneDNN adds the residuals and applies SiLU and the gate inside its
products. A layer is replaced only if its fused form agrees with it on random input.

Rotation: Su et al., "RoFormer", in the half-split form of Llama; normalisation: Zhang and Sennrich, "RMSNorm".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_backends.engine.linears import packable, reordered

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative, ‖fused - original‖ / ‖original‖
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class FusedLayer(torch.nn.Module):
    """Takes the place of a decoder layer; `attention_context` gets q, k and v as from the original."""

    def __init__(self, layer: Any, rotate: _Rotation) -> None:
        super().__init__()
        self.rotate = rotate
        attention, mlp = layer.self_attn, layer.mlp
        self.place = torch.nn.Module()  # stands for the attention module, without its weights
        self.place.layer_idx, self.place.scaling = attention.layer_idx, attention.scaling
        self.norms = [_Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)]
        self.head_dim = attention.head_dim
        self.widths = [attention.q_proj.out_features, attention.k_proj.out_features, attention.v_proj.out_features]
        self.qkv = reordered(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]))
        self.out = reordered(attention.o_proj.weight)
        self.gate, self.up, self.down = (reordered(p.weight) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden]
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, [1, num_tokens, head_dim]
        attention_context: Any,
        **unused: Any,
    ) -> torch.Tensor:
        hidden = hidden_states[0]
        qkv = _linear(self.norms[0](hidden), self.qkv, None, "none", [], "")
        rotated_width = self.widths[0] + self.widths[1]
        query_key = self.rotate(qkv[:, :rotated_width].unflatten(1, (-1, self.head_dim)), position_embeddings)
        query, key = query_key.split([self.widths[0] // self.head_dim, self.widths[1] // self.head_dim], 1)
        value = qkv[:, rotated_width:].unflatten(1, (-1, self.head_dim))
        attended = attention_context.attend(self.place, query, key, value, {"scaling": self.place.scaling})
        hidden = _linear.binary(attended.flatten(1), hidden, self.out, None, "add")
        normed = self.norms[1](hidden)
        gated = _linear(normed, self.gate, None, "swish", [], "")
        gated = _linear.binary(normed, gated, self.up, None, "mul")
        out: torch.Tensor = _linear.binary(gated, hidden, self.down, None, "add")
        return out[None]


class _Rotation:
    """The rotation of queries and keys, its angles prepared once a step: every layer gets the same two tensors."""

    def __init__(self) -> None:
        self.angles: tuple[torch.Tensor, torch.Tensor] | None = None  # as they came
        self.prepared: tuple[torch.Tensor, torch.Tensor] | None = None  # [num_tokens, 1, head_dim] each

    def __call__(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`heads` [num_tokens, num_heads, head_dim] rotated by `angles`, cos and sin [1, num_tokens, head_dim]."""
        half = heads.shape[-1] // 2
        if self.prepared is None or angles is not self.angles:
            cos, sin = angles[0][0, :, None], angles[1][0, :, None]
            # The first half of a rotated head takes minus the second half.
            self.prepared = cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)
            self.angles = angles
        cos, signed_sin = self.prepared
        rotated: torch.Tensor = torch.addcmul(heads * cos, heads.roll(half, -1), signed_sin)
        return rotated


class _Norm:
    """x · w / √(mean x² + ε), as x · (√n w) / hypot(‖x‖, √(n ε)): four operations in place of eight."""

    def __init__(self, norm: Any) -> None:
        size = norm.weight.shape[0]
        self.weight = norm.weight.float() * size**0.5
        self.epsilon = torch.tensor((size * norm.variance_epsilon) ** 0.5)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:  # [num_tokens, hidden]
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        normed: torch.Tensor = (hidden / torch.hypot(length, self.epsilon) * self.weight).to(hidden.dtype)
        return normed


_linear = torch.ops.mkldnn._linear_pointwise


def fuse_layers(layers: torch.nn.ModuleList, rotary: Any) -> int:
    """Replace the layers of the Llama form whose fused form agrees with them; returns how many were.

    Args:
        layers: a model's decoder layers, on the CPU.
        rotary: the model's rotary embedding: (hidden, position_ids) to cos and sin.
    """
    replaced, rotate = 0, _Rotation()
    for index, layer in enumerate(layers):
        if _has_llama_form(layer):
            fused = FusedLayer(layer, rotate)
            if _agree(layer, fused, rotary):
                layers[index] = fused
                replaced += 1
    return replaced


def _has_llama_form(layer: Any) -> bool:
    """The same parts and nothing besides; plain products without biases, that the CPU has packed ones for."""
    if sorted(name for name, _ in layer.named_children()) != sorted(PARTS):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if sorted(name for name, _ in attention.named_children()) != sorted(PROJECTIONS):
        return False
    projections = [getattr(attention, name, None) for name in PROJECTIONS]
    projections += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        all(type(p) is torch.nn.Linear and p.bias is None and packable(p.weight) for p in projections)
        and all(hasattr(norm, "variance_epsilon") for norm in (layer.input_layernorm, layer.post_attention_layernorm))
        and hasattr(attention, "head_dim")
        and hasattr(attention, "scaling")
    )


class _Trial:
    """A stand-in for attention: mixes queries, keys and values of each token, so that an error in any of them shows."""

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, constants: Mapping[str, Any]
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed: torch.Tensor = (query * key).sum(-1, keepdim=True).tanh() * constants["scaling"] + value
        return mixed


def _agree(layer: Any, fused: FusedLayer, rotary: Any) -> bool:
    weight = layer.input_layernorm.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 7, weight.shape[0], generator=generator).to(weight.dtype)
    positions = torch.arange(3, 10)[None]
    arguments = {"position_embeddings": rotary(hidden, positions), "attention_context": _Trial()}
    with torch.inference_mode():
        expected, got = layer(hidden, **arguments), fused(hidden, **arguments)
    error = (got - expected).float().norm() / expected.float().norm()
    return bool(error < TOLERANCES[weight.dtype])  # NaN is no agreement

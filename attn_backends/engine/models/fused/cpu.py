"""Decoder layers of the Llama form with fewer, fused operations: what a CPU decodes with.

A Hugging Face decoder layer is many small operations, each with an overhead that counts at a few tokens. Here q, k and
v are one product, both rotations are one, and oneDNN adds the residuals and applies SiLU and the gate inside its
products. MKL does not, where its products are preferred: there gate and up are one product too. Where there is C for
all of it (native.py), that is what layers become. A layer is replaced only if its fused form agrees with it on random
input.

Rotation: Su et al., "RoFormer", in the half-split form of Llama; normalisation: Zhang and Sennrich, "RMSNorm".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from attn_backends.engine.models.context import NewTokens
from attn_backends.engine.models.fused.linears import (
    PackedLinear,
    library_linear,
    packable,
    prefers_mkl,
    prefers_native,
)
from attn_backends.engine.models.fused.llama_form import Angles, LlamaLayer, merged_weights, replace_layers
from attn_backends.engine.models.fused.native import NativeLayer, serves

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative, ‖fused - original‖ / ‖original‖


class FusedLayer(LlamaLayer):
    """Takes the place of a decoder layer; `attention_context` gets q, k and v as from the original."""

    def __init__(self, layer: Any, rotate: _Rotation) -> None:
        super().__init__(layer)
        self.rotate = rotate
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = [_Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)]
        self.qkv = library_linear(merged_weights(attention.q_proj, attention.k_proj, attention.v_proj))
        self.out, self.down = library_linear(attention.o_proj.weight), library_linear(mlp.down_proj.weight)
        gated = _MergedGate if prefers_mkl(mlp.up_proj.weight.dtype) else _FusedGate
        self.gated = gated(mlp.gate_proj.weight, mlp.up_proj.weight)

    def heads(self, hidden: torch.Tensor, angles: Angles) -> NewTokens:
        heads = self.qkv(self.norms[0](hidden)).unflatten(1, (-1, self.head_dim))
        rotated = self.rotate(heads[:, : self.num_rotated], angles)
        return rotated[:, : self.num_queries], rotated[:, self.num_queries :], heads[:, self.num_rotated :]

    def behind(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = self.out.plus(attended, hidden)
        out: torch.Tensor = self.down.plus(self.gated(self.norms[1](hidden)), hidden)
        return out


class _FusedGate(torch.nn.Module):
    """SiLU of the gate's product times that of up, both in oneDNN's products."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.gate, self.up = PackedLinear(gate), PackedLinear(up)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.up.times(tokens, self.gate(tokens, "swish"))


class _MergedGate(torch.nn.Module):
    """The same after one product for both."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.both = library_linear(torch.cat([gate, up]))
        self.width = len(gate)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        both = self.both(tokens)
        return F.silu(both[:, : self.width]).mul_(both[:, self.width :])


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
        swapped = heads.unflatten(-1, (2, half)).flip(-2).flatten(-2)
        return torch.addcmul(heads * cos, swapped, signed_sin)


class _Norm:
    """x · w / √(mean x² + ε), as x · (√n w) / hypot(‖x‖, √(n ε)): four operations in place of eight."""

    def __init__(self, norm: Any) -> None:
        size = norm.weight.shape[0]
        self.weight = norm.weight.float() * size**0.5
        self.epsilon = torch.tensor((size * norm.variance_epsilon) ** 0.5, dtype=torch.float32, device="cpu")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:  # [num_tokens, hidden]
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        normed: torch.Tensor = (hidden / torch.hypot(length, self.epsilon)).mul_(self.weight).to(hidden.dtype)
        return normed


def fuse_layers(layers: Any, rotary: Any) -> int:
    """Replace the layers of the Llama form whose fused form agrees with them; returns how many were.

    Args:
        layers: a model's decoder layers (`torch.nn.ModuleList`), on the CPU.
        rotary: the model's rotary embedding: (hidden, position_ids) to cos and sin.
    """
    rotation = _Rotation()

    def fused(layer: Any) -> LlamaLayer:
        native = serves(layer) and prefers_native(layer.mlp.up_proj.weight.dtype)
        return NativeLayer(layer) if native else FusedLayer(layer, rotation)

    return replace_layers(layers, rotary, fused, packable, TOLERANCES)

"""Which decoder layers have the form that fused ones stand for, and whether a fused one does what its original does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attn_backends.engine.models.context import NewTokens

Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [1, num_tokens, head_dim]
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
OUTLIER = 4  # times as far off may single tokens be: what is large in them cancels out
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def has_llama_form(layer: Any, is_fast: Callable[[torch.Tensor], bool]) -> bool:
    """The same parts and nothing besides; plain products without biases, of weights that there are fast ones for."""
    if sorted(name for name, _ in layer.named_children()) != sorted(PARTS):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if sorted(name for name, _ in attention.named_children()) != sorted(PROJECTIONS):
        return False
    projections = [getattr(attention, name, None) for name in PROJECTIONS]
    projections += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        all(type(p) is torch.nn.Linear and p.bias is None and is_fast(p.weight) for p in projections)
        and all(hasattr(norm, "variance_epsilon") for norm in (layer.input_layernorm, layer.post_attention_layernorm))
        and hasattr(attention, "head_dim")
        and hasattr(attention, "scaling")
        and attention.k_proj.out_features == attention.v_proj.out_features
        and attention.q_proj.out_features == attention.o_proj.in_features
    )


class LlamaLayer(torch.nn.Module):
    """What takes the place of a decoder layer of that form: its attention module's stand-in, and where heads lie."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.self_attn
        self.place = torch.nn.Module()  # stands for the attention module, without its weights
        self.place.layer_idx, self.place.scaling = attention.layer_idx, attention.scaling
        self.head_dim = attention.head_dim
        self.num_queries = attention.q_proj.out_features // self.head_dim
        self.num_rotated = self.num_queries + attention.k_proj.out_features // self.head_dim

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden]
        *,
        position_embeddings: Angles | None,
        attention_context: Any,
        **unused: Any,
    ) -> torch.Tensor:
        hidden = hidden_states[0]
        heads = self.heads(hidden, self.angles(hidden_states, position_embeddings))
        attended = attention_context.attend(self.place, heads, {"scaling": self.place.scaling})
        return self.behind(hidden, attended.flatten(1))[None]

    def angles(self, hidden_states: torch.Tensor, angles: Angles | None) -> Angles:
        """The angles that a model gives its layer; 0 where it gives none, for a layer that is to rotate nothing."""
        if angles is None:
            none = hidden_states.new_zeros(*hidden_states.shape[:2], self.head_dim)
            return none + 1, none
        return angles

    def heads(self, hidden: torch.Tensor, angles: Angles) -> NewTokens:
        """Queries, keys and values [num_tokens, heads, head_dim] of `hidden` [num_tokens, hidden], rotated."""
        raise NotImplementedError

    def behind(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What comes behind attention [num_tokens, num_queries * head_dim]: both residuals and the MLP."""
        raise NotImplementedError


class LayerList(torch.nn.ModuleList):
    """Layers, all of which are the list itself: a model of Hugging Face's asks for them by a slice at each step, and a
    list made anew takes as long as four layers' Python."""

    def __getitem__(self, index: Any) -> Any:
        whole = isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1)
        return self if whole else super().__getitem__(index)


def merged_weights(*linears: Any) -> torch.Tensor:
    """The weights of several products of one input, as one product's."""
    return torch.cat([linear.weight for linear in linears])


def replace_layers(
    layers: Any,
    rotary: Any,
    make: Callable[[Any], torch.nn.Module],
    is_fast: Callable[[torch.Tensor], bool],
    tolerances: Mapping[torch.dtype, float],
    sizes: Sequence[int] = (7,),
) -> int:
    """Replace the layers of this form whose fused form agrees with them; returns how many were.

    Args:
        layers: a model's decoder layers (`torch.nn.ModuleList`).
        make: the fused form of a layer.
        is_fast, rotary, sizes: see `has_llama_form` and `agree`.
        tolerances: the tolerance of `agree` by the layer's dtype.
    """
    replaced = 0
    for index, layer in enumerate(layers):
        if has_llama_form(layer, is_fast):
            fused = make(layer)
            if agree(layer, fused, rotary, tolerances[layer.input_layernorm.weight.dtype], sizes):
                layers[index] = fused
                replaced += 1
    return replaced


class _Trial:
    """A stand-in for attention: keeps queries, keys and values, and mixes each token's, so that a result needs all."""

    def __init__(self) -> None:
        self.new: tuple[torch.Tensor, ...] = ()

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        query, key, value = new
        self.new = tuple(each.flatten(1).clone() for each in new)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed: torch.Tensor = (query * key).sum(-1, keepdim=True).tanh() * constants["scaling"] + value
        return mixed


def agree(layer: Any, fused: Any, rotary: Any, tolerance: float, sizes: Sequence[int] = (7,)) -> bool:
    """Whether two layers give the same, within rounding, for some numbers of tokens of random input.

    Queries, keys and values are compared by themselves: a layer may rotate neighbours or nothing, and a token's own
    query and key have the same product then.

    Args:
        rotary: the model's rotary embedding: (hidden, position_ids) to cos and sin.
        tolerance: ‖fused - original‖ / ‖original‖, of most tokens.
    """
    weight = layer.input_layernorm.weight
    generator = torch.Generator().manual_seed(0)
    for num_tokens in sizes:
        shape = (1, num_tokens, weight.shape[0])
        hidden = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(weight)
        positions = torch.arange(3, 3 + num_tokens, device=weight.device)[None]
        with torch.inference_mode():
            try:
                angles, theirs = rotary(hidden, positions), _Trial()
                expected = layer(hidden, position_embeddings=angles, attention_context=theirs)
            except TypeError:  # a rotation or a layer that wants more than a Llama's
                return False
            # A fused layer reads angles as of all of a head, and of its dtype.
            if any(each.shape[-1] != fused.head_dim or each.dtype is not hidden.dtype for each in angles):
                return False
            ours = _Trial()
            got = fused(hidden.clone(), position_embeddings=angles, attention_context=ours)
        pairs = ((got[0], expected[0]), *zip(ours.new, theirs.new, strict=True))
        if not all(_is_close(a, b, tolerance) for a, b in pairs):
            return False
    return True


def _is_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:  # [num_tokens, features]
    if got.shape != expected.shape:
        return False
    size = expected.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)  # zeros agree with zeros
    errors = (got - expected).float().norm(dim=-1) / size
    return bool(errors.median() < tolerance and errors.max() < OUTLIER * tolerance)  # NaN is no agreement

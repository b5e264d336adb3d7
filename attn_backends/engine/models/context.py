"""What travels through a model to its attention layers: each layer's impl, cache and planned step.

In a compiled model attention is one operator of a graph, `attn_backends::attend`. Python objects cannot enter a graph:
the operator has its layer's number and finds its step in a context variable, set around each forward and restored
behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionImpl, AttentionStep

Steps = Mapping[int, AttentionStep[Any]]  # by layer
# A layer's query [num_tokens, num_qo_heads, head_dim], its key [num_tokens, num_kv_heads, head_dim] and its value
# [num_tokens, num_kv_heads, head_dim_vo]; of MLA latent rows [num_tokens, kv_lora_rank] and the shared key [num_tokens,
# qk_rope_head_dim].
NewTokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionContext(Protocol):
    """What travels through the model to its attention layers, as the keyword argument `attention_context`."""

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        """[num_tokens, num_qo_heads, head_dim_vo]. `constants` are scaling, sliding_window, softcap, s_aux, …"""
        ...


@dataclass
class StepContext:
    """One step, as the model's attention layers see it: each layer's Impl, cache and planned step."""

    impls: Mapping[int, AttentionImpl[Any]]
    caches: Mapping[int, KVCache]
    steps: Steps

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        layer: int = module.layer_idx  # the dry run has checked it
        return self.impls[layer].forward(*new, self.caches[layer], self.steps[layer])


def head_dim_vo(module: torch.nn.Module, value: torch.Tensor) -> int:
    """Width of a head's output; in MLA it is not that of `value`, and the module knows it."""
    width: int = getattr(module, "head_dim_vo", value.shape[-1])
    return width


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
def _place(layer: int, width: int) -> Any:
    """Stands for an attention module, of which a context needs the number, and how wide a head's output is."""
    place: Any = torch.nn.Module()
    place.layer_idx, place.head_dim_vo = layer, width
    return place


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """Calls `AttentionContext.attend` of the current step; the layer's impl has the constants."""
    with torch.inference_mode():  # as without a graph: a backend's buffers may have been made in it
        return _step.get().attend(_place(layer, width), (query, key, value), {})


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """What it returns, by shape alone: [num_tokens, num_qo_heads, head_dim_vo]."""
    return query.new_empty(*query.shape[:2], width)


# By hand, as `torch.library.custom_op` checks every call for aliases, once a layer and step.
_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, int width) -> Tensor")
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("attn_backends::attend", _attended, lib=_library)


class Operator:
    """The attention context that a graph is traced with: puts the operator where attention is."""

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attn_backends.attend(*new, module.layer_idx, head_dim_vo(module, new[2]))
        return out


class Blank:
    """The step of a graph's first run, which makes it: attention gives zeros."""

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        query, _, value = new
        return query.new_zeros(*query.shape[:2], head_dim_vo(module, value))

"""Attention as one operator of a graph, `attn_backends::attend`: for steps that no compiler can see through.

Python objects cannot enter a graph. The operator has its layer's number and finds its step in a context variable, set
around each forward and restored behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from attn_backends.engine.models.context import AttentionContext
from attn_backends.engine.models.latent_layer import head_dim_vo

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
        return _step.get().attend(_place(layer, width), query, key, value, {})


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

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, constants: Mapping[str, Any]
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.attn_backends.attend(
            query, key, value, module.layer_idx, head_dim_vo(module, value)
        )
        return out


class Blank:
    """The step of a graph's first run, which makes it: attention gives zeros."""

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, constants: Mapping[str, Any]
    ) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], head_dim_vo(module, value))

"""Keys on their way: what a cache's `update` hands on is what the attention function gets next, in the same thread.

Models may make other keys of them in between, as those with latents do. So they are known by the tensor, or by the
forward: each asks for its mask first. What an interrupted forward has left is neither.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Handed(NamedTuple):
    """One layer's new keys."""

    cache: Any  # the `PagedCache`
    layer: int
    keys: torch.Tensor  # [batch, num_kv_heads, num_tokens, head_dim]
    forward: int

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]


class _Between(threading.local):
    handed: Handed | None = None
    attended: tuple[int, weakref.ref[torch.nn.Module]] | None = None  # the forward and layer that got keys last
    forward = 0


_between = _Between()


def eager_only(function: FunctionT) -> FunctionT:
    """A function that compilers stop before: they would keep what was planned in their first trace."""
    disabled: FunctionT = torch.compiler.disable(function, reason="attn_backends plans steps in Python, between graphs")
    return disabled


def count_forward() -> None:
    """A forward begins."""
    _between.forward += 1


def hand_on(cache: Any, layer: int, keys: torch.Tensor) -> None:
    """A layer of a cache is about to attend with these keys."""
    _between.handed = Handed(cache, layer, keys, _between.forward)


def left_over(cache: Any) -> int | None:
    """The layer of a cache whose keys never reached attention, if there is one."""
    left = _between.handed
    return left.layer if left is not None and left.cache is cache else None


def forget() -> None:
    """Nothing is on its way."""
    _between.handed = _between.attended = None


def take(key: torch.Tensor) -> Handed | None:
    """What the keys of an attention call were handed on as, or made of; None if no cache handed them on."""
    handed, _between.handed = _between.handed, None
    if handed is None or (handed.keys is not key and handed.forward != _between.forward):
        return None
    return handed


def note_attended(module: torch.nn.Module) -> None:
    """A layer attends to what its cache has handed on."""
    _between.attended = _between.forward, weakref.ref(module)


def has_attended(module: torch.nn.Module) -> bool:
    """Whether the last layer of this forward that attended so is this one."""
    return _between.attended is not None and _between.attended == (_between.forward, weakref.ref(module))

"""The float workspace that adapters of one device share, as engines of this convention have one for all."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from attn_backends.interface import AttentionState

_SHARED: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()  # it goes with the last who reads it


def share_workspace(state: AttentionState[Any]) -> None:
    """Let a state take the workspace of its device; if that is too small, its own is shared from now on.

    Those who share one run their steps one after the other, on one stream. A state that cannot take another's keeps its
    own.
    """
    reset = getattr(state, "reset_workspace_buffer", None)
    own: torch.Tensor | None = getattr(state, "float_workspace", None)
    if reset is None or own is None:
        return
    shared = _SHARED.get(own.device)
    if shared is None or shared.numel() < own.numel():
        _SHARED[own.device] = own
    else:
        reset(shared)

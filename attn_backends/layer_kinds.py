"""Kinds of a Hugging Face model's layers: all that an attention function sees of a kind is its window."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
SERVED_KINDS = frozenset({FULL, SLIDING, "attention"})


def layer_kind(config: Any, index: int) -> str:
    """What `layer_types` says of a layer; where it says nothing, what the model's window makes of all."""
    kinds = getattr(config, "layer_types", None) or ()
    if index < len(kinds):
        return str(kinds[index])
    return FULL if getattr(config, "sliding_window", None) is None else SLIDING


def reaches_attention(kind: str, windowed: bool) -> bool:
    """Whether an attention function that was told of a window, or of none, knows all of a layer's mask."""
    return kind in SERVED_KINDS and (kind != SLIDING or windowed)

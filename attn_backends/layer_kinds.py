"""Kinds of a Hugging Face model's layers: all that an attention function sees of a kind is its window."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
SERVED_KINDS = frozenset({FULL, SLIDING, "attention"})


WINDOWS, WINDOW_HINT = "1 and more, or None for no window", "Set sliding_window in the model's config."


def is_window(sliding_window: int | None) -> bool:
    """Whether a model's window shows a token at least its own key, or there is no window."""
    return sliding_window is None or sliding_window >= 1


def layer_kind(config: Any, index: int) -> str:
    """What `layer_types` says of a layer; where it says nothing, what the model's window makes of all."""
    kinds = getattr(config, "layer_types", None) or ()
    if index < len(kinds):
        return str(kinds[index])
    return FULL if getattr(config, "sliding_window", None) is None else SLIDING


def reaches_attention(kind: str, windowed: bool) -> bool:
    """Whether an attention function that was told of a window, or of none, knows all of a layer's mask."""
    return kind in SERVED_KINDS and (kind != SLIDING or windowed)

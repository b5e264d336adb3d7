"""The mask function that transformers asks before each forward: which tokens are padding, and nothing else.

A backend works out causality and windows from its layer. So any other mask is refused here, where its rule is known:
what reaches the attention function is a tensor at most, which has forgotten it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from attn_backends.adapters.transformers.handed import count_forward, eager_only
from attn_backends.adapters.transformers.refuse import decline

_CODE_OF_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_CODE_OF_PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1)).__code__
_CODE_OF_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


@eager_only
def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,  # [batch_size, kv_length] bool
    **_: Any,
) -> torch.Tensor | None:
    """[batch_size, kv_length] bool, or None if there is no padding.

    Packed sequences, which continuous batching looks like here, get a mask of no columns: an attention function that
    has no other word of where they begin refuses it.

    Raises:
        Unsupported: the mask is not causal, or has another rule than windows and padding.
    """
    count_forward()
    parts = _parts(mask_function)
    if any(part.__code__ is _CODE_OF_PACKED for part in parts if hasattr(part, "__code__")):
        return torch.ones(batch_size, 0, dtype=torch.bool)
    rest = [part for part in parts if getattr(part, "__code__", None) is not _CODE_OF_WINDOW]
    if rest != [masking_utils.causal_mask_function]:
        names = ", ".join(getattr(part, "__qualname__", str(part)).replace(".<locals>", "") for part in rest)
        decline("mask", f"a mask by {names}", "causal masks, with windows and padding",
                "Encoders, chunked attention, images that see both ways and masks of your own: load the model with "
                "sdpa or eager.")  # fmt: skip
    if attention_mask is None:
        return None
    visible = attention_mask[:, -kv_length:]
    return None if visible.shape[1] == kv_length and bool(visible.all()) else visible


def _parts(mask_function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The rules that have to hold all together for a key to be seen."""
    if getattr(mask_function, "__code__", None) is not _CODE_OF_AND:
        return [mask_function]
    (cell,) = mask_function.__closure__ or ()
    return [part for each in cell.cell_contents for part in _parts(each)]

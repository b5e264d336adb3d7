"""The mask function that transformers asks before each forward: which tokens are padding, and nothing else.

A backend works out causality and windows from its layer. So any other mask is refused here, where its rule is known:
what reaches the attention function is a tensor at most, which has forgotten it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
from transformers import masking_utils

from attn_backends.adapters.transformers.handed import count_forward, eager_only
from attn_backends.adapters.transformers.refuse import decline

_CODE_OF_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_CODE_OF_PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1, dtype=torch.int64, device="cpu")).__code__
_CODE_OF_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what a model's file calls our attention by
_NO_MODEL = ("transformers.masking_utils", "transformers.utils", "transformers.generation", "torch", "attn_backends")


class OwnAttention:
    """The mask of a model that works attention out itself: None there would let its tokens see all others. Whatever the
    model does with this raises `Unsupported`."""

    def __init__(self, padding: torch.Tensor | None, config: Any) -> None:
        self.padding, self.model_type = padding, getattr(config, "model_type", "this model")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        _refuse_own(self.model_type)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_own(self.model_type)

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __invert__ = __getitem__ = __bool__ = _refuse

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls)]
        _refuse_own(given[0].model_type if given else "this model")


def _refuse_own(model_type: str) -> NoReturn:
    decline("attention", f"{model_type}, which works attention out itself", "models that call transformers' "
            "AttentionInterface", "Load this model with eager.")  # fmt: skip


def padding_in(mask: Any) -> torch.Tensor | None:
    """What `padding_mask` said, of what reaches the attention function."""
    padding: torch.Tensor | None = mask.padding if isinstance(mask, OwnAttention) else mask
    return padding


@eager_only
def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,  # [batch_size, kv_length] bool
    config: Any = None,
    **_: Any,
) -> torch.Tensor | OwnAttention | None:
    """[batch_size, kv_length] bool, or None if there is no padding; see `padding_in`.

    Packed sequences, which continuous batching looks like here, get a mask of no columns: an attention function that
    has no other word of where they begin refuses it.

    Raises:
        Unsupported: the mask is not causal, or has another rule than windows and padding.
    """
    count_forward()
    parts = _parts(mask_function)
    if any(part.__code__ is _CODE_OF_PACKED for part in parts if hasattr(part, "__code__")):
        return torch.ones(batch_size, 0, dtype=torch.bool, device="cpu")
    rest = [part for part in parts if getattr(part, "__code__", None) is not _CODE_OF_WINDOW]
    if rest != [masking_utils.causal_mask_function]:
        names = ", ".join(getattr(part, "__qualname__", str(part)).replace(".<locals>", "") for part in rest)
        decline("mask", f"a mask by {names}", "causal masks, with windows and padding",
                "Encoders, chunked attention, images that see both ways and masks of your own: load the model with "
                "sdpa or eager.")  # fmt: skip
    visible = None if attention_mask is None else attention_mask[:, -kv_length:]
    if visible is not None and visible.shape[1] == kv_length and bool(visible.all()):
        visible = None
    return visible if _calls_interface() else OwnAttention(visible, config)


def _calls_interface() -> bool:
    """Whether the file of the model that asks for its mask names the attention interface."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_NO_MODEL):
        frame = frame.f_back
    return frame is None or _INTERFACE in frame.f_globals


def _parts(mask_function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The rules that have to hold all together for a key to be seen."""
    if getattr(mask_function, "__code__", None) is not _CODE_OF_AND:
        return [mask_function]
    (cell,) = mask_function.__closure__ or ()
    return [part for each in cell.cell_contents for part in _parts(each)]

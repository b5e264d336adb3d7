"""What is wrong with what an engine gave, found by several of the five classes, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def missing_keys(*, reads_cache: bool) -> ValueError:
    """The error of a call that lacks what its step attends.

    Args:
        reads_cache: whether that is the cache; else it is the keys that the step brings.
    """
    if reads_cache:
        return ValueError(
            "this step attends the pages of its rows, and their cache was not given: pass kv_cache. A run before there "
            "is one takes a batch without pages"
        )
    return ValueError(
        "this step attends the keys that it brings, and not the cache, and they were not given: pass key and value. "
        "Where an engine writes the cache itself, its batches bring none: from_tensors without slot_mapping, or rows "
        "with new_kv_len=0"
    )


def refuse_raw_options(options: Any) -> None:
    """Refuse a mapping where options are validated ones.

    Raises:
        TypeError: they are not.
    """
    if isinstance(options, Mapping):
        raise TypeError(
            f"options is a {type(options).__name__}; select_backend takes one, and what it chose takes the options "
            "validated: pass attn_backends.validate_options(name, options)"
        )


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Refuse what torch would differentiate, where an impl writes in place.

    Raises:
        ValueError: one of the tensors requires a gradient, and gradients are on.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "query, key or value requires a gradient, and attention over a paged cache has none: it is for inference; "
            "call the model inside torch.inference_mode() or torch.no_grad()"
        )

"""Launches as torch operators, where Triton interprets their kernels."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import torch

from attn_backends.kernels.launch import INTERPRETED


def operator(mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a launch a torch operator where kernels are interpreted.

    Where they are compiled it stays as it is: an operator takes longer to call than a kernel to launch.
    """

    def wrap(launch: Callable[..., None]) -> Callable[..., None]:
        if not INTERPRETED:
            return launch
        name = f"attn_backends::triton_{launch.__name__.strip('_')}"
        by_lists = _taking_lists(launch)
        made: Callable[..., None] = torch.library.custom_op(name, by_lists, mutates_args=mutates, device_types="cpu")
        return made

    return wrap


def _taking_lists(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch whose named tuples of numbers are lists: an operator's schema has no others."""
    hints = get_type_hints(launch)
    groups = {name: hint for name, hint in hints.items() if hasattr(hint, "_fields")}
    names = [name for name in hints if name != "return"]

    def by_lists(*given: Any) -> None:
        launch(*(groups[name](*value) if name in groups else value for name, value in zip(names, given, strict=True)))

    def annotation(name: str) -> Any:
        if name not in groups:
            return hints[name]
        return list[float] if float in get_type_hints(groups[name]).values() else list[int]

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation(name)) for name in names]
    by_lists.__signature__ = Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    return by_lists

"""TORCH's kernels in C, compiled in a fourth of the time to slower code: for tests that are about something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from attn_backends.backends.torch.native import paged_decode, paged_prefill, paged_rows
from attn_backends.kernels import c_compiler


def forget() -> None:
    """As in a new process: no kernel is loaded."""
    for module in (paged_decode, paged_prefill):
        module._compiled.cache_clear()


def compile_with(patch: pytest.MonkeyPatch, defines: Mapping[str, str | int]) -> None:
    """Have kernels compiled with more macros from now on."""
    patch.setattr(paged_rows, "load", lambda source, given: c_compiler.load(source, {**given, **defines}))
    forget()


@contextmanager
def quick_native(**defines: str | int) -> Iterator[None]:
    """Within it kernels are compiled without optimisation, and with more macros. Those of before and behind are others.

    Its operators end with it.
    """
    operators = torch.library._scoped_library("attn_backends", "FRAGMENT")
    with pytest.MonkeyPatch.context() as patch, operators as library:
        patch.setattr(c_compiler, "FLAGS", ("-O0", *c_compiler.FLAGS[1:]))
        patch.setattr(paged_decode, "_library", library)
        compile_with(patch, defines)
        try:
            yield
        finally:
            forget()

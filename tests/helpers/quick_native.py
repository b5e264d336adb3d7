"""TORCH's kernels in C, compiled in a fourth of the time to slower code: for tests that are about something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attn_backends.backends.torch.native import compiler, paged_decode, paged_prefill


def forget() -> None:
    """As in a new process: no kernel is loaded."""
    for module in (paged_decode, paged_prefill):
        module._compiled.cache_clear()


@contextmanager
def quick_native() -> Iterator[None]:
    """Within it kernels are compiled without optimisation; those of before and behind it are others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "FLAGS", ("-O0", *compiler.FLAGS[1:]))
        forget()
        try:
            yield
        finally:
            forget()

"""Kernels that steps would compile when they first need them, compiled before they do; and which of them merge."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from attn_backends.machine import HAS_TRITON, Progress
from attn_backends.spec import AttentionSpec


def compile_listed(device: torch.device, list_launches: Callable[[], None], progress: Progress | None) -> None:
    """Compile what a function launches over tensors without memory; nothing where kernels are not compiled."""
    if device.type != "cuda" or not HAS_TRITON:
        return
    from attn_backends.kernels.launch import machine_of
    from attn_backends.kernels.variants import compile_variants, listing

    with listing(machine_of(device)) as found:
        list_launches()
    compile_variants(found.variants.values(), device, progress)


def list_merges(specs: Iterable[AttentionSpec], dtype: torch.dtype | None = None) -> None:
    """The launches that join attention over two sets of keys.

    Args:
        dtype: of what is joined; None: the layer's.
    """
    from attn_backends.kernels.examples import empty
    from attn_backends.kernels.merge_state_triton import merge

    for spec in specs:
        size = (2, spec.num_qo_heads, spec.head_dim_vo)
        more, lse = empty(*size, dtype=spec.dtype), empty(*size[:2], dtype=torch.float32)
        merge(empty(*size, dtype=dtype or spec.dtype), lse, more, lse)

"""A layer's launches, from what its impl is made with: where impls and the list of variants take them from."""

from __future__ import annotations

import torch

from attn_backends.backends.triton.launch import Kernels
from attn_backends.backends.triton.rules import of_fresh_keys
from attn_backends.backends.triton.tuning import TritonOptions, prefill_tile
from attn_backends.kernels.launch import shared_memory
from attn_backends.kernels.prefill.launch import suits_hopper_kernel
from attn_backends.spec import AttentionSpec, KVCacheSpec


def make_kernels(
    spec: AttentionSpec, cache: KVCacheSpec, device: torch.device, options: TritonOptions | None,
    sinks: torch.Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0,
) -> Kernels:  # fmt: skip
    """The launches of a layer with `sinks` [num_qo_heads], where its spec has them."""
    slopes, smem_bytes, given = spec.alibi_slopes, shared_memory(device), options or TritonOptions()
    by_hopper = (
        given.prefill_tile is None and suits_hopper_kernel(spec, device),
        given.prompt_tile is None and suits_hopper_kernel(of_fresh_keys(spec), device),
    )
    return Kernels(
        spec,
        prefill_tile(spec, cache, options, smem_bytes),
        prefill_tile(spec, cache, options, smem_bytes, "prompt"),
        by_hopper,
        None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device),
        None if sinks is None else sinks.to(device, torch.float32),
        k_scale,
        v_scale,
        device,
    )

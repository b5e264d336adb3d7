"""Which of FlashInfer's kernels serve a layer, and what options rule out: asked at selection, and by the state."""

from __future__ import annotations

import torch

from attn_backends.backends.flashinfer.library import CUDA_CORE_GROUPS, FA3_HEAD_DIMS
from attn_backends.backends.flashinfer.options import FlashInferOptions
from attn_backends.interface.capabilities import Rejection
from attn_backends.machine import is_hopper
from attn_backends.spec import FP8_DTYPES, AttentionSpec

_FA3 = ("a Hopper GPU, a 16-bit cache, head_dim 64, 128 or 256, no fixed_split_size, no ALiBi or RoPE inside "
        "attention, and a causal layer where there is a window")  # fmt: skip


def serves_fa3(spec: AttentionSpec, device: torch.device, paged: bool, options: FlashInferOptions) -> bool:
    """Whether fa3 runs prefills of a layer, over pages or over keys of the step."""
    plain = spec.causal or spec.window_left < 0  # fa3's window is for causal layers
    plain = plain and not spec.encodes_positions
    small_cache = paged and spec.cache_dtype in FP8_DTYPES
    split = options.fixed_split_size is not None
    return is_hopper(device) and spec.head_dim in FA3_HEAD_DIMS and plain and not small_cache and not split


def decodes_on_tensor_cores(spec: AttentionSpec, options: FlashInferOptions) -> bool:
    """Whether decodes of a layer take the fa2 prefill kernel."""
    if options.tensor_cores != "auto":
        return options.tensor_cores == "on"
    on_cuda_cores = spec.group_size == 1 and spec.cache_dtype not in FP8_DTYPES
    return not on_cuda_cores or options.fixed_split_size is not None


def reject_options(spec: AttentionSpec, device: torch.device, options: FlashInferOptions) -> list[Rejection]:
    """What options ask for that no kernel does for such a layer."""
    found: list[Rejection] = []
    if options.prefill_kernels == "fa3" and not serves_fa3(spec, device, True, options):
        hint = "Set backend_options.prefill_kernels to auto."
        found.append(Rejection("prefill_kernels", "fa3", f"fa2; with {_FA3}, fa3", hint))
    if options.tensor_cores == "off":
        hint, groups = "Set backend_options.tensor_cores to auto.", ", ".join(map(str, sorted(CUDA_CORE_GROUPS)))
        if spec.group_size not in CUDA_CORE_GROUPS:
            got = f"off with {spec.group_size} query heads a KV head"
            found.append(Rejection("tensor_cores", got, f"off with {groups}; auto and on with any", hint))
        if options.fixed_split_size is not None:
            found.append(Rejection("tensor_cores", "off with fixed_split_size", "auto and on with it", hint))
    return found

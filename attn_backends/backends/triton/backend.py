"""TRITON: what it can do, and its five classes."""

from __future__ import annotations

import torch

from attn_backends.backends.triton.impl import TritonImpl
from attn_backends.backends.triton.metadata import TritonMetadata, TritonMetadataBuilder
from attn_backends.backends.triton.state import TritonState
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import (
    Capabilities,
    CudaGraphSupport,
    Rejection,
    reject_early_fp8,
    why_not_interpreted,
)
from attn_backends.kernels.launch import FLOATS, INTERPRETED, untried_triton
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, KVCacheSpec

_CACHED = frozenset({torch.float32, torch.float16, torch.bfloat16, *FP8_DTYPES})
_WIDEST_FLOAT32 = 128


class TritonBackend(AttentionBackend):
    """Kernels of our own: split-KV decode, paged prefill. With TRITON_INTERPRET=1 they run on a CPU too, slowly."""

    contract = (1, 1)
    name = "TRITON"
    impl_cls = TritonImpl
    metadata_cls = TritonMetadata
    builder_cls = TritonMetadataBuilder
    state_cls = TritonState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
            dtypes=FLOATS,
            cache_dtypes=_CACHED,
            head_dims=frozenset(range(16, 257, 16)),
            layouts=frozenset({"NHD", "HND"}),
            attention_types=frozenset(AttentionType),
            window=True,
            soft_cap=True,
            alibi=True,
            sinks=True,
            chunks=True,
            non_causal=True,
            unequal_head_dims=True,
            any_scale=True,
            lse=True,
            cuda_graph=CudaGraphSupport.ALWAYS,
            min_compute_capability=(8, 0),
        )

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        found = (
            super().reject(spec, cache, device) + reject_early_fp8(spec, device) + _reject_wide_float32(spec, device)
        )
        return why_not_interpreted(found, spec) if INTERPRETED else found

    @classmethod
    def note(cls, device: torch.device | str) -> str:
        return untried_triton(torch.device(device))


def _reject_wide_float32(spec: AttentionSpec, device: torch.device | str) -> list[Rejection]:
    """Reject float32 layers whose head dims a thread's registers cannot hold.

    A product of float32 is three of tf32, and a thread holds the parts of both operands. At 256 columns even the
    smallest tile spills, a usual one up to 4 KB a thread; kernels that spilled so gave wrong outputs on an H200.
    """
    if torch.device(device).type != "cuda" or spec.dtype is not torch.float32:
        return []
    widest = max(spec.head_dim, spec.head_dim_vo)
    if widest <= _WIDEST_FLOAT32:
        return []
    supported = f"{spec.dtype} at head dims up to {_WIDEST_FLOAT32}, 16 bits up to 256"
    return [Rejection("head_dim", f"{widest} in {spec.dtype}", supported, "Use bfloat16 or float16, or TORCH.")]

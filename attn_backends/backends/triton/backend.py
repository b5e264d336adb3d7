"""TRITON: what it can do, and its five classes."""

from __future__ import annotations

import torch

from attn_backends.backends.triton.impl import TritonImpl
from attn_backends.backends.triton.metadata import TritonMetadata, TritonMetadataBuilder
from attn_backends.backends.triton.state import TritonState
from attn_backends.call_checks import reject_early_fp8
from attn_backends.capabilities import Capabilities, CudaGraphSupport, Rejection
from attn_backends.interface import AttentionBackend
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, KVCacheSpec
from attn_backends.triton_launch import INTERPRETED, untried_triton

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


class TritonBackend(AttentionBackend):
    """Kernels of our own: split-KV decode, paged prefill. With TRITON_INTERPRET=1 they run on a CPU too, slowly."""

    @staticmethod
    def get_name() -> str:
        return "TRITON"

    @staticmethod
    def get_impl_cls() -> type[TritonImpl]:
        return TritonImpl

    @staticmethod
    def get_metadata_cls() -> type[TritonMetadata]:
        return TritonMetadata

    @staticmethod
    def get_builder_cls() -> type[TritonMetadataBuilder]:
        return TritonMetadataBuilder

    @staticmethod
    def get_state_cls() -> type[TritonState]:
        return TritonState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
            dtypes=_FLOATS,
            cache_dtypes=_FLOATS | frozenset(FP8_DTYPES),
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
            lse=True,
            cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
            min_compute_capability=(8, 0),
        )

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        return super().reject(spec, cache, device) + reject_early_fp8(spec, device)

    @classmethod
    def note(cls, device: torch.device | str) -> str:
        return untried_triton(torch.device(device))

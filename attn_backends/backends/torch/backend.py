"""TORCH: what the backend can do, and its five classes."""

from __future__ import annotations

import torch

from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.metadata import TorchMetadata, TorchMetadataBuilder
from attn_backends.backends.torch.state import TorchState
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport
from attn_backends.spec import FP8_DTYPES, AttentionType

_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class TorchBackend(AttentionBackend):
    """Attention by `scaled_dot_product_attention`, or by hand where that cannot say it (soft cap, sinks, LSE)."""

    contract = (1, 1)
    name = "TORCH"
    impl_cls = TorchImpl
    metadata_cls = TorchMetadata
    builder_cls = TorchMetadataBuilder
    state_cls = TorchState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=_FLOATS,
            cache_dtypes=_FLOATS | frozenset(FP8_DTYPES),
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
            cascade=True,
            cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
        )

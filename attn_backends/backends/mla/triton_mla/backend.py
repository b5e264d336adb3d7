"""TRITON_MLA: decode on the latent cache by a kernel of ours, over pages of any size and without a plan on the host."""

from __future__ import annotations

import torch

from attn_backends.backends.mla.backend import MLABackend, latent_capabilities
from attn_backends.backends.mla.triton_mla.impl import TritonMLAImpl
from attn_backends.backends.mla.triton_mla.state import TritonMLAState
from attn_backends.interface.capabilities import Capabilities, Rejection, reject_early_fp8, why_not_interpreted
from attn_backends.kernels.launch import FLOATS, INTERPRETED, untried_triton
from attn_backends.spec import FP8_DTYPES, AttentionSpec, KVCacheSpec

_CACHED = frozenset({torch.float32, torch.float16, torch.bfloat16, *FP8_DTYPES})


class TritonMLABackend(MLABackend):
    """Kernels of our own. With TRITON_INTERPRET=1 they run on a CPU too, slowly."""

    name = "TRITON_MLA"
    impl_cls = TritonMLAImpl
    state_cls = TritonMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        return latent_capabilities(
            devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
            any_scale=True,
            dtypes=FLOATS,
            cache_dtypes=_CACHED,
            min_compute_capability=(8, 0),
            kv_lora_ranks=frozenset(range(16, 513, 16)),
            qk_rope_head_dims=frozenset(range(8, 129, 8)),
        )

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        found = super().reject(spec, cache, device) + reject_early_fp8(spec, device)
        return why_not_interpreted(found, spec) if INTERPRETED else found

    @classmethod
    def note(cls, device: torch.device | str) -> str:
        return untried_triton(torch.device(device))

"""TORCH_MLA: multi-head latent attention in plain torch, on any device. The one of the family to read first.

Decode rows are gathered in parts of bounded size: the state names the slots of a part and what hides the keys that a
token must not see, shared by all layers; the impl gathers and attends. Prefill is the family's own.
"""

from __future__ import annotations

import torch

from attn_backends.backends.mla.backend import MLABackend, latent_capabilities
from attn_backends.backends.mla.torch_mla.impl import TorchMLAImpl
from attn_backends.backends.mla.torch_mla.metadata import TorchMLAMetadataBuilder
from attn_backends.backends.mla.torch_mla.state import TorchMLAState
from attn_backends.interface.capabilities import Capabilities
from attn_backends.spec import FP8_DTYPES

_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class TorchMLABackend(MLABackend):
    """Any dtype, page size, rank and number of heads."""

    name = "TORCH_MLA"
    impl_cls = TorchMLAImpl
    builder_cls = TorchMLAMetadataBuilder
    state_cls = TorchMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        return latent_capabilities(
            devices=frozenset({"cpu", "cuda"}),
            any_scale=True,
            dtypes=_FLOATS,
            cache_dtypes=_FLOATS | frozenset(FP8_DTYPES),
        )

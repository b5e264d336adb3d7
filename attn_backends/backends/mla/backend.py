"""What every backend of the family answers alike."""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.backends.mla.metadata import MLAMetadata, MLAMetadataBuilder
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import HALF, Capabilities, CudaGraphSupport, Rejection
from attn_backends.spec import AttentionSpec, KVCacheSpec, Layout, MLASpec


def latent_capabilities(**own: Any) -> Capabilities:
    """What all backends of the family honour, and what one has of its own."""
    graphs = CudaGraphSupport.UNIFORM_BATCH
    return Capabilities(mla=True, unequal_head_dims=True, lse=True, cuda_graph=graphs, **own)


# What libraries' kernels for DeepSeek's latent rows have in common.
OF_512_AND_64 = latent_capabilities(
    devices=frozenset({"cuda"}),
    dtypes=HALF,
    cache_dtypes=HALF,
    min_compute_capability=(9, 0),
    kv_lora_ranks=frozenset({512}),
    qk_rope_head_dims=frozenset({64}),
)


class MLABackend(AttentionBackend):
    """A subclass gives its name, impl, state and `latent_capabilities(…)`."""

    contract = (1, 1)
    metadata_cls = MLAMetadata
    builder_cls = MLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shapes(spec: AttentionSpec, cache: KVCacheSpec) -> tuple[tuple[int, ...], ...]:
        """[num_pages, page_size, latent_dim], and nothing beside it.

        Raises:
            TypeError: the layer is not MLA.
        """
        if not isinstance(spec, MLASpec):
            raise TypeError(f"a latent cache is for layers of MLASpec, and this is {type(spec).__name__}")
        return (cache.pages, cache.page_size, spec.latent_dim), (cache.pages, cache.page_size, 0)

    @staticmethod
    def get_kv_cache_stride_order(layout: Layout) -> tuple[int, ...]:
        return 0, 1, 2  # there are no heads to lay elsewhere

    @classmethod
    def preferred_page_sizes(cls, device: torch.device | str) -> tuple[int, ...]:
        """On a GPU those that the family's backends were measured with."""
        return (64, 32) if torch.device(device).type == "cuda" else ()

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        """The width of latent rows too."""
        found = super().reject(spec, cache, device)
        if isinstance(spec, MLASpec):
            can, hint = cls.capabilities(), "Choose a backend that takes latent rows of this width."
            widths = (
                ("kv_lora_rank", spec.kv_lora_rank, can.kv_lora_ranks),
                ("qk_rope_head_dim", spec.qk_rope_head_dim, can.qk_rope_head_dims),
            )
            found += [
                Rejection(code, str(got), ", ".join(map(str, sorted(allowed))), hint)
                for code, got, allowed in widths
                if allowed is not None and got not in allowed
            ]
        return found

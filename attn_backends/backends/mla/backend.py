"""What every backend of the family answers alike."""

from __future__ import annotations

import torch

from attn_backends.backends.mla.metadata import MLAMetadata, MLAMetadataBuilder
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport, Rejection
from attn_backends.spec import AttentionSpec, KVCacheSpec, Layout, MLASpec

HALF = frozenset({torch.float16, torch.bfloat16})
# What libraries' kernels for DeepSeek's latent rows have in common.
OF_512_AND_64 = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=HALF,
    cache_dtypes=HALF,
    unequal_head_dims=True,
    lse=True,
    cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
    min_compute_capability=(9, 0),
    mla=True,
    kv_lora_ranks=frozenset({512}),
    qk_rope_head_dims=frozenset({64}),
)


class MLABackend(AttentionBackend):
    """A subclass gives its name, impl, state and `Capabilities(mla=True, unequal_head_dims=True, …)`."""

    contract = (1, 0)
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


def reject_other_cache_dtype(spec: AttentionSpec) -> list[Rejection]:
    """The rejection of a cache of another dtype than the queries', for kernels that read both in one of `HALF`."""
    if spec.dtype not in HALF or spec.cache_dtype not in HALF - {spec.dtype}:
        return []
    got, supported = (str(dtype).removeprefix("torch.") for dtype in (spec.cache_dtype, spec.dtype))
    return [Rejection("cache_dtype", got, f"{supported}, as the queries", "Leave cache.dtype out.")]

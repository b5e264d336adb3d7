"""vLLM's `AttentionImpl` over an impl of ours. vLLM makes it with the model, before there are weights, pages or scales:
it keeps the layer's numbers, and the builder binds it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from attn_backends.adapters.vllm.builder import ServedMetadata
from attn_backends.adapters.vllm.plugin import vllm_version
from attn_backends.adapters.vllm.reasons import cache_dtype_of, unserved
from attn_backends.adapters.vllm.versions import UNEQUAL_SINCE
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionImpl as OurImpl, Plans, Rejection, Unsupported
from attn_backends.spec import FP8_DTYPES, AttentionSpec


class ServedImpl(AttentionImpl[ServedMetadata]):  # type: ignore[misc]
    """One layer."""

    ours: ClassVar[str]  # the backend's name in our registry, set on the class
    supports_dcp = False
    supports_pcp = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None, **extra: Any,
    ) -> None:  # fmt: skip
        refuse_arguments(self.ours, attn_type, extra)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes, self.sliding_window = alibi_slopes, sliding_window
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap
        self.kv_sharing_target_layer_name, self.sinks = kv_sharing_target_layer_name, sinks
        self.impl: OurImpl[Any] | None = None
        self._seen: tuple[torch.Tensor | None, KVCache | None] = (None, None)

    def spec_of(self, layer: Any) -> AttentionSpec:
        """What the layer asks of attention.

        Raises:
            Unsupported: its cache is of a kind that none of ours serves.
        """
        head_size_v = getattr(layer, "head_size_v", self.head_size)
        cache_dtype = cache_dtype_of(self.kv_cache_dtype, layer.dtype)
        found = [cache_dtype] if isinstance(cache_dtype, Rejection) else []
        if head_size_v != self.head_size and vllm_version() < UNEQUAL_SINCE:
            found.append(unserved("head_size_v", head_size_v, f"{self.head_size}, up to vLLM 0.28"))
        if getattr(layer, "calculate_kv_scales", False):
            found.append(unserved("calculate_kv_scales", True, "scales of the checkpoint, or 1"))
        if found or isinstance(cache_dtype, Rejection):
            raise Unsupported(self.ours, found)
        return AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_size, head_size_v, self.scale,
            -1 if self.sliding_window is None else self.sliding_window - 1,  # theirs counts the query's own key
            self.logits_soft_cap or None,
            None if self.alibi_slopes is None else tuple(self.alibi_slopes),
            sinks=self.sinks is not None, dtype=layer.dtype, cache_dtype=cache_dtype,
        )  # fmt: skip

    def bind(self, layer: Any, plans: Plans[str], name: str) -> None:
        """Make our impl, now that the layer's weights and scales are loaded."""
        scales = {}
        if plans.specs[name].cache_dtype in FP8_DTYPES:  # vLLM scales no other cache
            scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        self.impl = plans.bind(name, sinks=self.sinks, **scales)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,  # [num_tokens or more, num_heads, head_size]
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,  # [blocks, num_kv_heads, block_size, head_size + head_size_v], strided
        attn_metadata: ServedMetadata | None,
        output: torch.Tensor,  # [num_tokens or more, num_heads, head_size_v]
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A layer's attention; without metadata, while vLLM measures its memory, zeros."""
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported(self.ours, [unserved("output_scale", "a quantised output", "outputs as the queries")])
        tokens, impl = attn_metadata.num_actual_tokens, self.impl
        assert impl is not None  # the builder has bound it
        if self.kv_sharing_target_layer_name is not None:
            key = value = None  # that layer has written them
        step = attn_metadata.steps[layer.layer_name]
        impl.forward(query[:tokens], key, value, self._cache(kv_cache), step, output[:tokens])
        return output

    def _cache(self, kv_cache: torch.Tensor) -> KVCache | None:
        """Keys and values lie side by side in a row's last dimension: two views, of the tensor seen last."""
        if self._seen[0] is not kv_cache:
            assert self.impl is not None
            spec = self.impl.spec
            stored = kv_cache if kv_cache.dtype is spec.cache_dtype else kv_cache.view(spec.cache_dtype)
            key, value = stored.transpose(1, 2).split([spec.head_dim, spec.head_dim_vo], -1)
            self._seen = kv_cache, KVCache(key, value)
        return self._seen[1]


def refuse_arguments(name: str, attn_type: str, extra: dict[str, Any]) -> None:
    """Refuse what a layer of vLLM's can be made with and none of ours serves.

    Raises:
        Unsupported: with the reasons.
    """
    found = [unserved(key, value, "layers without it") for key, value in extra.items() if value not in (None, False)]
    if attn_type != AttentionType.DECODER:
        found.append(unserved("attn_type", attn_type, "decoder"))
    if found:
        raise Unsupported(name, found)

"""vLLM's `MLAAttentionImpl` over an impl of our MLA family.

vLLM's layer cuts a batch in two: it absorbs the queries of decode rows by itself, and leaves the others to
`forward_mha`. Our metadata calls all rows others, so `forward_mha` has the whole batch, and our impl decides.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from attn_backends.adapters.vllm.builder import ServedMetadata
from attn_backends.adapters.vllm.layers import refuse_arguments
from attn_backends.adapters.vllm.reasons import cache_dtype_of, unserved
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionImpl as OurImpl, Plans, Rejection, Unsupported
from attn_backends.spec import FP8_DTYPES, MLASpec


class MLAServedImpl(MLAAttentionImpl[ServedMetadata]):  # type: ignore[misc]
    """One layer."""

    ours: ClassVar[str]  # the backend's name in our registry, set on the class
    supports_dcp = False
    supports_pcp = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, *, q_lora_rank: int | None, kv_lora_rank: int, qk_nope_head_dim: int,
        qk_rope_head_dim: int, qk_head_dim: int, v_head_dim: int, kv_b_proj: Any, **extra: Any,
    ) -> None:  # fmt: skip
        refuse_arguments(self.ours, attn_type or AttentionType.DECODER, {
            "alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name, **extra,
        })  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank, self.v_head_dim, self.kv_b_proj = kv_lora_rank, v_head_dim, kv_b_proj
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.dtype = torch.get_default_dtype()  # the model's, while vLLM makes it
        self.impl: OurImpl[Any] | None = None
        self._name = ""  # of the layer, as steps are found by it

    def spec_of(self, layer: Any) -> MLASpec:
        """What the layer asks of attention.

        Raises:
            Unsupported: its cache is of a kind that none of ours serves.
        """
        cache_dtype = cache_dtype_of(self.kv_cache_dtype, self.dtype)
        if isinstance(cache_dtype, Rejection):
            raise Unsupported(self.ours, [cache_dtype])
        if getattr(layer, "calculate_kv_scales", False):
            raise Unsupported(self.ours, [unserved("calculate_kv_scales", True, "scales of the checkpoint, or 1")])
        return MLASpec(
            self.num_heads, head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim, head_dim_vo=self.v_head_dim,
            kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim, scale=self.scale,
            dtype=self.dtype, cache_dtype=cache_dtype,
        )  # fmt: skip

    def bind(self, layer: Any, plans: Plans[str], name: str) -> None:
        """Make our impl, now that the layer's weights and scales are loaded."""
        from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

        scales = {}
        if plans.specs[name].cache_dtype in FP8_DTYPES:  # vLLM scales no other cache
            scales = {"k_scale": layer._k_scale_float}
        weight = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=self.dtype)
        self.impl, self._name = plans.bind(name, kv_b_proj=weight, **scales), name

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `forward_mha` writes, with the slots of its step."""

    def forward_mha(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, qk_head_dim]
        kv_c_normed: torch.Tensor,  # [num_tokens, kv_lora_rank]
        k_pe: torch.Tensor,  # [num_tokens, 1, qk_rope_head_dim]
        kv_c_and_k_pe_cache: torch.Tensor,  # [blocks, block_size, kv_lora_rank + qk_rope_head_dim]
        attn_metadata: ServedMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,  # [num_tokens, num_heads * v_head_dim]
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """The whole batch's attention, decode rows too."""
        assert self.impl is not None  # the builder has bound it
        spec, cache = self.impl.spec, kv_c_and_k_pe_cache
        if cache.dtype is not spec.cache_dtype:
            cache = cache.view(spec.cache_dtype)
        step = attn_metadata.steps[self._name]
        by_head = output.view(-1, self.num_heads, self.v_head_dim)
        self.impl.forward(q, kv_c_normed, k_pe.squeeze(1), KVCache(cache, cache[..., :0]), step, by_head)

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        """Never called: no row is a decode to vLLM."""
        raise NotImplementedError("decode rows are served by forward_mha")

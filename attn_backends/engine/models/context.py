"""What travels through a model to its attention layers: each layer's impl, cache and planned step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionImpl, AttentionStep


class AttentionContext(Protocol):
    """What travels through the model to its attention layers, as the keyword argument `attention_context`."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]; MLA: [num_tokens, kv_lora_rank]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_vo]; MLA: [num_tokens, qk_rope_head_dim]
        constants: Mapping[str, Any],  # scaling, sliding_window, softcap, s_aux, …
    ) -> torch.Tensor: ...  # [num_tokens, num_qo_heads, head_dim_vo]


Steps = Mapping[int, AttentionStep[Any]]  # by layer


class StepContext:
    """One step, as the model's attention layers see it: each layer's Impl, cache and planned step."""

    def __init__(self, impls: Mapping[int, AttentionImpl[Any]], caches: Mapping[int, KVCache], steps: Steps) -> None:
        self.impls = impls
        self.caches = caches
        self.steps = steps

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        constants: Mapping[str, Any],
    ) -> torch.Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]  # the dry run has checked it
        return self.impls[layer].forward(query, key, value, self.caches[layer], self.steps[layer])

"""The attention layers of published models, as data (`data/models.json`): shapes that nobody tuned for."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter

from attn_backends.spec import AttentionSpec, MLASpec, alibi_slopes


class PublishedModel(BaseModel):
    """One model's attention, as its configuration says. `None` in a feature: the model does not have it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_vo: int | None = None  # None: head_dim
    window_left: int | None = None  # of local layers, self excluded
    chunk_size: int | None = None  # of local layers
    every_layer_is_local: bool = True  # where there is a window or a chunk; False: some layers see all keys
    logits_soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    kv_lora_rank: int | None = None  # of a model with multi-head latent attention
    qk_rope_head_dim: int | None = None

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None

    def specs(self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> list[AttentionSpec]:
        """The model's different layers, local ones first."""
        plain: dict[str, Any] = {
            "num_qo_heads": self.num_qo_heads,
            "head_dim": self.head_dim,
            "head_dim_vo": self.head_dim if self.head_dim_vo is None else self.head_dim_vo,
            "dtype": dtype,
            "cache_dtype": cache_dtype,
        }
        if self.kv_lora_rank is not None and self.qk_rope_head_dim is not None:
            return [MLASpec(**plain, kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim)]
        plain |= {
            "num_kv_heads": self.num_kv_heads,
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": self.sinks,
            "alibi_slopes": alibi_slopes(self.num_qo_heads) if self.alibi else None,
        }
        local: list[dict[str, Any]] = []
        if self.window_left is not None:
            local = [{"window_left": self.window_left}]
        elif self.chunk_size is not None:
            local = [{"chunk_size": self.chunk_size}]
        full: list[dict[str, Any]] = [] if local and self.every_layer_is_local else [{}]
        return [AttentionSpec(**plain, **each) for each in local + full]


@cache
def published_models() -> tuple[PublishedModel, ...]:
    """All models of the data file, in its order."""
    text = files("attn_backends.testing.data").joinpath("models.json").read_text()
    return TypeAdapter(tuple[PublishedModel, ...]).validate_json(text)

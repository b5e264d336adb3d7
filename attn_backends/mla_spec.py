"""`MLASpec`: what a layer of multi-head latent attention asks, in plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from attn_backends.spec import AttentionSpec


@dataclass(frozen=True)
class MLASpec(AttentionSpec):
    """One layer of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). The defaults are V3's.

    The inherited numbers say what is computed: every head has keys and values of its own. `head_dim` is
    `qk_nope_head_dim + qk_rope_head_dim`, `head_dim_vo` is `v_head_dim`; a model that stretches RoPE gives
    its own scale. The two new ones say what is cached instead: one latent row a token.

    >>> MLASpec(128).latent_dim, MLASpec(128).qk_nope_head_dim
    (576, 128)
    """

    num_kv_heads: int = cast(int, None)  # None: num_qo_heads, and nothing else
    head_dim: int = 192
    head_dim_vo: int = 128
    kv_lora_rank: int = 512  # of the compressed keys and values, after their norm
    qk_rope_head_dim: int = 64  # of the key that all heads share, after RoPE: the last part of `head_dim`

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_qo_heads)
        super().__post_init__()

    def _check(self) -> None:
        super()._check()
        if self.num_kv_heads != self.num_qo_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads} for {self.num_qo_heads} query heads: in MLA each has its own "
                "keys and values, expanded from the latent rows; leave num_kv_heads out"
            )
        if self.kv_lora_rank < 1 or not 1 <= self.qk_rope_head_dim < self.head_dim:
            raise ValueError(
                f"kv_lora_rank is {self.kv_lora_rank} and qk_rope_head_dim {self.qk_rope_head_dim} of head_dim "
                f"{self.head_dim}: need kv_lora_rank >= 1 and 1 <= qk_rope_head_dim < head_dim"
            )

    @property
    def qk_nope_head_dim(self) -> int:
        """The first part of `head_dim`, which knows no positions."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached a token: the latent row, then the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def new_kv_shapes(spec: AttentionSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a token brings: the shapes of its rows in `key` and `value`, as `AttentionImpl.forward` takes them."""
    if isinstance(spec, MLASpec):
        return (spec.kv_lora_rank,), (spec.qk_rope_head_dim,)
    return (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim_vo)

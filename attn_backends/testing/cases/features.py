"""The plain layer and pool that a backend's capabilities allow, and what a layer can ask of attention beyond them: a
table of changes and the capabilities they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from attn_backends.cache.kv_cache import get_kv_cache_layout
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import Capabilities
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, MLASpec, alibi_slopes

_ROPE: Mapping[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA"}
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Feature:
    """Changes to a plain layer. `needs` are names of `Capabilities` flags, which are also the codes of refusals."""

    name: str
    needs: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    alibi: bool | Literal["standard"] = False

    def spec_changes(self, num_qo_heads: int) -> dict[str, Any]:
        """Arguments of `AttentionSpec`, for a layer of so many query heads."""
        slopes = tuple(2.0 ** (-0.5 * head) for head in range(num_qo_heads))
        if self.alibi == "standard":
            slopes = alibi_slopes(num_qo_heads)
        return {**self.changes, **({"alibi_slopes": slopes} if self.alibi else {})}


FEATURES = (
    Feature("plain"),
    Feature("scale", changes={"scale": 0.3}),
    Feature("window_0", ("window",), {"window_left": 0}),
    Feature("window_1", ("window",), {"window_left": 1}),
    Feature("window_15", ("window",), {"window_left": 15}),
    Feature("window_16", ("window",), {"window_left": 16}),
    Feature("window_300", ("window",), {"window_left": 300}),
    Feature("soft_cap", ("soft_cap",), {"logits_soft_cap": 1.5}),
    Feature("alibi", ("alibi",), alibi=True),
    Feature("sinks", ("sinks",), {"sinks": True}),
    Feature("chunks", ("chunks",), {"chunk_size": 8}),
    Feature("chunks_24", ("chunks",), {"chunk_size": 24}),
    Feature("non_causal", ("non_causal",), {"causal": False}),
    Feature("non_causal_window", ("non_causal", "window"), {"causal": False, "window_left": 5}),
    Feature("non_causal_chunks", ("non_causal", "chunks"), {"causal": False, "chunk_size": 100}),
    Feature("gemma2", ("window", "soft_cap"), {"window_left": 20, "logits_soft_cap": 2.0, "scale": 0.2}),
    Feature("gpt_oss", ("window", "sinks"), {"window_left": 20, "sinks": True}),
    Feature("soft_cap_and_sinks", ("soft_cap", "sinks"), {"logits_soft_cap": 1.5, "sinks": True}),
    Feature("alibi_and_window", ("alibi", "window"), {"window_left": 20}, alibi=True),
    Feature("alibi_and_window_300", ("alibi", "window"), {"window_left": 300}, alibi=True),  # wider than most rows
    Feature("alibi_and_soft_cap", ("alibi", "soft_cap"), {"logits_soft_cap": 1.5}, alibi=True),
    Feature("standard_alibi", ("alibi",), alibi="standard"),
    Feature("standard_alibi_and_window", ("alibi", "window"), {"window_left": 20}, alibi="standard"),
    Feature("standard_alibi_and_sinks", ("alibi", "sinks"), {"sinks": True}, alibi="standard"),
    Feature("rope", ("rope",), _ROPE),
    Feature("rope_scaled", ("rope",), {**_ROPE, "rope_scale": 3.0, "rope_theta": 5e5}),
    Feature("rope_and_window", ("rope", "window"), {**_ROPE, "window_left": 20}),
    Feature("rope_soft_cap_and_sinks", ("rope", "soft_cap", "sinks"), {**_ROPE, "logits_soft_cap": 1.5, "sinks": True}),
    Feature("rope_non_causal", ("rope", "non_causal"), {**_ROPE, "causal": False}),
)
ENCODER = Feature("encoder", ("attention_type",), {"attention_type": AttentionType.ENCODER, "causal": False})
NON_CAUSAL_ALIBI = Feature("non_causal_alibi", ("alibi", "non_causal"), {"causal": False}, alibi=True)
CROSS = Feature("cross", ("attention_type",), {"attention_type": AttentionType.CROSS, "causal": False})


def feature(name: str) -> Feature:
    return next(f for f in (*FEATURES, ENCODER, CROSS) if f.name == name)


def plain_spec(can: Capabilities, **changes: Any) -> AttentionSpec:
    """4 query heads over 2 KV heads, the smallest declared head_dim (32 for any), the first of `FLOATS` declared.

    For the MLA family 4 heads, or the fewest declared, and the smallest latent rows.
    """
    dtype = next(dtype for dtype in FLOATS if dtype in can.dtypes)
    if can.mla:
        rope = min(can.qk_rope_head_dims or {8})
        dims = can.head_dims or {rope + 16, 16}
        latent = {"kv_lora_rank": min(can.kv_lora_ranks or {32}), "qk_rope_head_dim": rope}
        heads = {"num_qo_heads": min(can.head_counts or {4}), "head_dim": max(dims), "head_dim_vo": min(dims)}
        return MLASpec(**{**heads, **latent, "dtype": dtype, **changes})
    plain = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": min(can.head_dims or {32}), "dtype": dtype}
    return AttentionSpec(**{**plain, **changes})


def plain_cache(can: Capabilities) -> KVCacheSpec:
    """Pages of 16, or the smallest that is allowed; NHD, or what there is."""
    sizes = can.page_sizes or {max(16, can.page_size_multiple)}
    return KVCacheSpec(64, 16 if 16 in sizes else min(sizes), get_kv_cache_layout(can.layouts))


def undeclared(backend: type[AttentionBackend], spec: AttentionSpec, cache: KVCacheSpec, device: str) -> set[str]:
    """Codes of everything about a layer that `backend.capabilities()` does not declare, `cuda_graph` aside.

    Worked out here once more, so that a backend whose `reject` says less than its table is found out.
    """
    can = backend.capabilities()
    if isinstance(spec, MLASpec) != can.mla:
        return {"mla"}
    allowed: dict[str, tuple[Any, Any]] = {
        "dtype": (spec.dtype, can.dtypes),
        "cache_dtype": (spec.cache_dtype, can.cache_dtypes),
        "num_qo_heads": (spec.num_qo_heads, can.head_counts),
        "head_dim": (spec.head_dim, can.head_dims),
        "head_dim_vo": (spec.head_dim_vo, can.head_dims),
        "page_size": (cache.page_size, can.page_sizes),
        "layout": (cache.layout, can.layouts),
        "attention_type": (spec.attention_type, can.attention_types),
        "device": (device.partition(":")[0], can.devices),
    }
    if isinstance(spec, MLASpec):
        allowed["kv_lora_rank"] = (spec.kv_lora_rank, can.kv_lora_ranks)
        allowed["qk_rope_head_dim"] = (spec.qk_rope_head_dim, can.qk_rope_head_dims)
    pairs = zip(spec.alibi_slopes or (), alibi_slopes(spec.num_qo_heads), strict=spec.alibi_slopes is not None)
    own_slopes = any(abs(given - paper) > 1e-6 * paper for given, paper in pairs)
    asked = {
        "rope": spec.pos_encoding_mode == "ROPE_LLAMA",
        "window": spec.window_left >= 0,
        "soft_cap": spec.logits_soft_cap is not None,
        "alibi": spec.alibi_slopes is not None and (own_slopes or not can.standard_alibi),
        "sinks": spec.sinks,
        "chunks": spec.chunk_size is not None,
        "non_causal": spec.attention_type is AttentionType.DECODER and not spec.causal,
        "unequal_head_dims": spec.head_dim != spec.head_dim_vo,
        "any_scale": spec.scale <= 0,
    }
    codes = {code for code, (got, some) in allowed.items() if some is not None and got not in some}
    codes |= {code for code, wanted in asked.items() if wanted and not getattr(can, code)}
    return codes | ({"page_size"} if cache.page_size % can.page_size_multiple else set())

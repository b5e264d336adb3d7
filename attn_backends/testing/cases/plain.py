"""The plain layer and pool that a backend's capabilities allow, and what a layer asks beyond them."""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.cache.kv_cache import get_kv_cache_layout
from attn_backends.interface import AttentionBackend
from attn_backends.interface.capabilities import Capabilities
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, MLASpec, alibi_slopes

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
    }
    codes = {code for code, (got, some) in allowed.items() if some is not None and got not in some}
    codes |= {code for code, wanted in asked.items() if wanted and not getattr(can, code)}
    return codes | ({"page_size"} if cache.page_size % can.page_size_multiple else set())

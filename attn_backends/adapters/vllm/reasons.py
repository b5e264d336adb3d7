"""What vLLM asks of a backend, in our words, and why it is refused; and what a user tells ours in its configuration:
`additional_config={"attn_backends": {"options": …}}`. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_backends.interface.capabilities import Rejection
from attn_backends.registry import explain_for
from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec

CACHE_DTYPES: dict[str, torch.dtype | None] = {  # vLLM's words; None: as the queries
    "auto": None,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_READ = {  # of vLLM's question, what is answered below
    "head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "attn_type", "has_sliding_window",
    "device_capability", "use_kv_connector",
}  # fmt: skip
_REFUSED = {  # what it may ask for besides, and nobody here serves
    "use_sparse": "sparse attention over an index",
    "use_mm_prefix": "image tokens that see each other",
    "use_per_head_quant_scales": "a scale for each head of an fp8 cache",
    "use_non_causal": "decoder layers that see later tokens",
    "use_batch_invariant": "results that do not depend on the batch",
    "use_pcp": "prefill context parallelism",
    "use_dcp": "decode context parallelism",
    "use_rswa": "windows beside a prefix that all see (R-SWA)",
    "use_adaptive_verification": "query lengths that the device alone knows",
}
KEY = "attn_backends"  # in `additional_config`
_KNOWN = ("options",)


def unserved(code: str, got: object, supported: str, hint: str = "Choose one of vLLM's own backends.") -> Rejection:
    """A reason that the adapter gives, in the form of a backend's."""
    return Rejection(code, str(got), supported, hint)


def cache_dtype_of(kv_cache_dtype: str | None, dtype: torch.dtype) -> torch.dtype | Rejection:
    """What a cache of vLLM's word for its dtype holds, or why none of ours does."""
    word = kv_cache_dtype or "auto"
    if word not in CACHE_DTYPES:
        return unserved("kv_cache_dtype", word, ", ".join(CACHE_DTYPES), "Pass another --kv-cache-dtype.")
    return CACHE_DTYPES[word] or dtype


def spec_of(asked: Mapping[str, Any], model: Any, parallel: Any) -> AttentionSpec:
    """A layer of what vLLM asks about. Its question has no head counts, and a window without its size: those of the
    model are taken, where there is one.

    Args:
        asked: the arguments of `validate_configuration`.
        model, parallel: vLLM's `ModelConfig` and `ParallelConfig`, or None.
    """
    dtype = asked["dtype"]
    cache_dtype = cache_dtype_of(asked.get("kv_cache_dtype"), dtype)
    dtypes = {"dtype": dtype, "cache_dtype": cache_dtype if isinstance(cache_dtype, torch.dtype) else dtype}
    if asked.get("use_mla"):
        text = getattr(model, "hf_text_config", None)
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        rank, rope, nope, wide = (getattr(text, name, None) for name in names)
        heads = model.get_num_attention_heads(parallel) if model is not None else 1
        return MLASpec(
            heads, head_dim=(nope or 128) + (rope or 64), head_dim_vo=wide or 128, kv_lora_rank=rank or 512,
            qk_rope_head_dim=rope or 64, **dtypes,
        )  # fmt: skip
    heads = kv_heads = 1
    if model is not None:
        heads, kv_heads = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    window = 127 if asked.get("has_sliding_window") else -1
    return AttentionSpec(
        heads if heads % kv_heads == 0 else kv_heads, kv_heads, asked["head_size"], window_left=window,
        sinks=bool(asked.get("has_sink")), **dtypes,
    )  # fmt: skip


def reasons_against(
    name: str, asked: Mapping[str, Any], device: torch.device | str, options: Mapping[str, Any] | None = None,
    model: Any = None, parallel: Any = None, layout: Any = "NHD", page_size: int = 16,
) -> list[str]:  # fmt: skip
    """Why a backend of ours cannot serve what vLLM asks about; empty if it can.

    Args:
        asked: the arguments of `validate_configuration`.
        page_size: what to take where vLLM leaves the choice open.
    """
    found = [unserved(key, asked[key], "layers without " + what) for key, what in _REFUSED.items() if asked.get(key)]
    found += [
        unserved(key, asked[key], "what attn_backends' adapter knows of vLLM's questions")
        for key in asked
        if key not in _READ and key not in _REFUSED and asked[key]
    ]
    if str(asked.get("attn_type") or "decoder") not in ("decoder", "AttentionType.DECODER"):
        found.append(unserved("attn_type", asked["attn_type"], "decoder"))
    cache_dtype = cache_dtype_of(asked.get("kv_cache_dtype"), asked["dtype"])
    if isinstance(cache_dtype, Rejection):
        found.append(cache_dtype)
    cache = KVCacheSpec(None, asked.get("block_size") or page_size, layout)
    return [*map(str, found), *explain_for(name, spec_of(asked, model, parallel), cache, device, options)]


def options_from(vllm_config: Any) -> dict[str, Any]:
    """The `backend_options` in vLLM's configuration, not validated yet.

    Raises:
        ValueError: there is something else under our key.
    """
    additional = getattr(vllm_config, "additional_config", None)
    given = additional.get(KEY) or {} if isinstance(additional, Mapping) else {}
    unknown = [key for key in given if key not in _KNOWN]
    if unknown:
        raise ValueError(
            f"additional_config[{KEY!r}] has {', '.join(map(repr, unknown))}; known: {', '.join(_KNOWN)}. For example "
            f'--additional-config \'{{"{KEY}": {{"options": {{}}}}}}\''
        )
    return dict(given.get("options") or {})

"""One registry of paged-attention backends for LLM inference. Importing it loads no kernel library, not even torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_backends.batch import CommonAttentionMetadata, SequenceData, SequenceGroup
    from attn_backends.config import EngineConfig, SamplingParams, load_config
    from attn_backends.engine.llm import LLM
    from attn_backends.engine.outputs import RequestOutput, TextChunk
    from attn_backends.interface import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadata,
        AttentionMetadataBuilder,
        AttentionState,
        AttentionStep,
        Capabilities,
        CudaGraphSupport,
        Rejection,
        Unsupported,
    )
    from attn_backends.kv_cache import KVCache, allocate_kv_cache, copy_pages, swap_pages, write_kv
    from attn_backends.registry import backends, explain, get_backend, register_backend, select_backend
    from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, PlanGroup, plan_groups

_HOME = {
    name: module
    for module, names in {
        "batch": "CommonAttentionMetadata SequenceData SequenceGroup",
        "config": "EngineConfig SamplingParams load_config",
        "engine.llm": "LLM",
        "engine.outputs": "RequestOutput TextChunk",
        "interface": "AttentionBackend AttentionImpl AttentionMetadata AttentionMetadataBuilder AttentionState "
        "AttentionStep Capabilities CudaGraphSupport Rejection Unsupported",
        "kv_cache": "KVCache allocate_kv_cache copy_pages swap_pages write_kv",
        "registry": "backends explain get_backend register_backend select_backend",
        "spec": "AttentionSpec AttentionType KVCacheSpec Limits PlanGroup plan_groups",
    }.items()
    for name in names.split()
}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

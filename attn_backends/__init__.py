"""One registry of paged-attention backends for LLM inference. Importing it loads no kernel library, not even torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_backends.batch import (
        CommonAttentionMetadata as CommonAttentionMetadata,
        SequenceData as SequenceData,
        SequenceGroup as SequenceGroup,
    )
    from attn_backends.config import (
        EngineConfig as EngineConfig,
        SamplingParams as SamplingParams,
        load_config as load_config,
    )
    from attn_backends.engine.llm import (
        LLM as LLM,
    )
    from attn_backends.engine.outputs import (
        RequestOutput as RequestOutput,
        TextChunk as TextChunk,
    )
    from attn_backends.interface import (
        AttentionBackend as AttentionBackend,
        AttentionImpl as AttentionImpl,
        AttentionMetadata as AttentionMetadata,
        AttentionMetadataBuilder as AttentionMetadataBuilder,
        AttentionState as AttentionState,
        AttentionStep as AttentionStep,
        Capabilities as Capabilities,
        CudaGraphSupport as CudaGraphSupport,
        Rejection as Rejection,
        Unsupported as Unsupported,
    )
    from attn_backends.kv_cache import (
        KVCache as KVCache,
        allocate_kv_cache as allocate_kv_cache,
        copy_pages as copy_pages,
        swap_pages as swap_pages,
        write_kv as write_kv,
    )
    from attn_backends.registry import (
        explain as explain,
        get_backend as get_backend,
        register_backend as register_backend,
        select_backend as select_backend,
    )
    from attn_backends.spec import (
        AttentionSpec as AttentionSpec,
        AttentionType as AttentionType,
        KVCacheSpec as KVCacheSpec,
        Limits as Limits,
        PlanGroup as PlanGroup,
        plan_groups as plan_groups,
    )

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
        "registry": "explain get_backend register_backend select_backend",
        "spec": "AttentionSpec AttentionType KVCacheSpec Limits PlanGroup plan_groups",
    }.items()
    for name in names.split()
}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

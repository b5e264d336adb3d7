"""One registry of paged-attention backends for LLM inference. Importing it loads no kernel library, not even torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {  # type checkers read __init__.pyi, which says the same
    name: module
    for module, names in {
        "batch.common": "CommonAttentionMetadata SequenceData SequenceGroup",
        "batch.order": "reorder_batch_to_split_decodes_and_prefills split_decodes_and_prefills",
        "batch.page_table": "common_prefix_len",
        "batch.views": "pad_rows slice_rows unpad_rows",
        "cache.kv_cache": "KVCache allocate_kv_cache copy_pages swap_pages write_kv write_latent",
        "cache.views": "as_kv_cache",
        "engine.config": "EngineConfig SamplingParams",
        "engine.config_sources": "load_config",
        "engine.llm": "LLM",
        "engine.outputs": "RequestOutput TextChunk",
        "interface": "AttentionBackend AttentionImpl AttentionMetadata AttentionMetadataBuilder AttentionState "
        "AttentionStep CONTRACT Capabilities ContractMismatch CudaGraphSupport Plans Rejection Unsupported "
        "check_contract",
        "registry": "Load explain get_backend register_backend select_backend validate_options",
        "spec": "AttentionSpec AttentionType KVCacheSpec Limits MLASpec PlanGroup plan_groups",
        "step.table": "StepTable",
    }.items()
    for name in names.split()
}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

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
    from attn_backends.batch_order import (
        BatchSplit as BatchSplit,
        SwappableRows as SwappableRows,
        reorder_batch_to_split_decodes_and_prefills as reorder_batch_to_split_decodes_and_prefills,
        split_decodes_and_prefills as split_decodes_and_prefills,
    )
    from attn_backends.batch_views import (
        pad_rows as pad_rows,
        slice_rows as slice_rows,
        unpad_rows as unpad_rows,
    )
    from attn_backends.capabilities import (
        Capabilities as Capabilities,
        CudaGraphSupport as CudaGraphSupport,
        Rejection as Rejection,
        Unsupported as Unsupported,
    )
    from attn_backends.config import (
        EngineConfig as EngineConfig,
        SamplingParams as SamplingParams,
        load_config as load_config,
    )
    from attn_backends.cuda_graphs import (
        CudaRecorder as CudaRecorder,
        GraphRecorder as GraphRecorder,
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
    )
    from attn_backends.kv_cache import (
        KVCache as KVCache,
        allocate_kv_cache as allocate_kv_cache,
        copy_pages as copy_pages,
        get_kv_cache_layout as get_kv_cache_layout,
        swap_pages as swap_pages,
        write_kv as write_kv,
        write_latent as write_latent,
    )
    from attn_backends.layer_parameters import (
        PerLayerParameters as PerLayerParameters,
        get_per_layer_parameters as get_per_layer_parameters,
        infer_global_hyperparameters as infer_global_hyperparameters,
    )
    from attn_backends.measured import Load as Load
    from attn_backends.mla_spec import (
        MLASpec as MLASpec,
    )
    from attn_backends.page_table import (
        common_prefix_len as common_prefix_len,
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
    from attn_backends.step_table import (
        StepBatch as StepBatch,
        StepTable as StepTable,
    )
    from attn_backends.virtual_batches import (
        make_local_attention_virtual_batches as make_local_attention_virtual_batches,
    )

_HOME = {
    name: module
    for module, names in {
        "batch": "CommonAttentionMetadata SequenceData SequenceGroup",
        "batch_order": "BatchSplit SwappableRows reorder_batch_to_split_decodes_and_prefills "
        "split_decodes_and_prefills",
        "batch_views": "pad_rows slice_rows unpad_rows",
        "capabilities": "Capabilities CudaGraphSupport Rejection Unsupported",
        "config": "EngineConfig SamplingParams load_config",
        "cuda_graphs": "CudaRecorder GraphRecorder",
        "engine.llm": "LLM",
        "engine.outputs": "RequestOutput TextChunk",
        "interface": "AttentionBackend AttentionImpl AttentionMetadata AttentionMetadataBuilder AttentionState "
        "AttentionStep",
        "kv_cache": "KVCache allocate_kv_cache copy_pages get_kv_cache_layout swap_pages write_kv write_latent",
        "layer_parameters": "PerLayerParameters get_per_layer_parameters infer_global_hyperparameters",
        "mla_spec": "MLASpec",
        "measured": "Load",
        "page_table": "common_prefix_len",
        "registry": "explain get_backend register_backend select_backend",
        "spec": "AttentionSpec AttentionType KVCacheSpec Limits PlanGroup plan_groups",
        "step_table": "StepBatch StepTable",
        "virtual_batches": "make_local_attention_virtual_batches",
    }.items()
    for name in names.split()
}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

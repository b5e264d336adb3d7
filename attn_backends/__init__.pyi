# What `attn_backends` offers, for type checkers and editors; at run time __init__.py imports it when it is first used.
from attn_backends.batch.common import (
    CommonAttentionMetadata as CommonAttentionMetadata,
    SequenceData as SequenceData,
    SequenceGroup as SequenceGroup,
)
from attn_backends.batch.order import (
    reorder_batch_to_split_decodes_and_prefills as reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills as split_decodes_and_prefills,
)
from attn_backends.batch.page_table import (
    common_prefix_len as common_prefix_len,
)
from attn_backends.batch.views import (
    pad_rows as pad_rows,
    slice_rows as slice_rows,
    unpad_rows as unpad_rows,
)
from attn_backends.cache.kv_cache import (
    KVCache as KVCache,
    allocate_kv_cache as allocate_kv_cache,
    copy_pages as copy_pages,
    swap_pages as swap_pages,
    write_kv as write_kv,
    write_latent as write_latent,
)
from attn_backends.cache.views import (
    as_kv_cache as as_kv_cache,
)
from attn_backends.engine.config import (
    EngineConfig as EngineConfig,
    SamplingParams as SamplingParams,
)
from attn_backends.engine.config_sources import (
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
    CONTRACT as CONTRACT,
    AttentionBackend as AttentionBackend,
    AttentionImpl as AttentionImpl,
    AttentionMetadata as AttentionMetadata,
    AttentionMetadataBuilder as AttentionMetadataBuilder,
    AttentionState as AttentionState,
    AttentionStep as AttentionStep,
    Capabilities as Capabilities,
    ContractMismatch as ContractMismatch,
    CudaGraphSupport as CudaGraphSupport,
    Plans as Plans,
    Rejection as Rejection,
    Unsupported as Unsupported,
    check_contract as check_contract,
)
from attn_backends.registry import (
    Load as Load,
    explain as explain,
    get_backend as get_backend,
    register_backend as register_backend,
    select_backend as select_backend,
    validate_options as validate_options,
)
from attn_backends.spec import (
    AttentionSpec as AttentionSpec,
    AttentionType as AttentionType,
    KVCacheSpec as KVCacheSpec,
    Limits as Limits,
    MLASpec as MLASpec,
    PlanGroup as PlanGroup,
    plan_groups as plan_groups,
)
from attn_backends.step.table import (
    StepTable as StepTable,
)

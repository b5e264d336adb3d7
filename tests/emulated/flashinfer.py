"""FlashInfer 0.6.12 played on a CPU: decode, paged and ragged prefill, cascades, MLA, with its plans, checks and traps.

    from tests.emulated import flashinfer
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(2**27, dtype=torch.uint8))

What a plan decides is in the int workspace and the list that it returns: a run on a plan that is too old attends only
the keys planned then. Window, soft cap and scale are those of the plan. Runs read no tensor on the host.
"""

from __future__ import annotations

from tests.emulated import (
    flashinfer_cascade as cascade,
    flashinfer_decode as decode,
    flashinfer_mla as mla,
    flashinfer_prefill as prefill,
)
from tests.emulated.flashinfer_cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from tests.emulated.flashinfer_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from tests.emulated.flashinfer_prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

__version__ = "0.6.12"
DEVICES = frozenset({"cpu", "cuda"})

__all__ = [
    "DEVICES",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "cascade",
    "decode",
    "fast_decode_plan",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "prefill",
]

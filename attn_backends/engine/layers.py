"""What every step of a model goes through, eager or captured: plans for all groups, then one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.cache.kv_cache import KVCache
from attn_backends.engine.models.context import AttentionContext, StepContext, Steps
from attn_backends.engine.models.loaded_model import LoadedModel
from attn_backends.interface import AttentionState, Plans


@dataclass(frozen=True)
class Layers:
    """A model with the plans of its layers, which are bound, and a cache for each."""

    model: LoadedModel
    plans: Plans[int]
    caches: Mapping[int, KVCache]

    def plan(self, state: AttentionState[Any], common: CommonAttentionMetadata, common_prefix_len: int = 0) -> Steps:
        """Build and plan a batch for every group. A graph's state fills its buffers here, at capture as at replay."""
        return self.plans.plan(common, common_prefix_len, state=state)

    def context(self, steps: Steps) -> AttentionContext:
        return StepContext(self.plans.impls, self.caches, steps)

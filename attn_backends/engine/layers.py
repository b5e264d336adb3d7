"""What every step of a model goes through, eager or captured: plans for all groups, then one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.cache.kv_cache import KVCache
from attn_backends.engine.models.context import AttentionContext, StepContext, Steps
from attn_backends.engine.models.loaded_model import LoadedModel
from attn_backends.interface import AttentionImpl, AttentionMetadataBuilder, AttentionState, AttentionStep
from attn_backends.spec import PlanGroup


@dataclass(frozen=True)
class Layers:
    """A model with a builder for each plan group, and an impl and a cache for each layer."""

    model: LoadedModel
    groups: Sequence[PlanGroup[int]]
    builders: Sequence[AttentionMetadataBuilder[Any]]
    impls: Mapping[int, AttentionImpl[Any]]
    caches: Mapping[int, KVCache]

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model.prepared(self.builders, self.impls, self.caches))

    def plan(self, state: AttentionState[Any], common: CommonAttentionMetadata, common_prefix_len: int = 0) -> Steps:
        """Build and plan a batch for every group. A graph's state fills its buffers here, at capture as at replay."""
        steps: dict[int, AttentionStep[Any]] = {}
        for group, builder in zip(self.groups, self.builders, strict=True):
            step = state.begin_forward(builder.build(common_prefix_len, common))
            steps.update(dict.fromkeys(group.layers, step))
        return steps

    def context(self, steps: Steps) -> AttentionContext:
        return StepContext(self.impls, self.caches, steps)

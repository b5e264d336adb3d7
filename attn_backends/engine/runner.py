"""Runs one scheduled batch: metadata for each plan group, one pass through the model, logits of sampling rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attn_backends.batch import CommonAttentionMetadata
from attn_backends.engine.hf import LoadedModel
from attn_backends.engine.scheduler import ScheduledBatch
from attn_backends.interface import AttentionBackend, AttentionImpl, AttentionStep
from attn_backends.kv_cache import KVCache, allocate_kv_cache
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, plan_groups


class StepContext:
    """One step, as the model's attention layers see it: each layer's Impl, cache and planned step."""

    def __init__(
        self,
        impls: Mapping[int, AttentionImpl[Any]],
        caches: Mapping[int, KVCache],
        steps: Mapping[int, AttentionStep[Any]],
    ) -> None:
        self.impls = impls
        self.caches = caches
        self.steps = steps

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        constants: Mapping[str, Any],
    ) -> torch.Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]  # the dry run has checked it
        return self.impls[layer].forward(query, key, value, self.caches[layer], self.steps[layer])


class ModelRunner:
    """A model, its KV pool, and one backend's builders, state and impls.

    Args:
        specs: the layers as the backend was selected for them (cache dtype included).
        options: the backend's validated options, or None.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: type[AttentionBackend],
        specs: Mapping[int, AttentionSpec],
        cache: KVCacheSpec,
        limits: Limits,
        device: torch.device,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        options: object = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self.groups = plan_groups(specs)
        self.pool = allocate_kv_cache(backend, specs, cache, device)
        self.state = backend.get_state_cls()(self.groups, cache, limits, device, options=options)
        builder = backend.get_builder_cls()
        self.builders = [builder(group, cache, limits, device, options=options) for group in self.groups]
        self.impls = {
            layer: backend.get_impl_cls()(
                spec, cache, device, sinks=model.layers[layer].sinks, k_scale=k_scale, v_scale=v_scale, options=options
            )
            for layer, spec in specs.items()
        }

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> torch.Tensor:
        """Logits [len(batch.sample_rows), vocab] of the rows whose last token is their last known one."""
        padding = max(0, self.model.min_tokens - len(batch.token_ids))
        common = CommonAttentionMetadata.from_sequence_groups(
            batch.groups(), self.cache.page_size, self.device, num_padded_reqs=padding
        )
        steps: dict[int, AttentionStep[Any]] = {}
        for group, builder in zip(self.groups, self.builders, strict=True):
            step = self.state.begin_forward(builder.build(0, common))
            steps.update(dict.fromkeys(group.layers, step))
        last_tokens = np.cumsum(batch.query_lens, dtype=np.int64) - 1
        logits_at = last_tokens[batch.sample_rows]
        logits = self.model.forward(
            self._tensor(batch.token_ids, padding),
            self._tensor(batch.positions, padding),
            self._tensor(logits_at, max(0, self.model.min_tokens - len(logits_at))),
            StepContext(self.impls, self.pool.layers, steps),
        )
        return logits[: len(logits_at)]

    def _tensor(self, values: NDArray[np.int64], padding: int) -> torch.Tensor:
        """On the device, with zeros behind."""
        return torch.from_numpy(np.pad(values, (0, padding))).to(self.device)

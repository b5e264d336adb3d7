"""The attention layers of a model as they show themselves when they run, and the plans that serve them.

transformers calls attention layer by layer and says nothing of a layer before. So what is asked is gathered: a new spec
makes the plans anew, over all specs known by then. From the second step on they are one state for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from attn_backends.adapters.transformers.refuse import decline
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.cache.kv_cache import KVCache, allocate_kv_cache
from attn_backends.interface import AttentionImpl, AttentionStep, Plans
from attn_backends.registry import select_backend, validate_options
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits


def writable() -> torch.inference_mode:
    """Tensors that are made within can be written later, whether under `torch.inference_mode()` or not."""
    return torch.inference_mode(False)


class LayerCall(NamedTuple):
    """One layer's call, checked."""

    module: torch.nn.Module
    query: torch.Tensor  # [batch, num_qo_heads, num_tokens, head_dim]
    key: torch.Tensor  # [batch, num_kv_heads, num_keys, head_dim]
    value: torch.Tensor  # [batch, num_kv_heads, num_keys, head_dim_vo]
    spec: AttentionSpec
    sinks: torch.Tensor | None  # [num_qo_heads]


@lru_cache(maxsize=512)
def layer_spec(
    heads: tuple[int, int], dims: tuple[int, int], scale: float | None, window: int | None, soft_cap: float | None,
    sinks: bool, dtype: torch.dtype,
) -> AttentionSpec:  # fmt: skip
    """A layer in plain values. transformers counts a query's own key into its window, and 0 is no cap."""
    resolved: dict[str, Any] = {} if scale is None else {"scale": scale}
    return AttentionSpec(*heads, *dims, window_left=-1 if window is None else window - 1,
                         logits_soft_cap=soft_cap or None, sinks=sinks, dtype=dtype, **resolved)  # fmt: skip


class CalledLayers:
    """Layers on the backend of one name, over caches of one page size.

    Args:
        name: a backend's name in the registry, used or refused; or AUTO.
        options: the backend's own.
        caches: what the cache may be, best first; the first that is served stays.
    """

    def __init__(self, name: str, options: Mapping[str, Any], caches: Sequence[KVCacheSpec]) -> None:
        self.name, self.options, self.caches = name, options, list(caches)
        self.limits = Limits(1, 1, 1)
        self._specs: dict[AttentionSpec, torch.device] = {}  # in order of first appearance
        self._plans: Plans[AttentionSpec] | None = None
        self._impls: WeakKeyDictionary[torch.nn.Module, _Bound] = WeakKeyDictionary()
        self._planned: tuple[CommonAttentionMetadata | None, Plans[AttentionSpec] | None] = (None, None)
        self._steps: Mapping[AttentionSpec, AttentionStep[Any]] = {}  # of what is planned

    def show(self, spec: AttentionSpec, device: torch.device) -> None:
        """Take a layer in.

        Raises:
            Unsupported: the backend does not serve it; the reasons say why.
        """
        first = next(iter(self._specs.values()), device)
        if device != first:
            decline("device", f"a layer on {device}, others on {first}", "one device", "Load with device_map=None.")
        if spec in self._specs:
            return
        self._specs[spec] = device
        self._plans = None
        selection = select_backend(self.name, list(self._specs), self.caches, device, options=self.options)
        self.caches, self.backend = [selection.cache], selection.backend
        self._valid = validate_options(selection.name, {} if self.name == "AUTO" else self.options)

    @property
    def cache(self) -> KVCacheSpec:
        """The cache's pages; their number is not known here."""
        return self.caches[0]

    def expect(self, num_rows: int, num_tokens: int, longest: int) -> None:
        """Size the state for a step of so many rows and tokens. It grows by powers of two, and is seldom made anew."""
        asked = (num_rows, num_tokens, longest)
        held = (self.limits.max_num_requests, self.limits.max_num_tokens, self.limits.max_model_len)
        if any(need > have for need, have in zip(asked, held, strict=True)):
            grown = (max(have, 1 << (need - 1).bit_length()) for need, have in zip(asked, held, strict=True))
            self.limits, self._plans = Limits(*grown), None

    @property
    def plans(self) -> Plans[AttentionSpec]:
        """One builder for each spec, and one state, for all that was shown and expected so far."""
        if self._plans is None:
            device = next(iter(self._specs.values()))
            specs = {spec: spec for spec in self._specs}
            with writable():
                self._plans = Plans(self.backend, specs, self.cache, self.limits, device, self._valid)
            self._impls.clear()
        return self._plans

    def serve(self, call: LayerCall, common: CommonAttentionMetadata) -> tuple[AttentionImpl[Any], AttentionStep[Any]]:
        """A layer's impl, bound when the layer first runs, and again if its constants are others; and its step of a
        batch, planned when the batch's first layer runs, and again if a layer asks for what was not known."""
        plans, bound = self.plans, self._impls.get(call.module)
        if bound is None or bound.spec != call.spec or bound.sinks is not call.sinks:
            made = plans.bind(call.spec, sinks=call.sinks)
            bound = self._impls[call.module] = _Bound(call.spec, call.sinks, made)
        if self._planned[0] is not common or self._planned[1] is not plans:
            self._planned, self._steps = (common, plans), plans.plan(common)
        return bound.impl, self._steps[call.spec]

    def allocate(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        """So many pages for one layer."""
        cache = replace(self.cache, num_pages=num_pages)
        with writable():
            return allocate_kv_cache(self.backend, {0: spec}, cache, device).layers[0]


class _Bound(NamedTuple):
    spec: AttentionSpec
    sinks: torch.Tensor | None
    impl: AttentionImpl[Any]

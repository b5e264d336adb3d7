"""`phased_backend`: a backend that prefills by one and decodes by another, over a cache that both accept."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache as cached
from math import lcm
from typing import Any, ClassVar

import torch

from attn_backends.interface.backend import AttentionBackend
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport, Rejection
from attn_backends.interface.contract import CONTRACT
from attn_backends.interface.phases import (
    PhasedGraphState,
    PhasedImpl,
    PhasedMetadata,
    PhasedMetadataBuilder,
    PhasedState,
    Phases,
)
from attn_backends.spec import AttentionSpec, KVCacheSpec, Layout

Backend = type[AttentionBackend]
OF_DECODE = ("cuda_graph", "cascade")  # graphs are decode's, and so are rows that share a prefix
OF_EITHER = ("fp8_queries",)


class PhasedBackend(AttentionBackend):
    """What every pair has in common; `phased_backend` makes a subclass of each."""

    contract = CONTRACT
    metadata_cls = PhasedMetadata
    phases: ClassVar[Phases[Backend]]

    @classmethod
    def capabilities(cls) -> Capabilities:
        return joined_capabilities(*(backend.capabilities() for backend in cls.phases))

    @classmethod
    def get_kv_cache_shapes(cls, spec: AttentionSpec, cache: KVCacheSpec) -> tuple[tuple[int, ...], ...]:
        return cls.phases.decode.get_kv_cache_shapes(spec, cache)

    @classmethod
    def get_kv_cache_stride_order(cls, layout: Layout) -> tuple[int, ...]:
        return cls.phases.decode.get_kv_cache_stride_order(layout)

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        return cls.reject_set_up(spec, cache, device, None)

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: Phases[Any] | None
    ) -> list[Rejection]:
        """What either backend refuses, with its phase; and what keeps two that serve the layer from sharing a cache."""
        found: list[Rejection] = []
        for phase, backend, own in zip(Phases._fields, cls.phases, options or (None, None), strict=True):
            by = f"{phase} by {backend.get_name()}"
            found += [replace(each, supported=f"{each.supported} ({by})")
                      for each in backend.reject_set_up(spec, cache, device, own)]  # fmt: skip
        if found:
            return found
        pool = replace(cache, num_pages=cache.num_pages or 1)
        shapes = [backend.get_kv_cache_shapes(spec, pool) for backend in cls.phases]
        orders = [backend.get_kv_cache_stride_order(cache.layout) for backend in cls.phases]
        prefill, decode = (backend.get_name() for backend in cls.phases)
        return [
            Rejection(code, f"{one} of {prefill} (prefill)", f"{other} of {decode} (decode), which it shares",
                      f"Choose {prefill} or {decode} for both phases, or another pair.")
            for code, (one, other) in (("kv_cache_shapes", shapes), ("kv_cache_strides", orders)) if one != other
        ]  # fmt: skip

    @classmethod
    def preferred_page_sizes(cls, device: torch.device | str) -> tuple[int, ...]:
        """The sizes that decode prefers, where most steps are, then those that prefill does."""
        prefill, decode = (backend.preferred_page_sizes(device) for backend in cls.phases)
        return tuple(dict.fromkeys(decode + prefill))

    @classmethod
    def note(cls, device: torch.device | str) -> str:
        return "; ".join(filter(None, (backend.note(device) for backend in cls.phases)))


@cached
def phased_backend(prefill: Backend, decode: Backend, module: str, name: str) -> Backend:
    """The backend of a pair.

    Args:
        module, name: where `getattr` finds it, so that it pickles.
    """
    pair = Phases(prefill, decode)
    builders, states, impls = (
        Phases(*(getattr(backend, f"get_{part}_cls")() for backend in pair)) for part in ("builder", "state", "impl")
    )
    builder_cls = type("Builder", (PhasedMetadataBuilder,), {
        "builder_classes": builders,
        "decode_threshold": builders.decode.decode_threshold,
        "needs_exact_lengths": any(builder.needs_exact_lengths for builder in builders),
    })  # fmt: skip
    graph_cls = PhasedGraphState if states.decode.graph_cls else None
    state_cls = type("State", (PhasedState,), {"backend_name": name, "state_classes": states, "graph_cls": graph_cls})
    impl_cls = type("Impl", (PhasedImpl,), {"impl_classes": impls})
    own = {"name": name, "phases": pair, "builder_cls": builder_cls, "state_cls": state_cls, "impl_cls": impl_cls}
    return type(name, (PhasedBackend,), {**own, "__module__": module, "__qualname__": name})


def joined_capabilities(prefill: Capabilities, decode: Capabilities) -> Capabilities:
    """What both honour; a graph and a shared prefix need no more than decode."""
    made = {}
    for name in (field.name for field in fields(Capabilities)):
        one, other = getattr(prefill, name), getattr(decode, name)
        made[name] = other if name in OF_DECODE else _joined(name, one, other)
    made["cuda_graph"] = min(made["cuda_graph"], CudaGraphSupport.UNIFORM_BATCH)  # no graph of both phases
    made["standard_alibi"] = all(can.alibi or can.standard_alibi for can in (prefill, decode))
    return Capabilities(**made)


def _joined(name: str, one: Any, other: Any) -> Any:
    if isinstance(one, bool):
        return one or other if name in OF_EITHER else one and other
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, frozenset):
        return one & other
    return lcm(one, other) if isinstance(one, int) else max(one, other)

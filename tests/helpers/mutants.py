"""Ways to break TORCH at seams that every backend has: the spec or batch it is handed, what goes in and out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.metadata import TorchMetadataBuilder
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.interface import AttentionBackend
from attn_backends.spec import AttentionSpec

Backend = type[AttentionBackend]
Forward = Callable[..., torch.Tensor]
Common = CommonAttentionMetadata


def mutant(builder: type = TorchMetadataBuilder, impl: type = TorchImpl, **methods: Any) -> Backend:
    """A subclass of TORCH with another builder or impl, or other methods."""
    body = {
        "builder_cls": builder,
        "impl_cls": impl,
        **methods,
    }
    return type("Mutant", (TorchBackend,), body)


def declares(**changes: Any) -> Any:
    """`capabilities` of a mutant: TORCH's, changed."""
    return staticmethod(lambda: replace(TorchBackend.capabilities(), **changes))


def other_spec(change: Callable[[AttentionSpec], AttentionSpec]) -> Backend:
    """Builder and impl believe in another layer."""

    class Builder(TorchMetadataBuilder):
        def __init__(self, group: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(replace(group, spec=change(group.spec)), *args, **kwargs)

    class Impl(TorchImpl):
        def __init__(self, spec: AttentionSpec, *args: Any, sinks: Any = None, **kwargs: Any) -> None:
            changed = change(spec)
            super().__init__(changed, *args, sinks=sinks if changed.sinks else None, **kwargs)

    return mutant(Builder, Impl)


def other_scales(change: Callable[[float, float], tuple[float, float]]) -> Backend:
    """The impl reads and writes the cache with other (k_scale, v_scale)."""

    class Impl(TorchImpl):
        def __init__(self, *args: Any, k_scale: float = 1.0, v_scale: float = 1.0, **kwargs: Any) -> None:
            k_scale, v_scale = change(k_scale, v_scale)
            super().__init__(*args, k_scale=k_scale, v_scale=v_scale, **kwargs)

    return mutant(impl=Impl)


def other_batch(change: Callable[[Common], Common]) -> Backend:
    """The builder is handed another batch."""

    class Builder(TorchMetadataBuilder):
        def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> Any:
            return super().build(common_prefix_len, change(common_attn_metadata), fast_build)

    return mutant(Builder)


def other_forward(around: Callable[..., torch.Tensor]) -> Backend:
    """`around(forward, layer, arguments)` stands between a step and the impl; arguments are a dict."""

    class Impl(TorchImpl):
        def forward(  # type: ignore[override]
            self, query: Any, key: Any, value: Any, kv_cache: Any, step: Any, output: Any = None, **kwargs: Any
        ) -> torch.Tensor:
            names = {"query": query, "key": key, "value": value, "kv_cache": kv_cache, "step": step, "output": output}
            return around(super().forward, self, {**names, **kwargs})

    return mutant(impl=Impl)


def with_seq_lens(common: Common, seq_lens: torch.Tensor) -> Common:
    """The batch as if its rows had these lengths, in every form that a builder may read."""
    seq_lens = seq_lens.to(torch.int32)
    return replace(common, seq_lens=seq_lens, seq_lens_cpu=seq_lens, csr=None)

"""The five classes of a backend, and the step that layers receive; `capabilities` has what a backend says of itself.

    scheduler ─SequenceGroups─▶ CommonAttentionMetadata ─▶ builder ─Metadata─▶ state.begin_forward ─Step─▶ impl × layers

A backend is a static class that names the four others. Builders are pure; one state owns everything that lasts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from attn_backends.interface.capabilities import Capabilities, Rejection, mismatches
from attn_backends.interface.impl import AttentionImpl
from attn_backends.interface.metadata import AttentionMetadata, AttentionMetadataBuilder
from attn_backends.interface.state import AttentionState
from attn_backends.spec import AttentionSpec, KVCacheSpec, Layout


class AttentionBackend(ABC):
    """A name, four classes and some facts. Static: it is never instantiated and holds no tensors."""

    def __new__(cls, *args: object, **kwargs: object) -> AttentionBackend:
        raise TypeError(f"{cls.__name__} is static: call its methods on the class")

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The registry name, in upper case."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]: ...

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[AttentionMetadata]: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]: ...

    @staticmethod
    @abstractmethod
    def get_state_cls() -> type[AttentionState[Any]]: ...

    @staticmethod
    @abstractmethod
    def capabilities() -> Capabilities: ...

    @staticmethod
    def get_kv_cache_shapes(spec: AttentionSpec, cache: KVCacheSpec) -> tuple[tuple[int, ...], ...]:
        """Logical shapes of one layer's key and value cache: [num_pages, page_size, num_kv_heads, dim]."""
        rows = (cache.num_pages, cache.page_size, spec.num_kv_heads)
        return (*rows, spec.head_dim), (*rows, spec.head_dim_vo)

    @staticmethod
    def get_kv_cache_stride_order(layout: Layout) -> tuple[int, ...]:
        """Logical dimensions in the order they lie in memory, outermost first."""
        return (0, 1, 2, 3) if layout == "NHD" else (0, 2, 1, 3)

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        """Every reason why this backend cannot serve such a layer here; empty if it can.

        Compares the layer with `capabilities()`. A backend extends it for what a table of sets cannot say.
        """
        return mismatches(cls.capabilities(), spec, cache, torch.device(device))

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: Any
    ) -> list[Rejection]:
        """`reject`, and what the backend's own options, validated, rule out; by default that is nothing."""
        return cls.reject(spec, cache, device)

    @classmethod
    def preferred_page_sizes(cls, device: torch.device | str) -> tuple[int, ...]:
        """Page sizes to take first where the caller leaves the choice open, best first; by default none."""
        return ()

    @classmethod
    def note(cls, device: torch.device | str) -> str:
        """What is worth knowing of a backend that serves, for the reason of its choice; by default nothing."""
        return ""

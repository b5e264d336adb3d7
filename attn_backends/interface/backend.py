"""The five classes of a backend, and the step that layers receive; `capabilities` has what a backend says of itself.

    scheduler ─SequenceGroups─▶ CommonAttentionMetadata ─▶ builder ─Metadata─▶ state.begin_forward ─Step─▶ impl × layers

A backend is a static class that names the four others. Builders are pure; one state owns everything that lasts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from attn_backends.interface.capabilities import Capabilities, Rejection, mismatches
from attn_backends.interface.contract import Version
from attn_backends.interface.impl import AttentionImpl
from attn_backends.interface.metadata import AttentionMetadata, AttentionMetadataBuilder
from attn_backends.interface.state import AttentionState
from attn_backends.spec import AttentionSpec, KVCacheSpec, Layout

_ATTRIBUTES = ("name", "impl_cls", "metadata_cls", "builder_cls", "state_cls")


class AttentionBackend(ABC):
    """A name, four classes and some facts. Static: it is never instantiated and holds no tensors."""

    contract: ClassVar[Version]  # that it was written for; no default, so that nobody is taken to be up to date
    name: ClassVar[str]  # in the registry, in upper case
    impl_cls: ClassVar[type[AttentionImpl[Any]]]
    metadata_cls: ClassVar[type[AttentionMetadata]]
    builder_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]
    state_cls: ClassVar[type[AttentionState[Any]]]

    def __new__(cls, *args: object, **kwargs: object) -> AttentionBackend:
        raise TypeError(f"{cls.__name__} is static: call its methods on the class")

    @staticmethod
    @abstractmethod
    def capabilities() -> Capabilities: ...

    @classmethod
    def get_name(cls) -> str:
        return str(cls._declared("name"))

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        return cls._declared("impl_cls")  # type: ignore[no-any-return]

    @classmethod
    def get_metadata_cls(cls) -> type[AttentionMetadata]:
        return cls._declared("metadata_cls")  # type: ignore[no-any-return]

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        return cls._declared("builder_cls")  # type: ignore[no-any-return]

    @classmethod
    def get_state_cls(cls) -> type[AttentionState[Any]]:
        return cls._declared("state_cls")  # type: ignore[no-any-return]

    @classmethod
    def missing(cls) -> list[str]:
        """The class attributes and methods that a complete backend has and this one lacks."""
        return [name for name in _ATTRIBUTES if not hasattr(cls, name)] + sorted(cls.__abstractmethods__)

    @classmethod
    def _declared(cls, attribute: str) -> Any:
        if not hasattr(cls, attribute):
            raise TypeError(f"{cls.__qualname__} lacks {', '.join(cls.missing())}: a backend sets them on its class")
        return getattr(cls, attribute)

    @staticmethod
    def get_kv_cache_shapes(spec: AttentionSpec, cache: KVCacheSpec) -> tuple[tuple[int, ...], ...]:
        """Logical shapes of one layer's key and value cache: [num_pages, page_size, num_kv_heads, dim]."""
        rows = (cache.pages, cache.page_size, spec.num_kv_heads)
        return (*rows, spec.head_dim), (*rows, spec.head_dim_vo)

    @staticmethod
    def get_kv_cache_stride_order(layout: Layout) -> tuple[int, ...]:
        """Logical dimensions in the order they lie in memory, outermost first."""
        return (0, 1, 2, 3) if layout == "NHD" else (0, 2, 1, 3)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """The head dims that `capabilities` declares, smallest first; none where any is served."""
        return sorted(cls.capabilities().head_dims or ())

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

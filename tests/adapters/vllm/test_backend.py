"""How vLLM's caches lie, and the classes that it asks for by name, over stand-ins for what is taken of it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from attn_backends.adapters.vllm import versions
from tests.adapters.vllm.test_builder import Base, adapter

__all__ = ["adapter"]  # a fixture


@pytest.fixture
def served(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter's `served`, imported anew."""
    theirs: Any = sys.modules["vllm.v1.attention.backend"]
    theirs.AttentionBackend = type("AttentionBackend", (), {})
    theirs.MLAAttentionImpl, theirs.MultipleOf = Base, int
    config: Any = ModuleType("vllm.config")
    config.get_current_vllm_config_or_none = lambda: None
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(device_type="cpu")
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    from attn_backends.adapters.vllm import served

    return served


@pytest.mark.parametrize("name", ["FLASH_ATTN", "CPU_ATTN__", "__path__"])
def test_a_name_without_a_backend_is_no_attribute(served: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(served, name)


@pytest.mark.parametrize(
    ("layout", "lying", "with_layers"),
    [("NHD", (5, 16, 2, 64), (5, 3, 16, 2, 64)), ("HND", (5, 2, 16, 64), (5, 2, 3, 16, 64))],
)
def test_pages_come_first_of_what_lies(
    served: Any, monkeypatch: pytest.MonkeyPatch, layout: str, lying: tuple[int, ...], with_layers: tuple[int, ...]
) -> None:
    """vLLM moves the dimensions of a cache's shape, or of three layers' caches, by what it is told."""
    monkeypatch.setattr(versions, "current_layout", lambda: layout)
    backend = served.AB_TORCH
    shape = backend.get_kv_cache_shape(5, 16, 2, 32)
    assert tuple(shape[i] for i in backend.get_kv_cache_stride_order()) == lying
    order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    assert tuple((3, *shape)[i] for i in order) == with_layers

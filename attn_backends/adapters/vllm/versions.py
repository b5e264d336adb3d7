"""Where vLLM's versions differ: who says how a cache lies, up to 0.28, and from 0.29 on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from attn_backends.adapters.vllm.plugin import vllm_version
from attn_backends.spec import Layout

_NAMES: dict[Layout, str] = {"NHD": "LBNHC", "HND": "LBHNC"}  # vLLM's, from 0.29 on
UNEQUAL_SINCE = (0, 29)  # values may have other widths than keys


def layout_of(vllm_config: Any) -> Layout:
    """How the keys of a page lie: tokens first (NHD), or heads."""
    if vllm_version() >= UNEQUAL_SINCE:
        name = vllm_config.cache_config.get_resolved_kv_cache_layout().name
        return next(ours for ours, theirs in _NAMES.items() if theirs == name)
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config):  # the first who asks needs it
        return current_layout()


def current_layout() -> Layout:
    """Up to 0.28: a setting of the process, which stays once it was asked for."""
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    layout: Layout = get_kv_cache_layout()
    return layout


def vllm_layouts(layouts: Collection[Layout]) -> tuple[Any, ...]:
    """From 0.29 on: vLLM's members for layouts of ours, tokens first where both are served."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return tuple(KVCacheLayout[_NAMES[layout]] for layout in sorted(layouts, reverse=True))

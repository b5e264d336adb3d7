"""What the settings leave open, decided for a model's layers on a device: device, cache dtype, backend, pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from attn_backends.cache.kv_cache import page_bytes
from attn_backends.engine.config import EngineConfig
from attn_backends.engine.models.load import layer_specs, specs_without_weights
from attn_backends.machine import bytes_to_allocate
from attn_backends.registry import AUTO, Load, Selection, get_entry, select_backend
from attn_backends.spec import AttentionSpec, KVCacheSpec

PAGE_SIZES = (16, 32, 64, 128, 256)  # where the config leaves it open, after those that a backend prefers


def resolve_device(device: str) -> torch.device:
    """The config's device: `auto` is a GPU if there is one.

    Raises:
        ValueError: torch knows no such device, or has none here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        why = re.split(r"\.\s", f"{error} ", maxsplit=1)[0].strip()  # torch may go on to list its kernels
        raise ValueError(f"device {device!r} cannot be used here: {why}. Use auto, cpu or cuda") from error
    return torch.device(device)


def attention_specs(config: EngineConfig, device: torch.device) -> dict[int, AttentionSpec]:
    """What the layers of the config's model ask for, over the config's cache. Few models' weights are read for it."""
    return {layer: with_cache_dtype(spec, config) for layer, spec in layer_specs(config, device).items()}


def check_backend(config: EngineConfig, device: torch.device) -> None:
    """Refuse a named backend before the weights are read, if the model's config file shows what its layers ask for.

    Raises:
        UnknownBackendError, BackendImportError, ConfigError, Unsupported: as `select_backend`.
    """
    if config.backend.upper() == AUTO:
        return
    get_entry(config.backend)
    layers = specs_without_weights(config, device)
    if layers is None:  # the weights are read next, and the backend is chosen for what they show
        return
    specs = {layer: with_cache_dtype(spec, config) for layer, spec in layers.items()}
    select_backend(config.backend, specs, possible_caches(config), device, options=config.backend_options)


def possible_caches(config: EngineConfig) -> list[KVCacheSpec]:
    """What the pool may be, best first: the config's page size, or several if it leaves that open."""
    cache = config.cache
    sizes = PAGE_SIZES if cache.page_size is None else (cache.page_size,)
    return [KVCacheSpec(cache.num_pages or 1, size, cache.layout) for size in sizes]


def with_cache_dtype(spec: AttentionSpec, config: EngineConfig) -> AttentionSpec:
    """A layer of the model with the config's cache dtype."""
    return spec if config.cache.dtype == "auto" else replace(spec, cache_dtype=getattr(torch, config.cache.dtype))


def choose_backend(
    config: EngineConfig, specs: Mapping[int, AttentionSpec], max_model_len: int, device: torch.device
) -> Selection:
    """The config's backend for these layers, and the page size that it serves them with.

    Args:
        max_model_len: most tokens of one request.

    Raises:
        UnknownBackendError, BackendImportError, ConfigError, Unsupported: as `select_backend`.
    """
    load = Load(config.scheduler.max_num_requests, max_model_len)
    return select_backend(config.backend, specs, possible_caches(config), device, load, config.backend_options)


def longest_request(config: EngineConfig, of_model: int) -> int:
    """Most tokens of one request, prompt and new ones.

    Args:
        of_model: what the model is made for.

    Raises:
        ValueError: the config asks for more than the model is made for.
    """
    asked = config.scheduler.max_model_len
    if asked is not None and asked > of_model:
        raise ValueError(
            f"scheduler.max_model_len is {asked}, and the model is made for {of_model} tokens: lower it, or "
            "leave it out for the model's own limit"
        )
    return asked or of_model


def pool_for(
    config: EngineConfig, specs: Mapping[int, AttentionSpec], selection: Selection, device: torch.device
) -> KVCacheSpec:
    """The KV pool, as large as the config asks.

    Raises:
        ValueError: its memory is less than a page, or more than the device has.
    """
    one_page = page_bytes(selection.backend, specs, replace(selection.cache, num_pages=1))
    num_pages = config.cache.num_pages or config.cache.memory_bytes // one_page
    if num_pages < 1:
        raise ValueError(
            f"cache.memory is {config.cache.memory_bytes} bytes, and one page of {selection.cache.page_size} tokens "
            f"takes {one_page}: raise cache.memory or lower cache.page_size"
        )
    room = bytes_to_allocate(device)
    if room is not None and (asked := num_pages * one_page) > room:
        name = "memory" if config.cache.num_pages is None else "num_pages"
        raise ValueError(f"the pool would take {asked} bytes, and {device} has {room}: lower cache.{name}")
    return replace(selection.cache, num_pages=num_pages)

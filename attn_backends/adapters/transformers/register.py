"""Names for `attn_implementation`, and the two places where transformers has to know them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from attn_backends.adapters.transformers.attention import Attention
from attn_backends.adapters.transformers.masks import padding_mask
from attn_backends.adapters.transformers.paged_cache import PagedCache
from attn_backends.adapters.transformers.refuse import PREFIX, check_model, decline
from attn_backends.registry import AUTO, backends

HOOKED = "_attn_backends_hook"  # marks what is wrapped already


def register(options: Mapping[str, Mapping[str, Any]] | None = None) -> list[str]:
    """Give every backend of the registry, plugins included, a name for `attn_implementation`: `attn_backends:TORCH`, …,
    and `attn_backends:AUTO`. Call it again after `register_backend`, or for other options.

    Args:
        options: a backend's own, by its name: `{"TRITON": {...}}`.

    Returns:
        The names.
    """
    given = {name.upper(): dict(own) for name, own in (options or {}).items()}
    unknown = sorted(set(given) - set(backends))
    if unknown:
        raise ValueError(f"options for {', '.join(unknown)}: there are the backends {', '.join(backends)}")
    names = [AUTO, *backends]
    for name in names:
        AttentionInterface.register(PREFIX + name, Attention(name, given.get(name, {})))
        AttentionMaskInterface.register(PREFIX + name, padding_mask)
    _wrap(GenerationMixin, "_prepare_cache_for_generation", _with_paged_cache)
    _wrap(ContinuousBatchingManager, "switch_to_cb_friendly_attn", _without_switch)
    _wrap(ContinuousBatchingManager, "__init__", _refuse_early)
    return [PREFIX + name for name in names]


def is_ours(config: Any) -> bool:
    """Whether a model's attention is by a name of `register`."""
    return str(config.get_text_config(decoder=True)._attn_implementation).startswith(PREFIX)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have `wrapper` called in the place of a method, with that before its arguments."""
    theirs = getattr(owner, name)
    if not hasattr(theirs, HOOKED):
        ours = wraps(theirs)(lambda *given, **named: wrapper(theirs, *given, **named))
        setattr(ours, HOOKED, True)
        setattr(owner, name, ours)


def _with_paged_cache(
    theirs: Callable[..., Any], model: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any,
    batch_size: int, max_cache_length: int,
) -> Any:  # fmt: skip
    """`generate()` makes a `PagedCache` where it would make a `DynamicCache`."""
    cache = model_kwargs.get("past_key_values")
    if not is_ours(model.config) or (cache is None and generation_config.use_cache is False):
        return theirs(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    asked = generation_config.cache_implementation if cache is None else type(cache).__name__
    if asked not in (None, "dynamic", PagedCache.__name__):
        decline("past_key_values", str(asked), "PagedCache, which generate() makes by itself",
                "Leave out cache_implementation, or pass past_key_values=PagedCache(model.config).")  # fmt: skip
    if cache is None:
        model_kwargs["past_key_values"] = PagedCache(model.config, max_length=max_cache_length)
        return None
    return theirs(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)


def _without_switch(theirs: Callable[..., Any], manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Continuous batching keeps our name: it would take FlashAttention instead, or refuse what it does not know."""
    if not is_ours(model.config):
        theirs(manager, model, *args, **kwargs)


def _refuse_early(theirs: Callable[..., Any], manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Continuous batching says before it starts what is not served: its thread would only log it."""
    theirs(manager, model, *args, **kwargs)
    if not is_ours(model.config):
        return
    config, own = manager.continuous_batching_config, model.config.get_text_config(decoder=True)
    compiled = [name for name in ("varlen_compile_config", "decode_compile_config") if getattr(config, name, None)]
    if any(config.cuda_graph_booleans) or compiled:
        decline("cuda_graph", f"use_cuda_graph={config.use_cuda_graph}, {', '.join(compiled) or 'not compiled'}",
                "eager steps", "Pass use_cuda_graph=False and no compile config.")  # fmt: skip
    check_model(own)
    page_size = config.page_size if hasattr(config, "page_size") else config.block_size
    AttentionInterface()[own._attn_implementation].try_out(model, page_size)

"""Names for `attn_implementation`, and the places where transformers has to know them, wrapped unless it has hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from attn_backends.adapters.transformers.attention import Attention
from attn_backends.adapters.transformers.masks import padding_mask
from attn_backends.adapters.transformers.refuse import PREFIX
from attn_backends.registry import AUTO, backends

WRAPPED = "_attn_backends_wrap"  # marks what is wrapped already
# Methods of a transformers that calls an attention function's `prepare_cache` and `prepare_continuous_batching` by
# itself. The patches of docs/engines/patches bring them.
CACHE_HOOK, BATCHING_HOOK = "_prepare_attention_cache", "_get_attention_hook"


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
    if not hasattr(GenerationMixin, CACHE_HOOK):
        _wrap(GenerationMixin, "_prepare_cache_for_generation", _with_paged_cache)
    if not hasattr(ContinuousBatchingManager, BATCHING_HOOK):
        _wrap(ContinuousBatchingManager, "switch_to_cb_friendly_attn", _without_switch)
        _wrap(ContinuousBatchingManager, "__init__", _refuse_early)
    return [PREFIX + name for name in names]


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have `wrapper` called in the place of a method, with that before its arguments."""
    theirs = getattr(owner, name)
    if not hasattr(theirs, WRAPPED):
        ours = wraps(theirs)(lambda *given, **named: wrapper(theirs, *given, **named))
        setattr(ours, WRAPPED, True)
        setattr(owner, name, ours)


def _attention(model: Any) -> Attention | None:
    """The attention of a model, if it is by a name of `register`."""
    function = AttentionInterface().get(model.config.get_text_config(decoder=True)._attn_implementation)
    return function if isinstance(function, Attention) else None


def _with_paged_cache(
    theirs: Callable[..., Any], model: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any,
    batch_size: int, max_cache_length: int,
) -> Any:  # fmt: skip
    """`generate()` makes a `PagedCache` where it would make a `DynamicCache`."""
    attention, cache = _attention(model), model_kwargs.get("past_key_values")
    made = attention and attention.prepare_cache(model.config, generation_config, cache, max_cache_length)
    if made is None:
        return theirs(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    model_kwargs["past_key_values"] = made
    return None


def _without_switch(theirs: Callable[..., Any], manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Continuous batching keeps our name: it would take FlashAttention instead, or refuse what it does not know."""
    if _attention(model) is None:
        theirs(manager, model, *args, **kwargs)


def _refuse_early(theirs: Callable[..., Any], manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Continuous batching asks our attention before its thread starts."""
    theirs(manager, model, *args, **kwargs)
    attention = _attention(model)
    if attention is not None:
        attention.prepare_continuous_batching(model, manager.continuous_batching_config)

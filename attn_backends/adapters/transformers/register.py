"""Names for `attn_implementation`, the two places where transformers has to know them, and the mask function that it
asks before each forward: which tokens are padding, and nothing else.

A backend works out causality and windows from its layer. So any other mask is refused here, where its rule is known:
what reaches the attention function is a tensor at most, which has forgotten it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, masking_utils
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from attn_backends.adapters.transformers.continuous import attend_batch
from attn_backends.adapters.transformers.handed import Handed, count_forward, eager_only, take
from attn_backends.adapters.transformers.layers import (
    PREFIX,
    LayerCall,
    check_layer,
    check_model,
    check_tensors,
    decline,
    layer_spec,
)
from attn_backends.adapters.transformers.paged_cache import PagedCache
from attn_backends.adapters.transformers.pool import Pool
from attn_backends.registry import AUTO, backends

HOOKED = "_attn_backends_hook"  # marks what is wrapped already
_CODE_OF_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_CODE_OF_PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1)).__code__
_CODE_OF_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


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


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    theirs = getattr(owner, name)
    if not hasattr(theirs, HOOKED):
        ours = wraps(theirs)(wrapper(theirs))
        setattr(ours, HOOKED, True)
        setattr(owner, name, ours)


def _with_paged_cache(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`generate()` makes a `PagedCache` where it would make a `DynamicCache`."""

    def prepare(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int,
    ) -> Any:  # fmt: skip
        cache = model_kwargs.get("past_key_values")
        if not is_ours(self.config) or (cache is None and generation_config.use_cache is False):
            return theirs(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        asked = generation_config.cache_implementation if cache is None else type(cache).__name__
        if asked not in (None, "dynamic", PagedCache.__name__):
            decline("past_key_values", str(asked), "PagedCache, which generate() makes by itself",
                    "Leave out cache_implementation, or pass past_key_values=PagedCache(model.config).")  # fmt: skip
        if cache is None:
            model_kwargs["past_key_values"] = PagedCache(self.config, max_length=max_cache_length)
            return None
        return theirs(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)

    return prepare


def _without_switch(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Continuous batching keeps our name: it would take FlashAttention instead, or refuse what it does not know."""

    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if not is_ours(model.config):
            theirs(self, model, *args, **kwargs)

    return switch


def _refuse_early(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Continuous batching says before it starts what is not served: its thread would only log it."""

    def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, model, *args, **kwargs)
        if not is_ours(model.config):
            return
        config, own = self.continuous_batching_config, model.config.get_text_config(decoder=True)
        compiled = [name for name in ("varlen_compile_config", "decode_compile_config") if getattr(config, name, None)]
        if any(config.cuda_graph_booleans) or compiled:
            decline("cuda_graph", f"use_cuda_graph={config.use_cuda_graph}, {', '.join(compiled) or 'not compiled'}",
                    "eager steps", "Pass use_cuda_graph=False and no compile config.")  # fmt: skip
        check_model(own)
        AttentionInterface()[own._attn_implementation].try_out(
            model, config.page_size if hasattr(config, "page_size") else config.block_size
        )

    return init


@eager_only
def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,  # [batch_size, kv_length] bool
    **_: Any,
) -> torch.Tensor | None:
    """[batch_size, kv_length] bool, or None if there is no padding.

    Packed sequences, which continuous batching looks like here, get a mask of no columns: an attention function that
    has no other word of where they begin refuses it.

    Raises:
        Unsupported: the mask is not causal, or has another rule than windows and padding.
    """
    count_forward()
    parts = _parts(mask_function)
    if any(part.__code__ is _CODE_OF_PACKED for part in parts if hasattr(part, "__code__")):
        return torch.ones(batch_size, 0, dtype=torch.bool)
    rest = [part for part in parts if getattr(part, "__code__", None) is not _CODE_OF_WINDOW]
    if rest != [masking_utils.causal_mask_function]:
        names = ", ".join(getattr(part, "__qualname__", str(part)).replace(".<locals>", "") for part in rest)
        decline("mask", f"a mask by {names}", "causal masks, with windows and padding",
                "Encoders, chunked attention, images that see both ways and masks of your own: load the model with "
                "sdpa or eager.")  # fmt: skip
    if attention_mask is None:
        return None
    visible = attention_mask[:, -kv_length:]
    return None if visible.shape[1] == kv_length and bool(visible.all()) else visible


def _parts(mask_function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The rules that have to hold all together for a key to be seen."""
    if getattr(mask_function, "__code__", None) is not _CODE_OF_AND:
        return [mask_function]
    (cell,) = mask_function.__closure__ or ()
    return [part for each in cell.cell_contents for part in _parts(each)]


class Attention:
    """Attention by the backend of one name, as `AttentionInterface.register` takes it.

    Keys are in one of three places: transformers' continuous batching brings its own pages; `PagedCache` has handed on
    this forward's; or the forward has no cache, and they are all there are.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.options = name, options
        self._alone = _Alone()

    @eager_only
    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [batch, num_qo_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [batch, num_kv_heads, num_keys, head_dim]
        value: torch.Tensor,  # [batch, num_kv_heads, num_keys, head_dim_vo]
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        """[batch, num_tokens, num_qo_heads, head_dim_vo], and no weights.

        Raises:
            Unsupported: the call asks for what is not served, or the backend refuses the layer; it says what.
        """
        handed, in_batch = take(key), given.get("cache") is not None
        check_tensors(query, key, dropout)
        check_layer(module, sliding_window, given, in_batch)
        spec = layer_spec((query.shape[1], key.shape[1]), (query.shape[3], value.shape[3]), scaling, sliding_window,
                          softcap, s_aux is not None, query.dtype)  # fmt: skip
        call = LayerCall(module, query, key, value, spec, s_aux)
        if in_batch:
            return attend_batch(self.name, self.options, call, given), None
        if handed is None:
            return self._without_cache(call, attention_mask), None
        _check_handed(handed, call)
        return handed.cache.attend(self.name, self.options, handed.layer, call, attention_mask), None

    def try_out(self, model: Any, page_size: int) -> None:
        """Run two tokens through a model, over pages of this size.

        Raises:
            Unsupported: a layer is refused.
        """
        alone, tokens = self._alone, torch.zeros(1, 2, dtype=torch.long, device=model.device)
        try:
            alone.page_size, alone.pool, alone.shape = page_size, None, None
            with torch.no_grad():
                model(input_ids=tokens, use_cache=False)
        finally:
            alone.page_size, alone.pool, alone.shape = None, None, None

    def _without_cache(self, call: LayerCall, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention over the call's own keys, through pages that all layers write in turn."""
        if call.key.shape[2] != call.query.shape[2]:
            decline("past_key_values", f"{call.key.shape[2]} keys for {call.query.shape[2]} tokens: a cache of "
                    "transformers, DynamicCache or StaticCache", "PagedCache, which generate() makes by itself",
                    "In a loop of your own begin with past_key_values=PagedCache(model.config).")  # fmt: skip
        check_model(getattr(call.module, "config", None))
        alone = self._alone
        if call.module in alone.done or alone.mask is not mask or alone.shape != call.query.shape[::2]:
            alone.pool, alone.done = Pool(self.name, self.options, None, alone.page_size), WeakSet()
            alone.mask, alone.shape = mask, call.query.shape[::2]
        alone.done.add(call.module)
        assert alone.pool is not None
        return alone.pool.attend(call.spec, call, mask)


class _Alone(threading.local):
    """The forward without a cache that is running in a thread."""

    pool: Pool | None = None
    page_size: int | None = None  # None: what the backend likes
    mask: torch.Tensor | None = None
    shape: torch.Size | None = None

    def __init__(self) -> None:
        self.done: WeakSet[torch.nn.Module] = WeakSet()


def _check_handed(handed: Handed, call: LayerCall) -> None:
    """Keys that reach attention are those that a `PagedCache` handed on, or made of them.

    Raises:
        Unsupported: they are not.
    """
    index, tokens = getattr(call.module, "layer_idx", None), (call.key.shape[2], call.value.shape[2])
    if index != handed.layer or {*tokens, call.query.shape[2]} != {handed.num_tokens}:
        decline("keys", f"{tokens[0]} keys at layer {index}, where layer {handed.layer} of the cache handed on "
                f"{handed.num_tokens}", "layers that attend to what their cache hands on",
                "Load this model with sdpa.")  # fmt: skip

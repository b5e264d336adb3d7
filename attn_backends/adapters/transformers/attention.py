"""The function that transformers calls for every attention layer, and where each call's keys are."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch

from attn_backends.adapters.transformers.continuous import attend_batch
from attn_backends.adapters.transformers.handed import Handed, eager_only, has_attended, note_attended, take
from attn_backends.adapters.transformers.layers import LayerCall, layer_spec
from attn_backends.adapters.transformers.masks import padding_in
from attn_backends.adapters.transformers.paged_cache import PagedCache
from attn_backends.adapters.transformers.pool import Pool
from attn_backends.adapters.transformers.refuse import check_layer, check_model, check_tensors, decline


class Attention:
    """Attention by the backend of one name, as `AttentionInterface.register` takes it.

    Keys are in one of three places: transformers' continuous batching brings its own pages; `PagedCache` has handed on
    this forward's; or the forward has no cache, and they are all there are. The two methods `prepare_…` are hooks: a
    transformers with the patches of docs/engines/patches calls them, `register` wraps any other.
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
        check_tensors(query, key, value, dropout)
        check_layer(module, sliding_window, given, in_batch)
        spec = layer_spec((query.shape[1], key.shape[1]), (query.shape[3], value.shape[3]), scaling, sliding_window,
                          softcap, s_aux is not None, query.dtype)  # fmt: skip
        call, padding = LayerCall(module, query, key, value, spec, s_aux), padding_in(attention_mask)
        if in_batch:
            return attend_batch(self.name, self.options, call, given), None
        if handed is None:
            _check_once(module)
            return self._without_cache(call, padding), None
        _check_handed(handed, call)
        note_attended(module)
        return handed.cache.attend(self.name, self.options, handed.layer, call, padding), None

    def prepare_cache(self, config: Any, generation_config: Any, cache: Any, max_length: int) -> PagedCache | None:
        """The cache that `generate()` has to make; None: none, or the caller's.

        Raises:
            Unsupported: a cache of another kind was asked for or passed.
        """
        if cache is None and generation_config.use_cache is False:
            return None
        asked = generation_config.cache_implementation if cache is None else type(cache).__name__
        if asked not in (None, "dynamic", PagedCache.__name__):
            decline("past_key_values", str(asked), "PagedCache, which generate() makes by itself",
                    "Leave out cache_implementation, or pass past_key_values=PagedCache(model.config).")  # fmt: skip
        return PagedCache(config, max_length=max_length) if cache is None else None

    def prepare_continuous_batching(self, model: Any, config: Any) -> None:
        """Continuous batching says before it starts what is not served: its thread would only log it.

        Args:
            config: a `ContinuousBatchingConfig`.

        Raises:
            Unsupported: the config asks for graphs, or a layer is refused.
        """
        compiled = [name for name in ("varlen_compile_config", "decode_compile_config") if getattr(config, name, None)]
        if any(config.cuda_graph_booleans) or compiled:
            decline("cuda_graph", f"use_cuda_graph={config.use_cuda_graph}, {', '.join(compiled) or 'not compiled'}",
                    "eager steps", "Pass use_cuda_graph=False and no compile config.")  # fmt: skip
        check_model(model.config.get_text_config(decoder=True))
        self._try_out(model, config.page_size if hasattr(config, "page_size") else config.block_size)

    def _try_out(self, model: Any, page_size: int) -> None:
        """Run two tokens through a model, over pages of this size: layers that are refused say so."""
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


def _check_once(module: torch.nn.Module) -> None:
    """A layer of a `PagedCache` attends once in a forward.

    Raises:
        Unsupported: it attends again, with keys that no cache has handed on.
    """
    if has_attended(module):
        index = getattr(module, "layer_idx", None)
        decline("keys", f"layer {index} attends twice in a forward", "layers that attend once, to what their cache "
                "hands on", "Load this model with sdpa.")  # fmt: skip


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

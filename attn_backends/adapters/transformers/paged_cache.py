"""`PagedCache`: what `generate()` passes through a model in the place of its own cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from attn_backends.adapters.transformers.handed import eager_only, forget, hand_on, left_over
from attn_backends.adapters.transformers.layers import LayerCall
from attn_backends.adapters.transformers.pool import Pool
from attn_backends.adapters.transformers.refuse import PREFIX, check_model, decline


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`. It counts tokens, and hands on new keys and values alone: the attention function,
    which transformers calls next, writes them to the pages."""

    is_croppable = True

    def __init__(self, cache: PagedCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.index, self.seen = cache, index, 0

    @eager_only
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors as they are."""
        self.cache.begin_layer(self, key_states)
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to make: pages come when attention has shown what it asks for."""

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name in 5.17


class PagedCache(Cache):
    """Keys and values of a batch in pages that a backend reads, for `generate()` and for forwards of your own.

    `generate()` makes one by itself. Make it by hand to keep it from turn to turn, as any cache of transformers:
    `past_key_values=cache`. It takes the backend of the model that it first runs in.

    Args:
        config: the model's.
        max_length: tokens of a row, if known: rows grow by doubling up to there.
        page_size: tokens a page; None: what the backend likes.

    Raises:
        Unsupported: the model keeps other than a key and a value for each token and layer.
    """

    def __init__(self, config: Any, *, max_length: int | None = None, page_size: int | None = None) -> None:
        self.config = config.get_text_config(decoder=True)
        check_model(config)
        check_model(self.config)
        self.max_length, self.page_size = max_length, page_size
        self.paged = [PagedLayer(self, index) for index in range(self.config.num_hidden_layers)]
        super().__init__(layers=list(self.paged))
        self._pool: Pool | None = None
        self._in_step: set[int] = set()

    def begin_layer(self, layer: PagedLayer, keys: torch.Tensor) -> None:
        """A layer is about to attend. One that has done so in this forward begins the next."""
        left, num_tokens = left_over(self), keys.shape[-2]
        if left is not None:
            decline("attention", f"layer {left} did not call the attention function, or was interrupted",
                    "models whose layers use transformers' AttentionInterface",
                    "Load this model with sdpa; after an interruption reset() the cache.")  # fmt: skip
        if layer.index in self._in_step:
            self._in_step.clear()
            if self._pool is not None:
                self._pool.step = None
        start = layer.seen
        if any(self.paged[index].seen != start + num_tokens for index in self._in_step):
            decline("layer", f"layer {layer.index} has seen {start} tokens, others of this cache more",
                    "forwards through all layers", "Give a model of fewer layers a PagedCache of its own.")  # fmt: skip
        self._in_step.add(layer.index)
        layer.seen += num_tokens
        hand_on(self, layer.index, keys)

    def attend(
        self, name: str, options: Mapping[str, Any], layer: int, call: LayerCall, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[batch, num_tokens, num_qo_heads, head_dim_vo] of a layer whose keys were handed on."""
        if self._pool is None:
            self._pool = Pool(name, options, self.max_length, self.page_size)
        if self._pool.layers.name != name:
            decline("attn_implementation", f"{PREFIX}{name}", f"{PREFIX}{self._pool.layers.name}, as begun",
                    "Use a new PagedCache for another backend.")  # fmt: skip
        return self._pool.attend(layer, call, mask)

    @property
    def backend(self) -> str | None:
        """The name of the backend that serves, once it does."""
        return None if self._pool is None or not self._pool.caches else self._pool.layers.backend.get_name()

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Forget the last `-tokens_to_remove` tokens; a positive number is the length to keep (as in 5.17)."""
        seen, asked = self.get_seq_length(), int(tokens_to_remove)  # 5.17 passes a tensor
        number = -asked if asked <= 0 else max(0, seen - asked)
        if number > seen:
            raise ValueError(f"crop by {number} tokens: the cache has {seen}")
        self._in_step.clear()
        for layer in self.paged:
            layer.seen -= number
        if self._pool is not None and self._pool.rows is not None:
            self._pool.step = None
            self._pool.rows.crop(number)

    def reset(self) -> None:
        """Forget all tokens; the next batch may be of any size."""
        forget()
        self._in_step.clear()
        for layer in self.paged:
            layer.seen = 0
        self._pool = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Put rows in the place of others."""
        self._in_step.clear()
        if self._pool is not None:
            self._pool.select_rows(indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The same for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = 0 if self._pool is None or self._pool.rows is None else len(self._pool.rows.lens)
        self.batch_select_indices(torch.arange(rows, device="cpu").repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Its own pages with the same keys, as a prompt that several answers begin with needs."""
        copied = type(self)(self.config, max_length=self.max_length, page_size=self.page_size)
        for mine, theirs in zip(copied.paged, self.paged, strict=True):
            mine.seen = theirs.seen
        if self._pool is not None:
            copied._pool = self._pool.copy()
        return copied

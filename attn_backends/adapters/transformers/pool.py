"""Keys and values of a batch in pages of our own, and the step that is planned over them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.adapters.transformers.layers import CalledLayers, LayerCall, writable
from attn_backends.adapters.transformers.refuse import decline
from attn_backends.adapters.transformers.rows import Rows, RowTokens
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.page_table import starts_of, token_positions
from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import AttentionSpec, KVCacheSpec

PAGE_SIZES = (16, 32, 64, 128, 256, 1)  # where the caller leaves it open, after the backend's own wishes
SPARE_TOKENS = 256  # room beside the first forward's; from then on rows double


@dataclass
class PoolStep:
    """One forward."""

    num_tokens: int  # of each row, padding included
    new: RowTokens
    common: CommonAttentionMetadata | None  # None: padding alone


class Pool:
    """A row's pages lie one behind the other, equally many in each row: pages are found without a free list. Rows grow
    by doubling, each layer's when it next runs. A `StepTable` is for rows that come and go within limits that stand: it
    refuses rows without new tokens, which chunks of padded batches have, and would be made anew for each forward
    without a cache and each doubling.

    Args:
        name, options: as `CalledLayers` takes them.
        max_length: tokens a row at which growth stops to double.
        page_size: None: what the backend likes.
    """

    def __init__(self, name: str, options: Mapping[str, Any], max_length: int | None, page_size: int | None) -> None:
        sizes = PAGE_SIZES if page_size is None else (page_size,)
        self.layers = CalledLayers(name, options, [KVCacheSpec(None, size) for size in sizes])
        self.max_length = max_length
        self.rows: Rows | None = None
        self.step: PoolStep | None = None
        self.caches: dict[Hashable, KVCache] = {}
        self._width = 0  # pages a row
        self._page_table = torch.empty(0, 0, dtype=torch.int32, device="cpu")

    def attend(self, slot: Hashable, call: LayerCall, mask: torch.Tensor | None) -> torch.Tensor:
        """[batch, num_tokens, num_qo_heads, head_dim_vo]; zeros where padding is. `slot` names the layer's cache.

        The first call of a forward, with `step` None, takes its tokens in.
        """
        spec, device = call.spec, call.query.device
        _check_kept(self.caches.get(slot), spec)
        self.layers.show(spec, device)
        step = self.step = self.step or self._begin(call, mask)
        if spec.window_left >= 0 and self.rows is not None and self.rows.has_gaps:
            decline("attention_mask", "padding between tokens of a row, and a window over them", "padding at the ends",
                    "Pad on the left: tokenizer.padding_side = 'left'.")  # fmt: skip
        batch, live = len(step.new.query_lens), step.new.live
        query, key, value = (_flat(tensor, live) for tensor in (call.query, call.key, call.value))
        if step.common is None:
            return query.new_zeros(batch, step.num_tokens, spec.num_qo_heads, spec.head_dim_vo)
        impl, planned = self.layers.serve(call, step.common)
        out: torch.Tensor = impl.forward(query, key, value, self._cache(slot, spec, device), planned)
        if live is None:
            return out.view(batch, step.num_tokens, *out.shape[1:])
        full = out.new_zeros(batch, step.num_tokens, *out.shape[1:])
        full[live] = out
        return full

    def copy(self) -> Pool:
        """Its own pages, with the same keys."""
        (cache, *_) = self.layers.caches
        copied = Pool(self.layers.name, self.layers.options, self.max_length, cache.page_size)
        copied.rows, copied._width, copied._page_table = deepcopy(self.rows), self._width, self._page_table
        with writable():
            copied.caches = {slot: KVCache(*(each.clone() for each in cache)) for slot, cache in self.caches.items()}
        return copied

    def select_rows(self, rows: torch.Tensor) -> None:
        """Put rows and their keys in the place of others, as `index_select` does: [new batch] i64."""
        if self.rows is None:
            return
        batch, self.step = len(self.rows.lens), None
        self.rows.select(rows)
        with writable():
            for slot, cache in self.caches.items():
                taken = (each.unflatten(0, (batch, -1)).index_select(0, rows.to(each.device)) for each in cache)
                self.caches[slot] = KVCache(*(each.flatten(0, 1) for each in taken))
        self._lay_out(len(rows), self._page_table.device)

    def _begin(self, call: LayerCall, mask: torch.Tensor | None) -> PoolStep:
        batch, num_tokens = call.query.shape[0], call.query.shape[2]
        self.rows = self.rows or Rows(batch)
        if batch != len(self.rows.lens):
            decline("batch_size", f"{batch} rows", f"the {len(self.rows.lens)} rows of this cache",
                    "Use a new PagedCache, or reset() this one.")  # fmt: skip
        new = self.rows.append(num_tokens, mask)
        total, longest = int(new.query_lens.sum()), int(new.seq_lens.max())
        if not total:
            return PoolStep(num_tokens, new, None)
        self._grow(longest, call.query.device)
        self.layers.expect(batch, total, self._width * self.layers.cache.page_size)
        return PoolStep(num_tokens, new, self._common(new, call.query.device))

    def _common(self, new: RowTokens, device: torch.device) -> CommonAttentionMetadata:
        page_size = self.layers.cache.page_size
        rows, positions = token_positions(new.context_lens, new.query_lens)
        slots = torch.from_numpy(rows * (self._width * page_size) + positions)  # rows lie one behind the other
        starts, lens = torch.from_numpy(starts_of(new.query_lens)), torch.from_numpy(new.seq_lens)
        return CommonAttentionMetadata.from_tensors(
            page_size, starts.to(device), starts, lens.to(device), lens, self._page_table, slots.to(device)
        )

    def _grow(self, longest: int, device: torch.device) -> None:
        page_size = self.layers.cache.page_size
        if longest <= self._width * page_size:
            return
        wanted = max(longest + SPARE_TOKENS, 2 * self._width * page_size)
        if self.max_length is not None and self.max_length >= longest:
            wanted = min(wanted, self.max_length)
        self._width = -(-wanted // page_size)
        self._lay_out(0 if self.rows is None else len(self.rows.lens), device)

    def _lay_out(self, batch: int, device: torch.device) -> None:
        table = torch.arange(batch * self._width, dtype=torch.int32, device=device)
        self._page_table = table.view(batch, self._width)

    def _cache(self, slot: Hashable, spec: AttentionSpec, device: torch.device) -> KVCache:
        """A layer's pages, as many as the page table has."""
        held, batch = self.caches.get(slot), self._page_table.shape[0]
        num_pages = batch * self._width
        if held is not None and held.key.shape[0] == num_pages:
            return held
        made = self.layers.allocate(spec, num_pages, device)
        for old, new in () if held is None else zip(held, made, strict=True):
            rows = old.unflatten(0, (batch, -1))
            new.unflatten(0, (batch, -1))[:, : rows.shape[1]] = rows
        self.caches[slot] = made
        return made


def _check_kept(cache: KVCache | None, spec: AttentionSpec) -> None:
    """A layer's keys are as those that its pages hold.

    Raises:
        Unsupported: they are of another dtype, or of other heads.
    """
    if cache is None:
        return
    asked = spec.cache_dtype, (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim_vo)
    kept = cache.key.dtype, (*cache.key.shape[2:],), (*cache.value.shape[2:],)
    if asked != kept:
        got, supported = ("{}, keys {}, values {}".format(*each) for each in (asked, kept))
        decline("past_key_values", got, f"{supported}, as cached", "Begin anew without it, or reset() it.")


def _flat(tensor: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads, tokens, dim] → [tokens that are no padding, heads, dim]; a view where there is one."""
    rows = tensor.transpose(1, 2)
    return rows.flatten(0, 1) if live is None else rows[live]

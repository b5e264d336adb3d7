"""transformers' continuous batching: its own paged cache, read and written where it lies.

A packed batch brings `cu_seq_lens_q` and `cu_seq_lens_k`, and for each group of layers (an allocator of the cache)
`read_index`, the slot of every key in order, and `write_index`, those of the new ones. A page's first slot is each
page_size-th of a row's. Groups have page tables of their own, so each has its own plans.

Layers with a window keep rings: new keys may take the place of some that earlier queries of a chunk still see. There
transformers gathers what a step sees, as it does for its own attention, and the backend reads it from pages of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attn_backends.adapters.transformers.batch_cache import KeysPlace, gathered, place_of
from attn_backends.adapters.transformers.layers import CalledLayers, LayerCall
from attn_backends.adapters.transformers.refuse import decline
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.cache.kv_cache import KVCache, write_kv
from attn_backends.spec import AttentionSpec, KVCacheSpec

_groups: WeakKeyDictionary[Any, dict[int, Group]] = WeakKeyDictionary()  # of a cache


def attend_batch(name: str, options: Mapping[str, Any], call: LayerCall, given: Mapping[str, Any]) -> torch.Tensor:
    """[1, num_tokens, num_qo_heads, head_dim_vo] of one layer of a packed batch.

    Args:
        given: the keyword arguments that continuous batching passes through the model.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing or given.get("block_table") is not None:
        decline("cuda_graph", "a decode batch for FlashAttention, or a CUDA graph", "eager steps",
                "ContinuousBatchingConfig(use_cuda_graph=False, max_blocks_per_request=0).")  # fmt: skip
    place = place_of(given["cache"], call)
    groups = _groups.setdefault(given["cache"], {})
    group = groups.get(place.group)
    if group is None or group.layers.name != name:
        group = groups[place.group] = Group(CalledLayers(name, options, [KVCacheSpec(None, place.page_size)]))
    return group.attend(call, place, given)


class Group:
    """Layers with one page table, and the step that they are in. A step is known by its `write_index`, a list that
    continuous batching makes anew for each."""

    def __init__(self, layers: CalledLayers) -> None:
        self.layers = layers
        self._write_index: Any = None
        self._common: CommonAttentionMetadata | None = None
        self._slots = torch.empty(0, dtype=torch.int64, device="cpu")  # of what was gathered, in our pages
        self._gathered: dict[AttentionSpec, KVCache] = {}

    def attend(self, call: LayerCall, place: KeysPlace, given: Mapping[str, Any]) -> torch.Tensor:
        """[1, num_tokens, num_qo_heads, head_dim_vo]"""
        self.layers.show(call.spec, call.query.device)
        if self._write_index is not given["write_index"] or self._common is None:
            self._write_index = given["write_index"]
            common = self._common = self._batch(place, call.query.shape[2], given)
            self.layers.expect(common.num_reqs, common.num_tokens, common.max_seq_len)
        impl, step = self.layers.serve(call, self._common)
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (call.query, call.key, call.value))
        if place.pages is not None:
            return impl.forward(query, key, value, place.pages, step)[None]
        pages = self._own_pages(call.spec, call.query.device)
        keys, values = (each[: len(self._slots)] for each in gathered(given, call))  # padding is behind
        write_kv(keys, values, pages, self._slots)
        return impl.forward(query, None, None, pages, step)[None]

    def _batch(self, place: KeysPlace, num_tokens: int, given: Mapping[str, Any]) -> CommonAttentionMetadata:
        """The packed batch in our words. Lengths are read from the device here, once a step and group."""
        starts, key_starts = given["cu_seq_lens_q"], given["cu_seq_lens_k"]
        if isinstance(key_starts, Mapping):
            key_starts = key_starts[place.kind]
        lens = key_starts.diff().int()
        lens_cpu, page_size = lens.cpu(), place.page_size
        columns = torch.arange(0, max(int(lens_cpu.max()), 1), page_size, device=lens.device)
        if place.pages is None:
            slots, first_pages = None, self._lay_out(key_starts, lens, int(lens_cpu.sum()), page_size)
            table = first_pages[:, None] + columns // page_size
        else:
            slots = given["write_index"][place.group]
            read = given["read_index"][place.group]
            read = read if read.numel() else slots  # prompts from their first token on: all keys are new
            table = read[(key_starts[:-1, None] + columns).clamp_(max=len(read) - 1)] // page_size
        return CommonAttentionMetadata.from_tensors(
            page_size, starts.int(), starts.int().cpu(), lens, lens_cpu, table.int(), slots, num_tokens=num_tokens
        )

    def _lay_out(self, key_starts: torch.Tensor, lens: torch.Tensor, num_keys: int, page_size: int) -> torch.Tensor:
        """Gives each row pages of ours, one behind the other: [num_rows], each row's first. Notes each key's slot."""
        counts = (lens + page_size - 1) // page_size
        first = counts.cumsum(0) - counts
        shift = first * page_size - key_starts[:-1]  # slot less place, the same for all keys of a row
        shifts = shift.repeat_interleave(lens, output_size=num_keys)
        self._slots = torch.arange(num_keys, device=lens.device) + shifts
        return first

    def _own_pages(self, spec: AttentionSpec, device: torch.device) -> KVCache:
        """Pages for what one layer gathers; the next layer with its spec writes them over."""
        held, page_size = self._gathered.get(spec), self.layers.cache.page_size
        needed = len(self._slots) // page_size + (self._common.num_reqs if self._common else 0)
        if held is None or held.key.shape[0] < needed:
            held = self._gathered[spec] = self.layers.allocate(spec, 1 << needed.bit_length(), device)
        return held

"""TORCH: paged attention in plain torch, on any device. The one to read first, and the default on a CPU.

The builder turns a batch into work items: one `DecodeBatch` for decode rows that are cheap to gather together, and a
`Row` for every other row. Each item names the keys to gather and a bias that holds all that depends on positions
(causality, window, chunks, ALiBi, padding), shared by all layers of the group. What is left to the Impl: write the new
keys, gather, attend, write the output.

On a CPU where C can be compiled, rows take another road: two kernels, for decode rows (native/paged_decode.py) and for
all others (native/paged_prefill.py), that read pages in place and work positions out themselves, so that their item,
`PagedRows`, is little more than the page table.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F

from attn_backends.backends.torch.attend import (
    Attended,
    attend_by_hand,
    can_add,
    flash,
    gives_lse,
    join,
    join_pieces,
    sink,
    unfolded,
)
from attn_backends.backends.torch.metadata import DecodeBatch, TorchMetadata
from attn_backends.backends.torch.native.paged_decode import PagedDecode
from attn_backends.backends.torch.native.paged_prefill import PagedPrefill
from attn_backends.backends.torch.options import TorchOptions
from attn_backends.backends.torch.state import TorchStep, room_in
from attn_backends.cache.kv_cache import KVCache, dequantise, gather_pages, gather_slots, has_padding, write_slots
from attn_backends.interface import AttentionImpl
from attn_backends.interface.refusals import missing_keys, refuse_gradients

OTHER_OPTIONS = "this step was built with {}, and the layer has it off: give both one set of options"


def slots_of(metadata: TorchMetadata) -> torch.Tensor:
    """Slots of the new tokens: all that there are where there is no padding, since a view takes a while."""
    slots, num_new = metadata.slot_mapping, metadata.num_new_kv
    return slots if slots.shape[0] == num_new else slots[:num_new]


class TorchImpl(AttentionImpl[TorchStep]):
    step_cls = TorchStep
    leaves_padding = False  # rows without keys are idle too: `attend` zeroes both

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.options or TorchOptions()
        constants = (self.spec, self.device, self.sinks, self.k_scale, self.v_scale)
        self.kernel = PagedDecode.of(*constants) if options.native_decode else None
        self.prefill_kernel = PagedPrefill.of(*constants) if options.native_prefill else None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: TorchStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        metadata = step.metadata
        if metadata.has_idle_tokens:
            output.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        joins_prefix = metadata.paged_rows is not None and metadata.prefix_pages is not None
        kernel_lse = lse
        if joins_prefix and lse is None:
            kernel_lse = query.new_empty(query.shape[:2], dtype=torch.float32)  # what the kernel writes
        for kernel, rows, option in (
            (self.kernel, metadata.paged_rows, "native_decode"),
            (self.prefill_kernel, metadata.paged_prefills, "native_prefill"),
        ):
            if rows is None:
                continue
            if kv_cache is None:
                raise missing_keys(reads_cache=True)
            if kernel is None:
                raise ValueError(OTHER_OPTIONS.format(option))
            kernel.attend(query, key, value, kv_cache, slots_of(metadata), rows, output, kernel_lse)
            key = value = None  # the first kernel writes all new keys of the step
        if joins_prefix and kernel_lse is not None:
            tokens = slice(0, metadata.num_decode_tokens)
            join(Attended(output[tokens], kernel_lse[tokens]), self._attend_prefix(query, kv_cache, step), tokens)
        if metadata.decode_batch is None and not metadata.decode_rows and not metadata.prefill_rows:
            return
        for tokens, attended in self._attend_items(query, key, value, kv_cache, step, lse is not None):
            output[tokens] = attended.output
            if lse is not None and attended.lse is not None:
                lse[tokens] = attended.lse

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, step: TorchStep) -> None:
        """Nothing where a kernel runs, the first of which writes by itself; plainly indexed where all have slots."""
        metadata, num_new = step.metadata, step.metadata.num_new_kv
        if metadata.paged_rows is not None or metadata.paged_prefills is not None:
            return
        refuse_gradients(key, value)
        slots = slots_of(metadata)
        if metadata.for_graph or slots.is_cuda or has_padding(slots):
            super().write(key, value, kv_cache, step)
        elif num_new:
            write_slots(key[:num_new], value[:num_new], kv_cache, slots, self.k_scale, self.v_scale)

    def _attend_prefix(self, query: torch.Tensor, kv_cache: KVCache | None, step: TorchStep) -> Attended | None:
        """All decode rows over the prefix that they share, without sinks; None if they share none."""
        metadata = step.metadata
        if metadata.prefix_pages is None or kv_cache is None:
            return None
        keys, values = self._gather(kv_cache, metadata.prefix_pages, slice(0, metadata.common_prefix_len), step)
        # Queries of all rows in one row: without causality their order means nothing.
        decodes = query[None, : metadata.num_decode_tokens]
        return self._attend(decodes, keys, values, None, False, True, with_sinks=False)

    def _attend_items(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: TorchStep,
        want_lse: bool,
    ) -> Iterator[tuple[slice, Attended]]:
        """Every item's tokens and result but the kernel's: decode rows together, then row by row."""
        metadata = step.metadata
        shared = None if metadata.paged_rows is not None else self._attend_prefix(query, kv_cache, step)
        batch = metadata.decode_batch
        if batch is not None and kv_cache is None:
            raise missing_keys(reads_cache=True)
        if batch is not None and batch.owners is not None and kv_cache is not None:
            tokens = slice(0, batch.num_rows)
            attended = self._attend_pieces(query[tokens], kv_cache, batch, batch.owners, step)
            yield tokens, join(attended, shared, tokens)
        elif batch is not None and kv_cache is not None:
            key_room, value_room = room_in(step, kv_cache, len(batch.slots))
            keys = dequantise(gather_slots(kv_cache.key, batch.slots, key_room), query.dtype, self.k_scale)
            values = dequantise(gather_slots(kv_cache.value, batch.slots, value_room), query.dtype, self.v_scale)
            keys, values = (tensor.view(batch.num_rows, -1, *tensor.shape[1:]) for tensor in (keys, values))
            tokens = slice(0, batch.num_rows * batch.query_len)
            queries = query[tokens].unflatten(0, (batch.num_rows, batch.query_len))
            attended = self._attend(queries, keys, values, batch.bias, False, want_lse or shared is not None).flat()
            yield tokens, join(attended.of(batch.live), shared, tokens)
        for row in metadata.decode_rows + metadata.prefill_rows:
            if row.pages is not None and kv_cache is not None:
                keys, values = self._gather(kv_cache, row.pages, row.keys, step)
            elif key is not None and value is not None:
                keys, values = key[None, row.new_keys], value[None, row.new_keys]
            else:
                raise missing_keys(reads_cache=row.pages is not None)
            with_shared = shared if row.queries.stop <= metadata.num_decode_tokens else None
            attended = self._attend(
                query[None, row.queries], keys, values, row.bias, row.is_causal, want_lse or with_shared is not None
            )
            yield row.queries, join(attended.flat(), with_shared, row.queries)

    def _attend_pieces(
        self,
        query: torch.Tensor,  # [num_rows, num_qo_heads, head_dim]
        kv_cache: KVCache,
        batch: DecodeBatch,
        owners: torch.Tensor,
        step: TorchStep,
    ) -> Attended:
        """One piece a core, gathered and attended before the next; at the end each row's are joined."""
        spec, num_pieces, at_once = self.spec, len(owners), torch.get_num_threads()
        num_keys = len(batch.slots) // num_pieces
        heads = query.unflatten(1, (spec.num_kv_heads, -1))  # [num_rows, Hkv, G, D]
        outs = heads.index_select(0, owners)  # queries, each of which makes place for its output
        lses = outs.new_empty(outs.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        masks = repeat(None) if batch.bias is None else batch.bias[:, :, :, 0].split(at_once)
        key_room, value_room = room_in(step, kv_cache, min(at_once, num_pieces) * num_keys)
        shape = (-1, num_keys, spec.num_kv_heads, spec.head_dim)
        pieces = (batch.slots.split(at_once * num_keys), outs.split(at_once), lses.split(at_once))
        for slots, out, lse, mask in zip(*pieces, masks, strict=False):
            keys = dequantise(gather_slots(kv_cache.key, slots, key_room), spec.dtype, self.k_scale).view(shape)
            values = dequantise(gather_slots(kv_cache.value, slots, value_room), spec.dtype, self.v_scale).view(shape)
            attended = flash(out, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=spec.scale)
            out.copy_(attended[0])
            lse.copy_(attended[1])
        return sink(join_pieces(outs, lses, owners, heads.shape), self.sinks)

    def _gather(
        self, kv_cache: KVCache, pages: torch.Tensor, tokens: slice, step: TorchStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some pages as [1, num_keys, num_kv_heads, dim] in the query's dtype."""
        key_room, value_room = room_in(step, kv_cache, len(pages) * self.cache.page_size)
        keys = gather_pages(kv_cache.key, pages, key_room)[None, tokens]
        values = gather_pages(kv_cache.value, pages, value_room)[None, tokens]
        dtype = self.spec.dtype
        return dequantise(keys, dtype, self.k_scale), dequantise(values, dtype, self.v_scale)

    def _attend(
        self,
        query: torch.Tensor,  # [B, query_len, num_qo_heads, head_dim]
        key: torch.Tensor,  # [B, num_keys, num_kv_heads, head_dim]
        value: torch.Tensor,  # [B, num_keys, num_kv_heads, head_dim_vo]
        bias: torch.Tensor | None,  # [1 | B, Hkv | 1, G | 1, query_len, num_keys]
        is_causal: bool,
        want_lse: bool,
        with_sinks: bool = True,
    ) -> Attended:
        if bias is not None and not can_add(bias, query):
            wide = bias.dtype
            attended = self._attend(query.to(wide), key.to(wide), value.to(wide), bias, is_causal, want_lse, with_sinks)
            return Attended(attended.output.to(query.dtype), attended.lse)
        spec = self.spec
        sinks = self.sinks if with_sinks else None
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        alone = query.shape[1] == 1
        # Queries that differ in nothing but their vectors can be one KV head's: no key is read twice.
        together = alone or (bias is None and not is_causal)
        wants_sum = want_lse or sinks is not None
        if spec.logits_soft_cap is not None or (wants_sum and not (together and gives_lse(query.device, spec))):
            heads = query.reshape(*query.shape[:2], spec.num_kv_heads, spec.group_size, -1).permute(0, 2, 3, 1, 4)
            return attend_by_hand(heads, key, value, bias, is_causal, spec, sinks)
        if together:
            heads = query.unflatten(2, (spec.num_kv_heads, -1)).transpose(1, 2).flatten(2, 3)  # [B, Hkv, len · G, D]
            mask = None if bias is None else bias[:, :, :, 0]
            if not wants_sum:
                return unfolded(F.scaled_dot_product_attention(heads, key, value, mask, scale=spec.scale), None, query)
            out, lse = flash(heads, key, value, attn_mask=mask, scale=spec.scale)
            return sink(unfolded(out, lse, query), sinks)
        mask = None if bias is None else bias.flatten(1, 2)  # [B, Hq | 1, query_len, num_keys]
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, mask, is_causal=is_causal, scale=spec.scale,
            enable_gqa=spec.group_size > 1,
        )  # fmt: skip
        return Attended(out.transpose(1, 2), None)

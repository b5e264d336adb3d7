"""One layer: write the new keys, then one launch for rows that decode and one for all others."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from attn_backends.backends.triton.layer import make_kernels
from attn_backends.backends.triton.metadata import TritonMetadata
from attn_backends.backends.triton.state import TritonStep
from attn_backends.backends.triton.upcasting import in_turn
from attn_backends.cache.kv_cache import KVCache, write_kv
from attn_backends.interface import AttentionImpl
from attn_backends.interface.refusals import missing_keys
from attn_backends.kernels.pdl import Pdl
from attn_backends.kernels.prefill.launch import Rows
from attn_backends.spec import AttentionSpec


@lru_cache(maxsize=256)  # layers are alike
def _alike(spec: AttentionSpec, *numbers: Any) -> object:
    """The same object for layers whose launches differ in tensors alone."""
    return object()


class TritonImpl(AttentionImpl[TritonStep]):
    step_cls = TritonStep
    leaves_padding = False  # kernels write zeros there

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kernels = make_kernels(
            self.spec, self.cache, self.device, self.options, self.sinks, self.k_scale, self.v_scale
        )
        self._alike = _alike(self.spec, self.cache, self.options, self.k_scale, self.v_scale)
        self._own_tensors = self._kernels.of_layer

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, step: TritonStep) -> None:
        """Nothing: `attend` writes, as it knows whether the launch behind may pdl before the write has ended."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: TritonStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        metadata = step.metadata
        decoded_pages = None if step.schedule is None else metadata.page_table
        has_prefills = metadata.num_decode_rows < metadata.num_rows
        pdl = self._kernels.pdl  # of decode
        if kv_cache is not None and key is not None and value is not None:
            num_new = min(key.shape[0], metadata.slot_mapping.shape[0])
            if num_new and decoded_pages is not None and not has_prefills and self._kernels.supports_pdl(num_new):
                pdl = Pdl.WAIT_FIRST
            write_kv(key, value, kv_cache, metadata.slot_mapping, self.k_scale, self.v_scale,
                     next_waits=pdl is Pdl.WAIT_FIRST)  # fmt: skip
        keys, values = self._source(metadata, key, value, kv_cache)
        if has_prefills:
            pdl = max(pdl, self._prefill(query, (keys, values), (key, value), output, lse, step))
        if decoded_pages is not None:
            assert step.schedule is not None  # or there were no pages
            workspace = (step.workspace.partial_acc, step.workspace.partial_ml, step.workspace.counters)
            self._kernels.decode(query, keys, values, output, lse, decoded_pages, step.schedule, workspace, pdl)

    def _prefill(
        self, query: torch.Tensor, source: tuple[torch.Tensor, torch.Tensor],
        new: tuple[torch.Tensor | None, torch.Tensor | None], output: torch.Tensor, lse: torch.Tensor | None,
        step: TritonStep,
    ) -> Pdl:  # fmt: skip
        """Rows behind the decodes, which can pdl when it says; their keys from the cache, or as the step brings
        them."""
        metadata, table = step.metadata, step.metadata.page_table
        keys, values = source
        key, value = new
        if metadata.prefills_are_prompts and key is not None and value is not None:
            keys, values, table = key, value, None
        num_tokens = metadata.num_row_tokens - metadata.num_decode_row_tokens
        rows = Rows(table, metadata.seq_lens, metadata.query_start_loc, metadata.key_start_loc,
                    metadata.num_decode_rows, num_tokens, metadata.num_upcast_keys, metadata.max_seq_len,
                    step.splits, metadata.short_tile, metadata.hopper_tile)  # fmt: skip
        pdl = Pdl.OFF
        for some in in_turn(rows, metadata.upcast_rows, step.section_splits):
            pdl = self._kernels.prefill(query, keys, values, output, lse, some, step.workspace.tiles,
                                        step.workspace.upcast_kv, metadata.prefill_share)  # fmt: skip
        return pdl

    def _source(
        self, metadata: TritonMetadata, key: torch.Tensor | None, value: torch.Tensor | None, kv_cache: KVCache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache, or what the step brings."""
        if metadata.page_table is not None and kv_cache is not None:
            return kv_cache.key, kv_cache.value
        if metadata.page_table is None and key is not None and value is not None:
            return key, value
        raise missing_keys(reads_cache=metadata.page_table is not None)

"""One layer: write the new keys, run what was planned, join what was attended in parts."""

from __future__ import annotations

import math
from typing import Any

import torch

from attn_backends.backends.flashinfer.library import paged
from attn_backends.backends.flashinfer.metadata import FlashInferMetadata, Rows
from attn_backends.backends.flashinfer.plans import KeysAndValues
from attn_backends.backends.flashinfer.state import FlashInferStep
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionImpl
from attn_backends.interface.refusals import missing_keys
from attn_backends.kernels.merge_state import add_sinks


class FlashInferImpl(AttentionImpl[FlashInferStep]):
    """Sinks take their share behind the kernels, from the LSE: FlashInfer's own sink kernels are compiled on first
    use, know no soft cap, and are prefill kernels for decode."""

    step_cls = FlashInferStep

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        slopes = self.spec.alibi_slopes
        self.alibi_slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=self.device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: FlashInferStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        metadata = step.metadata
        live = metadata.num_decode_tokens + metadata.num_prefill_tokens
        if live < metadata.num_tokens:
            query, output, lse = query[:live], output[:live], None if lse is None else lse[:live]
        written = output if output.is_contiguous() else output.new_empty(output.shape)
        log2_lse = lse
        if lse is None and (self.sinks is not None or step.prefix is not None):
            log2_lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        cached = None if kv_cache is None else paged(kv_cache, self.cache)
        brought = None if key is None or value is None else (key, value)
        sources = cached, brought, metadata.num_decode_new_kv
        scales = {name: scale for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)) if scale != 1.0}
        done = 0
        for plan, rows in ((step.decode, metadata.decode), (step.prefill, metadata.prefill)):
            if plan is not None and rows is not None:
                tokens = slice(done, done + rows.num_tokens)
                part = None if log2_lse is None else log2_lse[tokens]
                plan.run(query[tokens], _keys_of(rows, *sources), written[tokens], part, scales)
                done = tokens.stop
        if step.prefix is not None and metadata.prefix is not None and log2_lse is not None:
            tokens = slice(0, metadata.prefix.num_tokens)
            shared, shared_lse = torch.empty_like(written[tokens]), torch.empty_like(log2_lse[tokens])
            step.prefix.run(query[tokens], _keys_of(metadata.prefix, *sources), shared, shared_lse, scales)
            # Not `merge_state`: the library takes LSEs of base 2 as its kernels write them, ours two more launches.
            step.prefix.library.merge(written[tokens], log2_lse[tokens], shared, shared_lse)
        if log2_lse is not None:
            self._finish(written, log2_lse, metadata, want_lse=lse is not None)
        if written is not output:
            output.copy_(written)

    def _finish(self, output: torch.Tensor, lse: torch.Tensor, metadata: FlashInferMetadata, want_lse: bool) -> None:
        """LSEs to natural logarithms, and sinks, in place.

        What kernels write as the LSE of a row without keys is a number like any other, so such rows are told by their
        pages.
        """
        lse.mul_(math.log(2))
        done = 0
        for rows in (metadata.decode, metadata.prefill):
            if rows is not None:
                part = lse[done : done + rows.num_tokens]
                if self.alibi_slopes is not None:
                    _count_from_position(part, rows, metadata.for_graph, self.cache.page_size, self.alibi_slopes)
                self._empty_idle_rows(part, rows, metadata.for_graph)
                done += rows.num_tokens
        if self.sinks is not None:
            add_sinks(output, lse, self.sinks, want_lse=want_lse)

    @staticmethod
    def _empty_idle_rows(lse: torch.Tensor, rows: Rows, is_uniform: bool) -> None:
        """Minus infinity in the LSEs of rows without keys; `is_uniform`: all rows have as many tokens."""
        if not rows.some_may_lack_keys:
            return
        idle = rows.kv_indptr.diff() == 0
        if is_uniform:
            lse.unflatten(0, (rows.num_rows, -1)).masked_fill_(idle[:, None, None], -math.inf)
        else:
            of_tokens = idle.repeat_interleave(rows.qo_indptr.diff(), output_size=rows.num_tokens)
            lse.masked_fill_(of_tokens[:, None], -math.inf)


def _keys_of(rows: Rows, cached: KeysAndValues | None, brought: KeysAndValues | None, first: int) -> KeysAndValues:
    """What rows attend: the cache, or what the step brings, of which prefill rows have what stands from `first` on."""
    if rows.csr is not None and cached is not None:
        return cached
    if rows.csr is None and brought is not None:
        tokens = slice(first, first + rows.num_tokens)
        return brought[0][tokens], brought[1][tokens]
    raise missing_keys(reads_cache=rows.csr is not None)


def _count_from_position(lse: torch.Tensor, rows: Rows, is_uniform: bool, page_size: int, slopes: torch.Tensor) -> None:
    """ALiBi's bias counts from a query's position among all keys. Kernels count from its index among the row's queries,
    which adds slope · (keys - queries) to every logit: the output is the same, and the LSE another."""
    query_lens, kv_lens = rows.qo_indptr.diff(), rows.kv_indptr.diff()
    if rows.csr is not None:
        kv_lens = (kv_lens - 1) * page_size + rows.csr.last_page_len
    times: torch.Tensor | int = rows.num_tokens // rows.num_rows if is_uniform else query_lens
    first = (kv_lens - query_lens).repeat_interleave(times, output_size=rows.num_tokens)
    lse.sub_(first[:, None] * slopes)

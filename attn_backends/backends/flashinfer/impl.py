"""One layer: write the new keys, run what was planned, join what was attended in parts."""

from __future__ import annotations

import math

import torch

from attn_backends.backends.flashinfer.library import paged
from attn_backends.backends.flashinfer.metadata import FlashInferMetadata, Rows
from attn_backends.backends.flashinfer.plans import KeysAndValues
from attn_backends.backends.flashinfer.state import FlashInferStep
from attn_backends.cache.kv_cache import KVCache, write_kv
from attn_backends.interface import AttentionImpl, AttentionStep
from attn_backends.interface.impl import check_call, check_new_kv, check_planned_for


class _Source:
    """Where rows read their keys and values: the cache, or what the step brings."""

    def __init__(
        self, impl: FlashInferImpl, step: FlashInferStep, key: torch.Tensor | None, value: torch.Tensor | None,
        kv_cache: KVCache | None,
    ) -> None:  # fmt: skip
        self.cached = None if kv_cache is None else paged(kv_cache, impl.cache)
        self.brought = None if key is None or value is None else (key, value)
        self.first = step.metadata.num_decode_new_kv  # of those that prefill rows bring

    def of(self, rows: Rows) -> KeysAndValues:
        if rows.csr is not None and self.cached is not None:
            return self.cached
        if rows.csr is None and self.brought is not None:
            key, value = self.brought
            tokens = slice(self.first, self.first + rows.num_tokens)
            return key[tokens], value[tokens]
        raise ValueError("this step reads a cache or fresh keys, and neither was given: pass kv_cache or key")


class FlashInferImpl(AttentionImpl[FlashInferMetadata]):
    """Sinks take their share behind the kernels, from the LSE: FlashInfer's own sink kernels are compiled on first
    use, know no soft cap, and are prefill kernels for decode."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: AttentionStep[FlashInferMetadata],
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
        output_scale: float | None = None,
    ) -> torch.Tensor:
        planned = self._check(step)
        metadata, spec = planned.metadata, self.spec
        check_call("FLASHINFER", spec, metadata.num_tokens, query, kv_cache, output, lse, output_scale)
        check_new_kv(spec, metadata.num_new_kv, key, value)
        if output is None:
            output = query.new_empty(query.shape[0], spec.num_qo_heads, spec.head_dim_vo)
        written = output if output.is_contiguous() else output.new_empty(output.shape)
        if kv_cache is not None and key is not None and value is not None:
            write_kv(key, value, kv_cache, metadata.slot_mapping, self.k_scale, self.v_scale)
        log2_sums = lse
        if lse is None and (spec.sinks or planned.prefix is not None):
            log2_sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        if not metadata.for_graph and metadata.num_tokens > metadata.num_decode_tokens + metadata.num_prefill_tokens:
            written.zero_()
            if log2_sums is not None:
                log2_sums.fill_(-math.inf)
        self._attend(query, _Source(self, planned, key, value, kv_cache), planned, written, log2_sums)
        if log2_sums is not None:
            self._finish(written, log2_sums, metadata)
        return output if written is output else output.copy_(written)

    def _check(self, step: AttentionStep[FlashInferMetadata]) -> FlashInferStep:
        if not isinstance(step, FlashInferStep):
            raise TypeError(
                f"FLASHINFER got a {type(step).__name__} of {type(step.metadata).__name__}: build the metadata with "
                "FlashInferMetadataBuilder, and plan it with the state's begin_forward before any layer runs"
            )
        check_planned_for(step.spec, self.spec)
        return step

    def _attend(
        self,
        query: torch.Tensor,
        source: _Source,
        step: FlashInferStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Run the step's plans, each over its rows' tokens; `lse` is base 2."""
        scales = {name: scale for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)) if scale != 1.0}
        metadata, done = step.metadata, 0
        for plan, rows in ((step.decode, metadata.decode), (step.prefill, metadata.prefill)):
            if plan is not None and rows is not None:
                tokens = slice(done, done + rows.num_tokens)
                part = None if lse is None else lse[tokens]
                plan.run(query[tokens], source.of(rows), output[tokens], part, scales)
                done = tokens.stop
        if step.prefix is not None and metadata.prefix is not None and lse is not None:
            tokens = slice(0, metadata.prefix.num_tokens)
            shared, shared_lse = torch.empty_like(output[tokens]), torch.empty_like(lse[tokens])
            step.prefix.run(query[tokens], source.of(metadata.prefix), shared, shared_lse, scales)
            step.prefix.library.merge(output[tokens], lse[tokens], shared, shared_lse)

    def _finish(self, output: torch.Tensor, lse: torch.Tensor, metadata: FlashInferMetadata) -> None:
        """LSEs to natural logarithms, and sinks, which take their share of the softmax and give nothing, in place.

        What kernels write as the LSE of a row without keys is a number like any other, so such rows are told by their
        pages. The factor of the sinks is float32: outputs are rounded once.
        """
        lse.mul_(math.log(2))
        done = 0
        for rows in (metadata.decode, metadata.prefill):
            if rows is not None:
                self._empty_idle_rows(lse[done : done + rows.num_tokens], rows, metadata.for_graph)
                done += rows.num_tokens
        if self.sinks is None:
            return
        sinks = self.sinks.float()
        output.mul_(torch.sigmoid(lse - sinks)[..., None])
        lse.copy_(torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sinks)))

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

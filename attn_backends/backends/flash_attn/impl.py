"""One layer: write the new keys, attend, join what was attended in parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from attn_backends.backends.flash_attn.call import Call, LayerConstants
from attn_backends.backends.flash_attn.metadata import FlashAttnMetadata
from attn_backends.backends.flash_attn.state import FlashAttnStep
from attn_backends.cache.kv_cache import KVCache, write_kv
from attn_backends.interface import AttentionImpl, AttentionStep
from attn_backends.interface.impl import check_call, check_new_kv, check_planned_for
from attn_backends.kernels.merge_state import merge
from attn_backends.spec import FP8_DTYPES


class FlashAttnImpl(AttentionImpl[FlashAttnMetadata]):
    """Kernels that take sinks take them in bfloat16. Sinks that are not exact there, or that a kernel does not take,
    join behind it, from the LSE.

    Kernels take `k_scale` and `v_scale` over fp8 caches alone. Over others the scale of the softmax holds `k_scale`,
    and outputs are multiplied by `v_scale`, where keys are read from the cache. Keys of this step are as they came.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = self.spec
        sinks = None if self.sinks is None else self.sinks.to(self.device, torch.bfloat16)
        if sinks is not None and self.sinks is not None and not bool((sinks == self.sinks.to(self.device)).all()):
            sinks = None  # the one look at the device, when the model is loaded
        constants = LayerConstants.of(spec, sinks, self.k_scale, self.v_scale, self.device)
        self.constants = {True: constants, False: replace(constants, scale=spec.scale)}  # by whether keys are cached
        self.constants_behind = {is_cached: each.without_sinks() for is_cached, each in self.constants.items()}
        self.prefix_constants = constants.over_prefix()
        self.value_scales = {True: 1.0 if spec.cache_dtype in FP8_DTYPES else self.v_scale, False: 1.0}

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: AttentionStep[FlashAttnMetadata],
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
        output_scale: float | None = None,
    ) -> torch.Tensor:
        planned = self._check(step)
        metadata, spec = planned.metadata, self.spec
        check_call("FLASH_ATTN", spec, metadata.num_tokens, query, kv_cache, output, lse, output_scale)
        check_new_kv(spec, metadata.num_new_kv, key, value)
        if output is None:
            output = query.new_empty(query.shape[0], spec.num_qo_heads, spec.head_dim_vo)
        if kv_cache is not None and key is not None and value is not None:
            write_kv(key, value, kv_cache, metadata.slot_mapping, self.k_scale, self.v_scale)
        given = kv_cache
        if planned.calls[0].rows.page_table is None:
            live = metadata.rows.num_tokens  # tiles reach behind a row: padding must not stand there
            given = None if key is None or value is None else KVCache(key[:live], value[:live])
        if given is None:
            raise ValueError("this step reads a cache or fresh keys, and neither was given: pass kv_cache or key")
        self._attend(query, given, planned, output, lse)
        self._fill_padding(output, lse, metadata)
        return output

    def _attend(
        self,
        query: torch.Tensor,
        given: KVCache,  # or keys and values of this step, [num_keys, num_kv_heads, head_dim]
        step: FlashAttnStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Run the step's calls, each over its rows' tokens."""
        spec, is_cached = self.spec, step.calls[0].rows.page_table is not None
        constants = self.constants[is_cached]
        adds_sinks = spec.sinks and (constants.sinks is None or spec.num_qo_heads > step.provider.max_sinks)
        if adds_sinks:
            constants = self.constants_behind[is_cached]
        want_lse = lse is not None or adds_sinks or step.prefix is not None
        for call in step.calls:
            tokens = call.tokens
            out = output[tokens]
            out_lse = step.provider.attend(query[tokens], *given, out, call, constants, want_lse)
            if out_lse is not None:
                out_lse = out_lse.masked_fill(
                    out_lse == math.inf, -math.inf
                )  # as FlashAttention 2 has it for rows without keys
                if step.prefix is not None and call is step.calls[0]:
                    self._join_prefix(query, given, out, out_lse, step, step.prefix)
                if lse is not None:
                    lse[tokens] = self._with_sinks(out_lse) if adds_sinks else out_lse
            self._scale_output(out, out_lse if adds_sinks else None, self.value_scales[is_cached])

    def _check(self, step: AttentionStep[FlashAttnMetadata]) -> FlashAttnStep:
        if not isinstance(step, FlashAttnStep):
            raise TypeError(
                f"FLASH_ATTN got a {type(step).__name__} of {type(step.metadata).__name__}: build the metadata with "
                "FlashAttnMetadataBuilder, and give it to the state's begin_forward before any layer runs"
            )
        check_planned_for(step.spec, self.spec)
        return step

    def _join_prefix(
        self,
        query: torch.Tensor,
        given: KVCache,
        output: torch.Tensor,
        out_lse: torch.Tensor,
        step: FlashAttnStep,
        prefix: Call,
    ) -> None:
        """Attend the shared prefix and join it, in place."""
        shared = torch.empty_like(output)
        more = step.provider.attend(query[prefix.tokens], *given, shared, prefix, self.prefix_constants, True)
        assert more is not None
        merge(output, out_lse, shared, more)

    def _with_sinks(self, out_lse: torch.Tensor) -> torch.Tensor:
        """LSEs with the sinks among the keys; those of rows without keys stay."""
        assert self.sinks is not None
        return torch.where(out_lse == -math.inf, out_lse, torch.logaddexp(out_lse, self.sinks.float()))

    def _scale_output(self, output: torch.Tensor, out_lse: torch.Tensor | None, scale: float) -> None:
        """Multiply by `scale`, and by what sinks leave of the softmax whose LSEs without them are `out_lse`; in place.

        The factor is float32, so that the output is rounded once.
        """
        if out_lse is not None and self.sinks is not None:
            output.mul_((torch.sigmoid(out_lse - self.sinks.float()) * scale)[..., None])
        elif scale != 1.0:
            output.mul_(scale)

    def _fill_padding(self, output: torch.Tensor, lse: torch.Tensor | None, metadata: FlashAttnMetadata) -> None:
        """Kernels run without padding, but in a graph, where padded rows have no keys and get zeros from them."""
        live = metadata.rows.num_tokens
        if live < metadata.num_tokens:
            output[live:].zero_()
            if lse is not None:
                lse[live:].fill_(-math.inf)

"""One layer: write the new keys, attend, join what was attended in parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from attn_backends.backends.flash_attn.call import LayerConstants, Tensors
from attn_backends.backends.flash_attn.state import FlashAttnStep
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionImpl
from attn_backends.interface.refusals import missing_keys
from attn_backends.kernels.merge_state import add_sinks, merge
from attn_backends.spec import FP8_DTYPES


class FlashAttnImpl(AttentionImpl[FlashAttnStep]):
    """Kernels that take sinks take them in bfloat16. Sinks that are not exact there, or that a kernel does not take,
    join behind it, from the LSE.

    Kernels take `k_scale` and `v_scale` over fp8 caches alone. Over others the scale of the softmax holds `k_scale`,
    and outputs are multiplied by `v_scale`, where keys are read from the cache. Keys of this step are as they came.
    """

    step_cls = FlashAttnStep

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

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: FlashAttnStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        spec, is_cached = self.spec, step.calls[0].rows.page_table is not None
        given = kv_cache
        if not is_cached:
            live = step.metadata.rows.num_tokens  # tiles reach behind a row: padding must not stand there
            given = None if key is None or value is None else KVCache(key[:live], value[:live])
        if given is None:
            raise missing_keys(reads_cache=is_cached)
        constants = self.constants[is_cached]
        adds_sinks = spec.sinks and (constants.sinks is None or spec.num_qo_heads > step.provider.max_sinks)
        if adds_sinks:
            constants = self.constants_behind[is_cached]
        want_lse = lse is not None or adds_sinks or step.prefix is not None
        for call in step.calls:
            out = output[call.tokens]
            tensors = Tensors(query[call.tokens], *given, out)
            kernel_lse = step.provider.attend(tensors, call, constants, want_lse)
            scale = self.value_scales[is_cached]
            if kernel_lse is None:
                _scale(out, scale)
                continue
            # FlashAttention 2 has +inf for rows without keys.
            kernel_lse = kernel_lse.masked_fill(kernel_lse == math.inf, -math.inf)
            if step.prefix is not None and call is step.calls[0]:
                shared = torch.empty_like(out)
                tensors = Tensors(query[step.prefix.tokens], *given, shared)
                shared_lse = step.provider.attend(tensors, step.prefix, self.prefix_constants, True)
                assert shared_lse is not None
                merge(out, kernel_lse, shared, shared_lse)
            if adds_sinks and self.sinks is not None:
                add_sinks(out, kernel_lse, self.sinks, scale=scale, want_lse=lse is not None)
            else:
                _scale(out, scale)
            if lse is not None:
                lse[call.tokens] = kernel_lse


def _scale(output: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        output.mul_(scale)

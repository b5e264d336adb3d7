"""One layer of FLASHMLA."""

from __future__ import annotations

import math
from typing import Any

import torch

from attn_backends.backends.mla.flashmla.library import FP8, Kernels
from attn_backends.backends.mla.impl import LatentTensors, MLAImpl
from attn_backends.backends.mla.state import MLAStep
from attn_backends.cache.kv_cache import quantise


class FlashMLAImpl(MLAImpl):
    """Over latents of fp8 the queries are rounded to fp8 too, after absorption and as they are: with a scale of 1."""

    zeroes_idle_rows = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        query_scale, latent_scale = torch.tensor([[1.0], [self.k_scale]], dtype=torch.float32, device=self.device)
        self._descales = query_scale, latent_scale

    def _decode(self, given: LatentTensors, step: MLAStep) -> None:
        query, latent_cache, output, lse = given
        rows, schedule = step.metadata.decode, step.plan
        assert rows is not None  # there is something to decode
        kernels: Kernels = schedule.kernels
        scale, descales = self.spec.scale * self.k_scale, None
        if latent_cache.dtype is FP8:
            query, scale, descales = quantise(query, FP8, 1.0), self.spec.scale, self._descales
        planned = rows.page_table, schedule.seq_lens(rows), schedule.of(self)
        kernel_lse = kernels.run(query, latent_cache, *planned, scale, output, descales)
        if descales is None and self.k_scale != 1.0:
            output.mul_(self.k_scale)
        if lse is not None:
            lse.copy_(kernel_lse.transpose(1, 2))
            lse.masked_fill_(lse == math.inf, -math.inf)
        if rows.idle is not None and not schedule.zeroes_idle_rows:
            idle = rows.idle.view(rows.num_rows, rows.query_len, 1)
            output.masked_fill_(idle[..., None], 0)
            if lse is not None:
                lse.masked_fill_(idle, -math.inf)

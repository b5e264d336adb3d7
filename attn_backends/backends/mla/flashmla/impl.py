"""One layer of FLASHMLA."""

from __future__ import annotations

import math

import torch

from attn_backends.backends.mla.impl import MLAImpl
from attn_backends.backends.mla.state import MLAStep


class FlashMLAImpl(MLAImpl):
    zeroes_idle_rows = True

    def _decode(
        self,
        query: torch.Tensor,
        latent_cache: torch.Tensor,
        step: MLAStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        rows, schedule = step.metadata.decode, step.plan
        assert rows is not None  # there is something to decode
        scale = self.spec.scale * self.k_scale
        kernel_lse = schedule.kernels.run(query, latent_cache, rows, schedule.of(self), scale, output)
        if self.k_scale != 1.0:
            output.mul_(self.k_scale)
        if lse is not None:
            lse.copy_(kernel_lse.transpose(1, 2))
            lse.masked_fill_(lse == math.inf, -math.inf)

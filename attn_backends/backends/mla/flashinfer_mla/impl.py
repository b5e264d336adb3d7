"""One layer of FLASHINFER_MLA."""

from __future__ import annotations

import math

from attn_backends.backends.mla.impl import LatentTensors, MLAImpl
from attn_backends.backends.mla.state import MLAStep


class FlashInferMLAImpl(MLAImpl):
    zeroes_idle_rows = True

    def _decode(self, given: LatentTensors, step: MLAStep) -> None:
        query, latent_cache, output, lse = given
        flat_lse = None if lse is None else lse.flatten(0, 1)
        scale = self.spec.scale * self.k_scale
        step.plan.run(query.flatten(0, 1), latent_cache, scale, output.flatten(0, 1), flat_lse)
        if self.k_scale != 1.0:
            output.mul_(self.k_scale)
        if lse is not None:
            lse.mul_(math.log(2))

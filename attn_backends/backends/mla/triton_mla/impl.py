"""One layer of TRITON_MLA."""

from __future__ import annotations

from attn_backends.backends.mla.impl import LatentTensors, MLAImpl
from attn_backends.backends.mla.state import MLAStep
from attn_backends.backends.mla.triton_mla.launch import launch_decode


class TritonMLAImpl(MLAImpl):
    zeroes_idle_rows = True

    def _decode(self, given: LatentTensors, step: MLAStep) -> None:
        query, latent_cache, output, lse = given
        split, rows = step.plan, step.metadata.decode
        assert rows is not None  # as there are rows to decode
        launch_decode(self.spec, self.k_scale, query, latent_cache, output, lse, rows.page_table, split,
                      rows.query_len)  # fmt: skip

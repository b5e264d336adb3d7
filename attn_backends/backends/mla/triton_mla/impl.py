"""One layer of TRITON_MLA."""

from __future__ import annotations

from attn_backends.backends.mla.impl import LatentTensors, MLAImpl
from attn_backends.backends.mla.state import MLAStep
from attn_backends.backends.mla.triton_mla.launch import launch_decode


class TritonMLAImpl(MLAImpl):
    zeroes_idle_rows = True
    starts_early = True

    def _decode(self, given: LatentTensors, step: MLAStep) -> None:
        assert step.metadata.decode is not None  # as there are rows to decode
        launch_decode(self.spec, self.k_scale, given, step.metadata.decode.page_table, step.plan)

"""One layer of FLASH_ATTN_MLA."""

from __future__ import annotations

from attn_backends.backends.mla.flash_attn_mla.library import DecodeCall, DecodeTensors
from attn_backends.backends.mla.impl import LatentTensors, MLAImpl
from attn_backends.backends.mla.state import MLAStep


class FlashAttnMLAImpl(MLAImpl):
    zeroes_idle_rows = True

    def _decode(self, given: LatentTensors, step: MLAStep) -> None:
        query, latent_cache, output, lse = given
        spec = self.spec
        q_nope, q_pe = query.flatten(0, 1).split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        latent, rope = latent_cache.unsqueeze(2).split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        call: DecodeCall = step.plan
        scale = spec.scale * self.k_scale
        tensors = DecodeTensors(q_pe, q_nope, rope, latent, output.flatten(0, 1))
        kernel_lse = call.kernels.decode(tensors, scale, call)
        if self.k_scale != 1.0:
            output.mul_(self.k_scale)
        if lse is not None:
            lse.flatten(0, 1).copy_(kernel_lse.t())

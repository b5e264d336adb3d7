"""One layer of FLASH_ATTN_MLA."""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.backends.mla.flash_attn_mla.library import DecodeCall, Kernels
from attn_backends.backends.mla.impl import MLAImpl
from attn_backends.backends.mla.metadata import RaggedRows
from attn_backends.backends.mla.state import MLAStep


class FlashAttnMLAImpl(MLAImpl):
    zeroes_idle_rows = True

    def _decode(
        self,
        query: torch.Tensor,
        latent_cache: torch.Tensor,
        step: MLAStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        spec = self.spec
        q_nope, q_pe = query.flatten(0, 1).split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        latent, rope = latent_cache.unsqueeze(2).split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        call: DecodeCall = step.plan
        scale = spec.scale * self.k_scale
        kernel_lse = call.kernels.decode(q_pe, q_nope, rope, latent, scale, output.flatten(0, 1), call)
        if self.k_scale != 1.0:
            output.mul_(self.k_scale)
        if lse is not None:
            lse.flatten(0, 1).copy_(kernel_lse.t())

    def _prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: RaggedRows,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        plan: Any,
    ) -> None:
        if not isinstance(plan, Kernels):
            super()._prefill(query, key, value, rows, output, lse, plan)
            return
        kernel_lse = plan.prefill(query, key, value, self.spec.scale, output, rows)
        if lse is not None:
            lse.copy_(kernel_lse.t())

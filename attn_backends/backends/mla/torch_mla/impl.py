"""One layer of TORCH_MLA: gather a part's latent rows and attend them in plain torch."""

from __future__ import annotations

from attn_backends.backends.mla.attend import attend
from attn_backends.backends.mla.impl import LatentTensors, MLAImpl
from attn_backends.backends.mla.state import MLAStep


class TorchMLAImpl(MLAImpl):
    def _decode(self, given: LatentTensors, step: MLAStep) -> None:
        """Query heads stand where queries of one head would: all of a token's read the same rows."""
        query, latent_cache, output, lse = given
        for part in step.plan:
            queries = query[part.rows]  # [rows, query_len, num_qo_heads, latent_dim]
            latents = self._gather(latent_cache, part.slots, None).view(len(queries), 1, -1, query.shape[-1])
            keys = latents.expand(-1, queries.shape[1], -1, -1)
            out, part_lse = attend(queries, keys, keys, self.spec.scale, bias=part.bias)
            output[part.rows] = out[..., : self.spec.kv_lora_rank]
            if lse is not None:
                lse[part.rows] = part_lse

"""DeepSeek-V2 and V3 attention modules on the latent cache: what takes their place hands over latent rows.

Transformers' own modules expand every token's keys and values before their attention function is called. These stop at
the latent rows (c after its norm, the shared key after RoPE) and leave `kv_b_proj` to the backend, which absorbs it.
A module is replaced only if the absorbed form agrees with it on random input.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.context import NewTokens
from attn_backends.spec import MLASpec

SERVED = ("DeepseekV2Attention", "DeepseekV3Attention")
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}  # relative; 2e-2 for 16 bits


class LatentAttention(torch.nn.Module):
    """Takes the place of an attention module, with its weights; `attention_context` gets latent rows for k and v."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.num_heads, self.scaling = attention.num_heads, attention.scaling
        self.head_dim, self.head_dim_vo = attention.qk_head_dim, attention.v_head_dim
        self.rank, self.rope_dim = attention.kv_lora_rank, attention.qk_rope_head_dim
        names = ["q_proj"] if attention.q_lora_rank is None else ["q_a_proj", "q_a_layernorm", "q_b_proj"]
        self.query_parts = torch.nn.ModuleList([getattr(attention, name) for name in names])
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = attention.kv_a_proj_with_mqa, attention.kv_a_layernorm
        self.kv_b_proj = attention.kv_b_proj.weight  # [num_heads * (qk_nope_head_dim + v_head_dim), rank]
        self.o_proj = attention.o_proj
        self._rotate = _rotation(attention)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden]
        *,
        position_embeddings: Any,
        attention_context: Any = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_context is None:
            raise RuntimeError("this model was loaded for attn_backends' engine: run it with attn_backends.LLM")
        query = hidden_states
        for part in self.query_parts:
            query = part(query)
        query = query.unflatten(-1, (self.num_heads, self.head_dim))  # [1, num_tokens, num_heads, head_dim]
        latent, rope_key = self.kv_a_proj_with_mqa(hidden_states).split([self.rank, self.rope_dim], dim=-1)
        nope, rope_query = query.split([self.head_dim - self.rope_dim, self.rope_dim], dim=-1)
        rope_query, rope_key = self._rotate(rope_query.transpose(1, 2), rope_key[:, None], position_embeddings)
        query = torch.cat([nope, rope_query.transpose(1, 2)], dim=-1)[0]
        latent = self.kv_a_layernorm(latent)[0]
        attended = attention_context.attend(self, (query, latent, rope_key[0, 0]), {"scaling": self.scaling})
        return self.o_proj(attended.flatten(1))[None], None

    def spec(self, dtype: torch.dtype) -> MLASpec:
        return MLASpec(
            num_qo_heads=self.num_heads,
            head_dim=self.head_dim,
            head_dim_vo=self.head_dim_vo,
            scale=self.scaling,
            kv_lora_rank=self.rank,
            qk_rope_head_dim=self.rope_dim,
            dtype=dtype,
        )


def use_latent_attention(model: Any) -> int:
    """Replace the model's DeepSeek attention modules; returns how many there were.

    Raises:
        ModelError: the absorbed form of a module does not agree with it, or its `kv_b_proj` has no plain weight.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in SERVED:
                weight = child.kv_b_proj.weight
                if not weight.is_floating_point() or weight.itemsize < 2 or not weight.is_contiguous():
                    raise ModelError(
                        f"kv_b_proj of layer {child.layer_idx} is {weight.dtype}: load the model without quantisation"
                    )
                latent = LatentAttention(child).train(child.training)
                if weight.device.type != "meta":
                    _check(child, latent, model.base_model.rotary_emb)
                setattr(parent, name, latent)
                replaced += 1
    return replaced


def _rotation(attention: Any) -> Any:
    """RoPE as the model's own code has it: (q [1, H, T, D], k [1, 1, T, D], position_embeddings) to both, rotated."""
    code = sys.modules[type(attention).__module__]
    if type(attention).__name__ == "DeepseekV2Attention":
        return code.apply_rotary_emb
    rotate = code.apply_rotary_pos_emb_interleave if attention.config.rope_interleave else code.apply_rotary_pos_emb
    return lambda query, key, angles: rotate(query, key, *angles)


class _Causal:
    """Plain causal attention, in float32 or wider: of expanded keys as they come, of latent rows in absorbed form."""

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        query, key, value = new
        work = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (tensor.to(work) for tensor in (query, key, value))
        if isinstance(module, LatentAttention):
            weight = module.kv_b_proj.to(work).view(module.num_heads, -1, module.rank)
            w_uk, w_uv = weight.split([module.head_dim - module.rope_dim, module.head_dim_vo], dim=1)
            nope, rope = q.split([w_uk.shape[1], module.rope_dim], dim=-1)
            q = torch.cat([torch.einsum("thd,hdc->thc", nope, w_uk), rope], dim=-1)
            k, v = torch.cat([k, v], dim=-1)[:, None].expand(-1, module.num_heads, -1), k[:, None]
            v = v.expand(-1, module.num_heads, -1)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=constants["scaling"])[0].transpose(0, 1)
        if isinstance(module, LatentAttention):
            out = torch.einsum("thc,hdc->thd", out, w_uv)
        return out.to(query.dtype)


def _check(attention: Any, latent: LatentAttention, rotary: Any) -> None:
    weight = attention.kv_a_proj_with_mqa.weight
    generator = torch.Generator().manual_seed(0)
    shape = (1, 5, weight.shape[1])
    hidden = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(weight)
    angles = rotary(hidden, torch.arange(3, 8, device=weight.device)[None])
    given = {"position_embeddings": angles, "attention_mask": None, "attention_context": _Causal()}
    with torch.inference_mode():
        expected, got = attention(hidden, **given)[0], latent(hidden, **given)[0]
    error = float((got - expected).float().norm() / expected.float().norm())
    allowed = TOLERANCES.get(weight.dtype, 2e-2)
    if not error < allowed:
        raise ModelError(
            f"attention of layer {attention.layer_idx} on latent rows is off by {error:.1e} (allowed {allowed:.0e}): "
            "this version of transformers computes it in another way"
        )

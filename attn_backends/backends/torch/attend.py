"""Attention in plain torch, with its LSE: fused where torch has it, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn_backends.kernels.merge_state import add_sinks, merge_in_torch
from attn_backends.spec import AttentionSpec


@dataclass(frozen=True)
class Attended:
    """An attention result, by [B, query_len] or flat over tokens."""

    output: torch.Tensor  # [..., num_qo_heads, head_dim_vo]
    lse: torch.Tensor | None  # [..., num_qo_heads] f32 or f64

    def flat(self) -> Attended:
        return Attended(self.output.flatten(0, 1), None if self.lse is None else self.lse.flatten(0, 1))

    def of(self, live: torch.Tensor | None) -> Attended:
        """The same with zeros in the flat tokens that are not live: they saw no key, and hold NaN. None: all are."""
        if live is None:
            return self
        lse = None if self.lse is None else self.lse.masked_fill(~live[:, None], float("-inf"))
        return Attended(self.output.masked_fill(~live[:, None, None], 0), lse)


flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # what SDPA runs on a CPU, with its LSE


def gives_lse(device: torch.device, spec: AttentionSpec) -> bool:
    """Whether a fused kernel returns the LSE too."""
    return device.type == "cpu" and spec.head_dim == spec.head_dim_vo and spec.logits_soft_cap is None


def can_add(bias: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether fused kernels add such a bias to logits of such queries: a GPU's want both to have one dtype."""
    return bias.dtype == query.dtype or query.device.type == "cpu"


def unfolded(out: torch.Tensor, lse: torch.Tensor | None, query: torch.Tensor) -> Attended:
    """[B, Hkv, query_len · G, Dv] and [B, Hkv, query_len · G], by query token and head."""
    batch, query_len, num_heads = query.shape[:3]
    out = out.unflatten(2, (query_len, -1)).transpose(1, 2).reshape(batch, query_len, num_heads, -1)
    if lse is not None:
        lse = lse.unflatten(2, (query_len, -1)).transpose(1, 2).reshape(batch, query_len, num_heads)
    return Attended(out, lse)


def sink(attended: Attended, sinks: torch.Tensor | None) -> Attended:
    """The same, with sinks in the softmax, in place."""
    if sinks is not None and attended.lse is not None:
        add_sinks(attended.output, attended.lse, sinks)
    return attended


def attend_by_hand(
    query: torch.Tensor,  # [B, Hkv, G, query_len, D]
    key: torch.Tensor,  # [B, Hkv, num_keys, D]
    value: torch.Tensor,  # [B, Hkv, num_keys, Dv]
    bias: torch.Tensor | None,
    is_causal: bool,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,  # [Hq]
) -> Attended:
    """Attention as in "Attention Is All You Need", eq. 1, with soft cap, bias, sinks and LSE; in float32 or wider."""
    work = torch.promote_types(query.dtype, torch.float32)
    logits = torch.matmul(query.to(work), key.to(work).mT[:, :, None]) * spec.scale  # [B, Hkv, G, query_len, num_keys]
    if spec.logits_soft_cap is not None:
        logits = torch.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
    if bias is not None:
        logits = logits + bias
    if is_causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    lse = logits.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(work).view(spec.num_kv_heads, spec.group_size, 1))
    out = torch.matmul((logits - lse[..., None]).exp(), value.to(work)[:, :, None])
    return Attended(out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype), lse.permute(0, 3, 1, 2).flatten(2, 3))


def join(attended: Attended, shared: Attended | None, tokens: slice) -> Attended:
    """The same, joined with some tokens of attention over a disjoint set of keys, in place."""
    if shared is not None and shared.lse is not None and attended.lse is not None:
        merge_in_torch(attended.output, attended.lse, shared.output[0, tokens], shared.lse[0, tokens])
    return attended


def join_pieces(
    outs: torch.Tensor,  # [num_pieces, Hkv, G, Dv]
    lses: torch.Tensor,  # [num_pieces, Hkv, G] f32 or f64, overwritten
    owners: torch.Tensor,  # [num_pieces] i64: the row of each
    shape: Sequence[int],  # [num_rows, Hkv, G, _]
) -> Attended:
    """Rows joined of any number of pieces each, of which one weighs exp(its LSE). Not `merge_state`: it joins two."""
    m_max = lses.new_full(tuple(shape[:3]), float("-inf"))
    m_max.scatter_reduce_(0, owners[:, None, None].expand_as(lses), lses, "amax")
    weights = lses.sub_(m_max.index_select(0, owners)).exp_()
    l_sum = torch.zeros_like(m_max).index_add_(0, owners, weights)
    out = l_sum.new_zeros(*shape[:3], outs.shape[-1]).index_add_(
        0, owners, outs.to(lses.dtype).mul_(weights[..., None])
    )
    out = (out / l_sum[..., None]).to(outs.dtype)
    return Attended(out.flatten(1, 2), (m_max + l_sum.log()).flatten(1, 2))

"""The oracle: attention in float64, unpaged, one query after the other. It shares no code with any backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_backends.mla_spec import MLASpec
from attn_backends.spec import AttentionSpec, AttentionType


def reference_attention(
    query: torch.Tensor,  # [Tq, num_qo_heads, head_dim]
    key: torch.Tensor,  # [Tk, num_kv_heads, head_dim]
    value: torch.Tensor,  # [Tk, num_kv_heads, head_dim_vo]
    spec: AttentionSpec,
    *,
    context_len: int | None = None,
    query_positions: Sequence[int] | None = None,
    sinks: torch.Tensor | None = None,  # [num_qo_heads]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request, computed on the CPU.

    For query head h, query position i and key position j, with k and v of KV head `h // group_size`:

        logit_ij = scale · q_i·k_j                      (Vaswani et al. 2017, eq. 1)
        logit_ij = cap · tanh(logit_ij / cap)           if logits_soft_cap (Gemma 2, arXiv 2408.00118, section 2)
        logit_ij = logit_ij + slope_h · (j - i)         if alibi_slopes (Press et al. 2021, arXiv 2108.12409)
        lse_i    = log(Σ_j exp(logit_ij) + exp(sink_h)) the sink if sinks (gpt-oss; Xiao et al. 2023, arXiv 2309.17453)
        out_i    = Σ_j exp(logit_ij - lse_i) · v_j

    over the keys j that `sees` allows.

    Args:
        context_len: position of the first query; Tk - Tq if neither this nor `query_positions` is given.
        query_positions: position of each query, one by one, instead.

    Returns:
        out [Tq, num_qo_heads, head_dim_vo] f64 and lse [Tq, num_qo_heads] f64, natural log. A query that sees no key
        has an output of zeros and an lse of -inf.
    """
    if (sinks is not None) != spec.sinks:
        raise ValueError(f"sinks are {'given' if sinks is not None else 'missing'} where spec.sinks is {spec.sinks}")
    num_queries, num_keys = query.shape[0], key.shape[0]
    if query_positions is None:
        first = num_keys - num_queries if context_len is None else context_len
        query_positions = range(first, first + num_queries)
    query, key, value = (tensor.detach().to("cpu", torch.float64) for tensor in (query, key, value))
    key, value = (of.repeat_interleave(spec.group_size, dim=1) for of in (key, value))  # as each query head reads them
    out = torch.zeros(num_queries, spec.num_qo_heads, spec.head_dim_vo, dtype=torch.float64)
    lse = torch.full((num_queries, spec.num_qo_heads), -torch.inf, dtype=torch.float64)
    for i, position in enumerate(query_positions):
        seen = sees(spec, position, torch.arange(num_keys)).nonzero().flatten()
        if not len(seen):
            continue
        logits = _logits(query[i], key[seen], spec, seen - position)
        terms = logits if sinks is None else torch.cat([logits, sinks.detach().to("cpu", torch.float64)[None]])
        lse[i] = torch.logsumexp(terms, 0)
        out[i] = torch.einsum("jh,jhd->hd", torch.exp(logits - lse[i]), value[seen])
    return out, lse


def reference_mla(
    query: torch.Tensor,  # [Tq, num_qo_heads, head_dim]: q_nope, then q_pe
    latent: torch.Tensor,  # [Tk, kv_lora_rank]
    rope_key: torch.Tensor,  # [Tk, qk_rope_head_dim]
    kv_b_proj: torch.Tensor,  # [num_qo_heads * (qk_nope_head_dim + head_dim_vo), kv_lora_rank]
    spec: MLASpec,
    *,
    context_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention of one request in its expanded form (DeepSeek-V2, arXiv 2405.04434, eq. 9 to 19).

    Head h of token j has the key [W_UK_h c_j, r_j] and the value W_UV_h c_j, with W_UK_h and W_UV_h the head's rows of
    `kv_b_proj`; then it is `reference_attention`, which says what is returned.
    """
    latent, rope_key, weight = (t.detach().to("cpu", torch.float64) for t in (latent, rope_key, kv_b_proj))
    heads = weight.view(spec.num_qo_heads, -1, spec.kv_lora_rank)
    keys, values = (
        torch.einsum("jr,hdr->jhd", latent, part)
        for part in heads.split([spec.qk_nope_head_dim, spec.head_dim_vo], dim=1)
    )
    keys = torch.cat([keys, rope_key[:, None].expand(-1, spec.num_qo_heads, -1)], dim=2)
    return reference_attention(query, keys, values, spec, context_len=context_len)


def sees(spec: AttentionSpec, query_position: int, key_positions: torch.Tensor) -> torch.Tensor:
    """Whether the query at one position attends to the keys at others. Cross attention sees every key."""
    seen = torch.ones_like(key_positions, dtype=torch.bool)
    if spec.attention_type is AttentionType.CROSS:
        return seen
    if spec.causal:
        seen &= key_positions <= query_position
    if spec.window_left >= 0:
        seen &= key_positions >= query_position - spec.window_left
    if spec.chunk_size is not None:
        seen &= key_positions // spec.chunk_size == query_position // spec.chunk_size
    return seen


def _logits(
    query: torch.Tensor,  # [num_qo_heads, head_dim]
    keys: torch.Tensor,  # [num_keys, num_qo_heads, head_dim]
    spec: AttentionSpec,
    distances: torch.Tensor,  # [num_keys], of the keys behind the query: negative
) -> torch.Tensor:  # [num_keys, num_qo_heads]
    logits = torch.einsum("jhd,hd->jh", keys, query) * spec.scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
    if spec.alibi_slopes is not None:
        logits = logits + distances[:, None] * torch.tensor(spec.alibi_slopes, dtype=torch.float64)
    return logits

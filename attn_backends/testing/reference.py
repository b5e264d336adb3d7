"""The oracle: attention in float64, unpaged, in plain loops. It shares no code with any backend."""

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
    out = torch.zeros(num_queries, spec.num_qo_heads, spec.head_dim_vo, dtype=torch.float64)
    lse = torch.full((num_queries, spec.num_qo_heads), -torch.inf, dtype=torch.float64)
    for i, position in enumerate(query_positions):
        seen = [j for j in range(num_keys) if sees(spec, position, j)]
        if not seen:
            continue
        for head in range(spec.num_qo_heads):
            kv_head = head // spec.group_size
            logits = _logits(query[i, head], key[seen, kv_head], spec, head, position, seen)
            terms = (
                logits if sinks is None else torch.cat([logits, sinks[head].detach().to("cpu", torch.float64)[None]])
            )
            lse[i, head] = torch.logsumexp(terms, 0)
            out[i, head] = torch.exp(logits - lse[i, head]) @ value[seen, kv_head]
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
    nope, width = spec.qk_nope_head_dim, spec.qk_nope_head_dim + spec.head_dim_vo
    keys, values = [], []
    for head in range(spec.num_qo_heads):
        rows = weight[head * width : (head + 1) * width]
        keys.append(torch.cat([latent @ rows[:nope].T, rope_key], dim=1))
        values.append(latent @ rows[nope:].T)
    return reference_attention(query, torch.stack(keys, 1), torch.stack(values, 1), spec, context_len=context_len)


def sees(spec: AttentionSpec, query_position: int, key_position: int) -> bool:
    """Whether the query at one position attends to the key at another. Cross attention sees every key."""
    if spec.attention_type is AttentionType.CROSS:
        return True
    if spec.causal and key_position > query_position:
        return False
    if spec.window_left >= 0 and key_position < query_position - spec.window_left:
        return False
    return spec.chunk_size is None or key_position // spec.chunk_size == query_position // spec.chunk_size


def _logits(
    query: torch.Tensor,  # [head_dim]
    keys: torch.Tensor,  # [len(seen), head_dim]
    spec: AttentionSpec,
    head: int,
    position: int,
    seen: Sequence[int],
) -> torch.Tensor:  # [len(seen)]
    logits = (keys @ query) * spec.scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
    if spec.alibi_slopes is not None:
        distances = torch.tensor([j - position for j in seen], dtype=torch.float64)
        logits = logits + spec.alibi_slopes[head] * distances
    return logits

"""The oracle: attention in float64, unpaged, one request at a time. It shares no code with any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attn_backends.spec import AttentionSpec, AttentionType, MLASpec

_LOGITS_AT_ONCE = 1 << 22  # 32 MB in float64
_EXPANDED_AT_ONCE = 1 << 24  # numbers of the keys and values that latent rows are expanded to: 128 MB in float64


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
    """Attention of one request, computed on the device of its queries.

    For query head h, query position i and key position j, with k and v of KV head `h // group_size`:

        q_i, k_j = rotated(q_i, i), rotated(k_j, j)     if pos_encoding_mode is ROPE_LLAMA
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
    first, on = num_keys - num_queries if context_len is None else context_len, query.device
    order = list(query_positions or range(first, first + num_queries))
    positions = torch.tensor(order, dtype=torch.int64, device=on)
    query, key, value = (tensor.detach().to(on, torch.float64) for tensor in (query, key, value))
    sinks = None if sinks is None else sinks.detach().to(on, torch.float64)
    query, key = rotated(query, positions, spec), rotated(key, torch.arange(num_keys, device=on), spec)
    out = torch.zeros(num_queries, spec.num_qo_heads, spec.head_dim_vo, dtype=torch.float64, device=on)
    lse = torch.full((num_queries, spec.num_qo_heads), -torch.inf, dtype=torch.float64, device=on)
    at_once = max(1, _LOGITS_AT_ONCE // (max(1, num_keys) * spec.num_qo_heads))
    for start in range(0, num_queries if num_keys else 0, at_once):
        part = slice(start, start + at_once)
        out[part], lse[part] = _attend(query[part], key, value, spec, positions[part], sinks)
    return out, lse


def _attend(
    query: torch.Tensor,  # [queries, num_qo_heads, head_dim] f64
    key: torch.Tensor,  # [keys, num_kv_heads, head_dim] f64
    value: torch.Tensor,  # [keys, num_kv_heads, head_dim_vo] f64
    spec: AttentionSpec,
    positions: torch.Tensor,  # [queries] i64
    sinks: torch.Tensor | None,  # [num_qo_heads] f64
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_attention` of some queries, all of whose logits fit into memory."""
    num_queries, keys = len(query), torch.arange(len(key), device=key.device)
    seen = sees(spec, positions[:, None], keys[None])  # [queries, keys]
    logits = _logits(query, key, spec, keys[None] - positions[:, None])  # [num_qo_heads, queries, keys]
    logits.masked_fill_(~seen, -torch.inf)
    lse = torch.logsumexp(logits, 2)
    if sinks is not None:
        lse = torch.where(seen.any(1), torch.logaddexp(lse, sinks[:, None]), -torch.inf)
    weights = torch.exp(logits - lse.clamp_min(torch.finfo(torch.float64).min)[:, :, None])
    grouped = weights.view(spec.num_kv_heads, -1, len(key))  # as each query head reads them
    out = torch.matmul(grouped, value.transpose(0, 1)).view(spec.num_qo_heads, num_queries, spec.head_dim_vo)
    return out.transpose(0, 1), lse.T


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
    on = query.device
    latent, rope_key, weight = (t.detach().to(on, torch.float64) for t in (latent, rope_key, kv_b_proj))
    heads = weight.view(spec.num_qo_heads, -1, spec.kv_lora_rank)
    at_once = max(1, _EXPANDED_AT_ONCE // (max(1, len(latent)) * (spec.head_dim + spec.head_dim_vo)))
    parts = []
    for first in range(0, spec.num_qo_heads, at_once):
        some = slice(first, min(first + at_once, spec.num_qo_heads))
        count = some.stop - some.start
        expanded = torch.matmul(latent, heads[some].flatten(0, 1).T).view(len(latent), count, -1)
        keys, values = expanded.split([spec.qk_nope_head_dim, spec.head_dim_vo], dim=2)
        keys = torch.cat([keys, rope_key[:, None].expand(-1, count, -1)], dim=2)
        fewer = replace(spec, num_qo_heads=count, num_kv_heads=count)
        parts.append(reference_attention(query[:, some], keys, values, fewer, context_len=context_len))
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=1)


def rotated(heads: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864) of [tokens, heads, head_dim] f64 at `positions` [tokens].

    Pairs are those of Llama in Hugging Face's weights, and of FlashInfer's kernels: number i with i + head_dim / 2,
    which turn by position / rope_scale · rope_theta ** (-2i / head_dim). A layer that rotates nothing gets them back.
    """
    if spec.pos_encoding_mode == "NONE":
        return heads
    half = spec.head_dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=heads.device) * (-2.0 / spec.head_dim)
    angles = (positions.double() / spec.rope_scale)[:, None] * spec.rope_theta**exponents
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def sees(spec: AttentionSpec, query_positions: int | torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """Whether queries attend to keys, by their positions, which are broadcast. Cross attention sees every key."""
    seen = torch.ones_like(key_positions - query_positions, dtype=torch.bool)
    if spec.attention_type is AttentionType.CROSS:
        return seen
    if spec.causal:
        seen &= key_positions <= query_positions
    if spec.window_left >= 0:
        seen &= key_positions >= query_positions - spec.window_left
    if spec.chunk_size is not None:
        seen &= key_positions // spec.chunk_size == query_positions // spec.chunk_size
    return seen


def _logits(
    query: torch.Tensor,  # [queries, num_qo_heads, head_dim]
    key: torch.Tensor,  # [keys, num_kv_heads, head_dim]
    spec: AttentionSpec,
    distances: torch.Tensor,  # [queries, keys], of the keys behind the query: negative
) -> torch.Tensor:  # [num_qo_heads, queries, keys]
    num_queries = len(query)
    grouped = query.transpose(0, 1).reshape(spec.num_kv_heads, -1, spec.head_dim)
    logits = torch.matmul(grouped, key.permute(1, 2, 0)).mul_(spec.scale)
    logits = logits.view(spec.num_qo_heads, num_queries, len(key))
    if spec.logits_soft_cap is not None:
        logits = logits.div_(spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float64, device=query.device)
        logits = logits.addcmul_(slopes[:, None, None], distances.to(torch.float64)[None])
    return logits

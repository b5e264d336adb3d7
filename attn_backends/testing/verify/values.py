"""Which declared values a case has: one row for each layer and each kind of batch, as each such pair runs together."""

from __future__ import annotations

from typing import Any

from attn_backends.spec import AttentionSpec, AttentionType, MLASpec, dtype_name
from attn_backends.testing.cases.batches import is_power_of_two
from attn_backends.testing.verify.cases import Case, Episode
from attn_backends.testing.verify.factors import EAGER, GRAPH, MIXED_GRAPH, WIDE_GRAPH, Factors


def values_of(case: Case, factors: Factors, in_graph: bool) -> list[dict[str, Any]]:
    """The values of a case, without those that are not among the factors'.

    Args:
        in_graph: whether its steps ran in a graph; a case that asks for one runs eager where a batch does not fit it.
    """
    rows = []
    for spec, scales in zip(case.form.specs, case.form.scales, strict=True):
        for episode in case.episodes:
            found = _of_layer(spec) | _of_case(case, episode, scales, in_graph)
            row = {name: found[name] for name, values in factors.items() if found.get(name) in values}
            if row not in rows:
                rows.append(row)
    return rows


def _of_layer(spec: AttentionSpec) -> dict[str, Any]:
    found: dict[str, Any] = {
        "dtype": dtype_name(spec.dtype),
        "cache_dtype": dtype_name(spec.cache_dtype),
        "head_dim": spec.head_dim,
        "head_dim_vo": _compared(spec.head_dim_vo, spec.head_dim),
        "num_qo_heads": spec.num_qo_heads,
        "group": spec.group_size,
        "attention_type": spec.attention_type.value,
        "window": _limit(spec.window_left if spec.window_left >= 0 else None, 0),
        "chunks": _limit(spec.chunk_size, 1),
        "soft_cap": _switch(spec.logits_soft_cap is not None),
        "alibi": _switch(spec.alibi_slopes is not None),
        "rope": _rope(spec),
        "sinks": _switch(spec.sinks),
        "scale": "not above 0" if spec.scale <= 0 else "default" if spec.scale == spec.head_dim**-0.5 else "other",
    }
    if spec.attention_type is AttentionType.DECODER:
        found["non_causal"] = _switch(not spec.causal)
    if isinstance(spec, MLASpec):
        rope = spec.qk_rope_head_dim
        found |= {"kv_lora_rank": spec.kv_lora_rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": spec.head_dim - rope}
    return found


def _of_case(case: Case, episode: Episode, scales: tuple[float, float], in_graph: bool) -> dict[str, Any]:
    longest = max(max(lens) for lens in episode.steps)
    return {
        "page_size": case.form.page_size,
        "layout": case.form.layout,
        "interleaved": _switch(case.form.interleaved),
        "kv_scales": _scales(scales),
        "lse": _switch(case.want_lse),
        "kind": kind_of(episode),
        "run": _run_of(case, longest) if in_graph else EAGER,
    }


def _run_of(case: Case, longest: int) -> str:
    """The graph of a case, of whose rows one has so many query tokens at most."""
    if case.mixed_tokens:
        return MIXED_GRAPH
    return GRAPH if longest == 1 else WIDE_GRAPH


def kind_of(episode: Episode) -> str | None:
    """What a batch is by its lengths, as it may have been made smaller than its name; None: of no kind of its own."""
    first, rows = episode.steps[0], len(episode.contexts)
    is_kind = {
        "decode": max(first) == 1,
        "verify": min(first) > 1 and len(set(first)) == 1,
        "chunk": max(first) > 1,
        "mixed": min(first) == 1 and max(first) > 1,
        "skewed": rows > 1 and max(episode.contexts) > 2 * min(episode.contexts),
        "prefix": rows > 1 and episode.shared_len > 0,
        "prompts": max(first) > 1,
        "profile": max(first) > 1,
    }
    if not is_kind.get(episode.kind, False):
        return None
    return "told prefix" if episode.kind == "prefix" and episode.hint else episode.kind


def _rope(spec: AttentionSpec) -> str:
    if spec.pos_encoding_mode == "NONE":
        return "off"
    return "on" if (spec.rope_scale, spec.rope_theta) == (1.0, 1e4) else "scaled"


def _compared(head_dim_vo: int, head_dim: int) -> str:
    if head_dim_vo == head_dim:
        return "same"
    return "smaller" if head_dim_vo < head_dim else "larger"


def _limit(value: int | None, least: int) -> str:
    return "off" if value is None else str(least) if value == least else "on"


def _switch(is_on: bool) -> str:
    return "on" if is_on else "off"


def _scales(scales: tuple[float, float]) -> str:
    if scales == (1.0, 1.0):
        return "1"
    return "powers of 2" if all(map(is_power_of_two, scales)) else "others"

"""What a layer can ask of attention beyond the plain case: a table of changes and the capabilities they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attn_backends.spec import AttentionType, alibi_slopes


@dataclass(frozen=True)
class Feature:
    """Changes to a plain layer. `needs` are names of `Capabilities` flags, which are also the codes of refusals."""

    name: str
    needs: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    alibi: bool | Literal["standard"] = False

    def spec_changes(self, num_qo_heads: int) -> dict[str, Any]:
        """Arguments of `AttentionSpec`, for a layer of so many query heads."""
        slopes = tuple(2.0 ** (-0.5 * head) for head in range(num_qo_heads))
        if self.alibi == "standard":
            slopes = alibi_slopes(num_qo_heads)
        return {**self.changes, **({"alibi_slopes": slopes} if self.alibi else {})}


def _encoder_or_cross(kind: AttentionType) -> dict[str, Any]:
    return {"attention_type": kind, "causal": False}


_ROPE: Mapping[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA"}

FEATURES = (
    Feature("plain"),
    Feature("scale", changes={"scale": 0.3}),
    Feature("window_0", ("window",), {"window_left": 0}),
    Feature("window_1", ("window",), {"window_left": 1}),
    Feature("window_15", ("window",), {"window_left": 15}),
    Feature("window_16", ("window",), {"window_left": 16}),
    Feature("window_300", ("window",), {"window_left": 300}),
    Feature("soft_cap", ("soft_cap",), {"logits_soft_cap": 1.5}),
    Feature("alibi", ("alibi",), alibi=True),
    Feature("sinks", ("sinks",), {"sinks": True}),
    Feature("chunks", ("chunks",), {"chunk_size": 8}),
    Feature("chunks_24", ("chunks",), {"chunk_size": 24}),
    Feature("non_causal", ("non_causal",), {"causal": False}),
    Feature("non_causal_window", ("non_causal", "window"), {"causal": False, "window_left": 5}),
    Feature("non_causal_chunks", ("non_causal", "chunks"), {"causal": False, "chunk_size": 100}),
    Feature("gemma2", ("window", "soft_cap"), {"window_left": 20, "logits_soft_cap": 2.0, "scale": 0.2}),
    Feature("gpt_oss", ("window", "sinks"), {"window_left": 20, "sinks": True}),
    Feature("soft_cap_and_sinks", ("soft_cap", "sinks"), {"logits_soft_cap": 1.5, "sinks": True}),
    Feature("alibi_and_window", ("alibi", "window"), {"window_left": 20}, alibi=True),
    Feature("alibi_and_window_300", ("alibi", "window"), {"window_left": 300}, alibi=True),  # wider than most rows
    Feature("alibi_and_soft_cap", ("alibi", "soft_cap"), {"logits_soft_cap": 1.5}, alibi=True),
    Feature("standard_alibi", ("alibi",), alibi="standard"),
    Feature("standard_alibi_and_window", ("alibi", "window"), {"window_left": 20}, alibi="standard"),
    Feature("standard_alibi_and_sinks", ("alibi", "sinks"), {"sinks": True}, alibi="standard"),
    Feature("rope", ("rope",), _ROPE),
    Feature("rope_scaled", ("rope",), {**_ROPE, "rope_scale": 3.0, "rope_theta": 5e5}),
    Feature("rope_and_window", ("rope", "window"), {**_ROPE, "window_left": 20}),
    Feature("rope_soft_cap_and_sinks", ("rope", "soft_cap", "sinks"), {**_ROPE, "logits_soft_cap": 1.5, "sinks": True}),
    Feature("rope_non_causal", ("rope", "non_causal"), {**_ROPE, "causal": False}),
)
ENCODER = Feature("encoder", ("attention_type",), _encoder_or_cross(AttentionType.ENCODER))
NON_CAUSAL_ALIBI = Feature("non_causal_alibi", ("alibi", "non_causal"), {"causal": False}, alibi=True)
CROSS = Feature("cross", ("attention_type",), _encoder_or_cross(AttentionType.CROSS))


def feature(name: str) -> Feature:
    return next(f for f in (*FEATURES, ENCODER, CROSS) if f.name == name)

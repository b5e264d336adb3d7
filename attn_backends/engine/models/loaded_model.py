"""`LoadedModel`: the one door between the engine and a model whose attention layers call ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attn_backends.engine.models.context import AttentionContext
from attn_backends.spec import AttentionSpec


@dataclass(frozen=True)
class LayerProbe:
    """What one attention layer showed in the dry run."""

    spec: AttentionSpec
    sinks: torch.Tensor | None  # [num_qo_heads]
    kv_b_proj: torch.Tensor | None = None  # of MLA, see `MLAImpl`

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What the layer's impl is given of the model's weights."""
        named = {"sinks": self.sinks, "kv_b_proj": self.kv_b_proj}
        return {name: weight for name, weight in named.items() if weight is not None}


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready for the engine."""

    module: torch.nn.Module
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    layers: dict[int, LayerProbe]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    min_tokens: int = 1  # a step of fewer is slower than one padded to this many
    folder: Path | None = None  # where it was read from

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] i64
        positions: torch.Tensor,  # [num_tokens] i64
        logits_at: torch.Tensor,  # [num_logits] i64
        context: AttentionContext,
    ) -> torch.Tensor:  # [num_logits, vocab]
        return run_module(self.module, token_ids, positions, logits_at, context)


def run_module(
    module: Any, token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor, context: AttentionContext
) -> torch.Tensor:
    """`LoadedModel.forward` of a Hugging Face model."""
    logits: torch.Tensor = module(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logits_at,
        attention_context=context,
    ).logits[0]
    return logits

"""Whether an engine's tokens are those that transformers would choose, at the precision of a 16-bit model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attn_backends import LLM, SamplingParams
from tests.helpers.tiny_models import tiny_model

TIE = 1e-3  # of the spread of a router's logits: about what 16 bits leave of them


def assert_best_tokens(
    llm: LLM,
    folder: Path,
    family: str,
    prompts: Sequence[str],
    sampling: SamplingParams,
    *,
    least_same: float = 0.95,
    **changes: Any,
) -> None:
    """Every token is one that transformers finds best, or as good as best at this precision; this part is the best.

    Where two experts are as good as tied, either may be taken: from there on a prompt's tokens tell nothing.
    """
    reference = tiny_model(family, vocab_size=259, **changes)
    asked = {"output_router_logits": True} if hasattr(reference.config, "router_aux_loss_coef") else {}
    reference.load_state_dict(type(reference).from_pretrained(folder).state_dict())
    num_same, num_told = 0, 0
    for output in llm.generate(prompts, sampling):
        prompt = llm.model.tokenizer(output.prompt).input_ids
        with torch.inference_mode():
            out = reference(torch.tensor([[*prompt, *output.token_ids]]), use_cache=False, **asked)
        told = _first_tie(getattr(out, "router_logits", None) or (), reference.config)
        logits = out.logits[0, len(prompt) - 1 : -1][: max(0, told - len(prompt) + 1)]
        chosen = torch.tensor(output.token_ids)[: len(logits)]
        behind = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
        assert bool((behind <= 0.02 * logits.std(-1)).all()), f"{output.prompt!r}: {behind.max():.3f} behind the best"
        num_same += int((logits.argmax(-1) == chosen).sum())
        num_told += len(chosen)
    assert num_told >= 0.8 * len(prompts) * sampling.max_tokens
    assert num_same >= least_same * num_told


def _first_tie(router_logits: Sequence[torch.Tensor], config: Any) -> int:
    """The first position at which the last expert that is taken and the next one are as good as tied in some layer."""
    ties = [len(logits) for logits in router_logits]
    for logits in router_logits:  # [num_tokens, num_experts]
        ranked = logits.sort(-1, descending=True).values
        margins = (ranked[:, config.num_experts_per_tok - 1] - ranked[:, config.num_experts_per_tok]) / logits.std(-1)
        ties += (margins < TIE).nonzero().flatten().tolist()
    return min(ties, default=sys.maxsize)

"""Whether an engine's tokens are those that transformers would choose, at the precision of a 16-bit model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attn_backends import LLM, SamplingParams
from tests.tiny_models import tiny_model


def assert_best_tokens(
    llm: LLM, folder: Path, family: str, prompts: Sequence[str], sampling: SamplingParams, **changes: Any
) -> None:
    """Every token is one that transformers finds best, or as good as best at this precision."""
    reference = tiny_model(family, vocab_size=259, **changes)
    reference.load_state_dict(type(reference).from_pretrained(folder).state_dict())
    num_same = 0
    for output in llm.generate(prompts, sampling):
        prompt = llm.model.tokenizer(output.prompt).input_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *output.token_ids]]), use_cache=False).logits
        logits = logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(output.token_ids)
        behind = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
        assert bool((behind <= 0.02 * logits.std(-1)).all()), f"{output.prompt!r}: {behind.max():.3f} behind the best"
        num_same += int((logits.argmax(-1) == chosen).sum())
    assert num_same >= 0.95 * len(prompts) * sampling.max_tokens

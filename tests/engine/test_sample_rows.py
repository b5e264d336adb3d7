"""Each request has its own tokens, whatever it is batched with: its logits, its parameters, its random numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from attn_backends import LLM, EngineConfig, SamplingParams


def drawn_params(rng: random.Random) -> SamplingParams:
    """Parameters that tell a row from its neighbours."""
    return SamplingParams(
        max_tokens=rng.randint(1, 12),
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_k=rng.choice([None, 3, 40]),
        top_p=rng.choice([0.5, 0.9, 1.0]),
        seed=rng.randrange(1000),
        stop_token_ids=tuple(rng.sample(range(3, 259), 3)),
        ignore_eos=True,
    )


def check_rows(folder: Path, seed: int) -> None:
    """Prompts of all lengths, in chunks beside decodes, preempted and not: what each gives alone."""
    rng = random.Random(seed)
    scheduler = {"max_num_tokens": rng.choice([5, 9, 64]), "max_num_requests": rng.choice([2, 5, 16])}
    scheduler["decode_steps_per_launch"] = rng.choice([1, 3])
    cache = {"page_size": 4, "num_pages": rng.choice([24, 200]), "prefix_caching": False}
    config = {"device": "cpu", "scheduler": scheduler, "cache": cache}
    llm = LLM.from_pretrained(folder, EngineConfig.model_validate(config))
    prompts = [[rng.randrange(3, 259) for _ in range(rng.randint(1, 30))] for _ in range(9)]
    sampling = [drawn_params(rng) for _ in prompts]
    together = [output.token_ids for output in llm.generate(prompts, sampling)]
    alone = [llm.generate([prompt], params)[0].token_ids for prompt, params in zip(prompts, sampling, strict=True)]
    assert together == alone


@pytest.mark.parametrize("seed", range(8))
def test_a_request_gives_what_it_gives_alone(tiny_llama: Path, seed: int) -> None:
    check_rows(tiny_llama, seed)

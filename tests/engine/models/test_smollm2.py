"""Real weights: greedy tokens equal transformers' own `generate`, alone and with everything that could break it on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attn_backends import LLM, EngineConfig, SamplingParams

NEW_TOKENS = 32
OPENING = "The following is a list of short and true sentences, each about one thing, written for children. "
PROMPTS = [
    "Hello",
    "The capital of France is",
    "Once upon a time",
    "2 + 2 =",
    "Water boils at",
    "def fibonacci(n):",
    "The quick brown fox jumps over the lazy dog.",
    "A haiku about the sea:\n",
    "Question: why is the sky blue?\nAnswer:",
    "In 1969, humans first",
    "To bake a loaf of bread you need flour, water, salt and",
    "import numpy as np\n\n# the mean of an array\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are",
    *(OPENING + tail for tail in ("Birds", "The moon", "Rivers run", "Snow is", "A horse")),
    OPENING * 6 + "Trees",
]


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> list[list[int]]:
    """The short prompts together, padded on their left, and the long one alone."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    texts: list[list[int]] = []
    for prompts in (PROMPTS[:-1], PROMPTS[-1:]):
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts += ids[:, inputs.input_ids.shape[1] :].tolist()
    end = tokenizer.eos_token_id  # it is what fills the texts behind their ends, too
    return [text[: text.index(end) + 1] if end in text else text for text in texts]


def generated(llm: LLM, prompts: list[str]) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))]


@pytest.mark.first
@pytest.mark.parametrize("chosen", [slice(0, None, 8), pytest.param(slice(None), marks=pytest.mark.long)], ids=str)
def test_alone(smollm2: Path, expected: list[list[int]], chosen: slice) -> None:
    llm = LLM.from_pretrained(smollm2, EngineConfig(dtype="float32"))
    assert len(PROMPTS) >= 20
    for prompt, tokens in zip(PROMPTS[chosen], expected[chosen], strict=True):
        assert generated(llm, [prompt]) == [tokens], prompt


@pytest.mark.first
def test_batched_with_chunks_prefix_hits_and_preemption(smollm2: Path, expected: list[list[int]]) -> None:
    config = EngineConfig(
        dtype="float32",
        cache={"page_size": 8, "num_pages": 56, "prefix_caching": True},
        scheduler={"max_num_tokens": 40, "max_num_requests": 16, "chunked_prefill": True},
    )
    llm = LLM.from_pretrained(smollm2, config)
    assert generated(llm, PROMPTS) == expected
    assert llm.stats.num_preemptions > 0
    assert llm.stats.num_prefix_hit_tokens > 0
    assert llm.stats.peak_pages <= 56
    assert llm.allocator.num_used == 0

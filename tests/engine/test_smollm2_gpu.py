"""Real weights on a GPU: FLASHINFER through graphs gives the tokens of its eager steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_backends import LLM, EngineConfig, SamplingParams
from tests.engine.test_smollm2 import OPENING, PROMPTS

MANY = [*PROMPTS, *(OPENING + tail for tail in ("Trains", "Bees", "The sun", "Bread", "Glass", "Wind", "A king",
                                               "Cats", "Stones", "Milk", "Paper", "Iron"))][:32]  # fmt: skip
SAMPLING = SamplingParams(max_tokens=64, ignore_eos=True)


def texts(folder: Path, dtype: str, mode: str) -> tuple[LLM, list[tuple[int, ...]]]:
    config = {
        "backend": "FLASHINFER", "device": "cuda", "dtype": dtype, "graphs": {"mode": mode},
        "cache": {"prefix_caching": True, "page_size": 8, "num_pages": 2000},
        "scheduler": {"max_num_tokens": 200, "max_num_requests": 32, "chunked_prefill": True},
    }  # fmt: skip
    llm = LLM.from_pretrained(folder, EngineConfig.model_validate(config))
    outputs = llm.generate(MANY, SAMPLING)
    return llm, [output.token_ids for output in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_graphs_give_the_tokens_of_eager_steps(smollm2: Path, dtype: str) -> None:
    pytest.importorskip("flashinfer")
    assert len(MANY) == 32
    _, expected = texts(smollm2, dtype, "none")
    llm, tokens = texts(smollm2, dtype, "full")
    differ = [index for index, (got, want) in enumerate(zip(tokens, expected, strict=True)) if got != want]
    assert not differ, [(MANY[index][-20:], tokens[index], expected[index]) for index in differ]
    assert llm.stats.num_graph_steps > 60
    assert llm.stats.num_prefix_hit_tokens > 0

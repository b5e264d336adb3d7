"""Real weights on a GPU: each backend through graphs gives the tokens of its eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from attn_backends import LLM, EngineConfig, SamplingParams
from tests.engine.models.test_smollm2 import OPENING, PROMPTS

MANY = [*PROMPTS, *(OPENING + tail for tail in ("Trains", "Bees", "The sun", "Bread", "Glass", "Wind", "A king",
                                               "Cats", "Stones", "Milk", "Paper", "Iron"))][:32]  # fmt: skip
SAMPLING = SamplingParams(max_tokens=64, ignore_eos=True)


class Place(NamedTuple):
    """A backend, the module of its kernels, and how it is set up."""

    backend: str
    module: str
    page_size: int = 8
    options: dict[str, object] = {}  # noqa: RUF012 (nobody writes to it)


# FlashAttention splits keys by the longest length that it is told of, which in a graph is the model's: other sums.
PLACES = {
    "FLASHINFER": Place("FLASHINFER", "flashinfer"),
    "TRITON": Place("TRITON", "triton"),
    "FA3": Place("FLASH_ATTN", "vllm.vllm_flash_attn.flash_attn_interface", 16,
                 {"provider": "vllm_fa3", "split_keys": False}),
    "FA2": Place("FLASH_ATTN", "flash_attn", 256, {"provider": "flash_attn", "split_keys": False}),
}  # fmt: skip


def texts(folder: Path, place: Place, dtype: str, mode: str) -> tuple[LLM, list[tuple[int, ...]]]:
    config = {
        "backend": place.backend, "backend_options": place.options, "device": "cuda", "dtype": dtype,
        "graphs": {"mode": mode},
        "cache": {"prefix_caching": True, "page_size": place.page_size,
                  "num_pages": max(100, 16000 // place.page_size)},
        "scheduler": {"max_num_tokens": 200, "max_num_requests": 32, "chunked_prefill": True},
    }  # fmt: skip
    llm = LLM.from_pretrained(folder, EngineConfig.model_validate(config))
    outputs = llm.generate(MANY, SAMPLING)
    return llm, [output.token_ids for output in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PLACES)
def test_graphs_give_the_tokens_of_eager_steps(smollm2: Path, name: str, dtype: str) -> None:
    place = PLACES[name]
    pytest.importorskip(place.module)
    assert len(MANY) == 32
    _, expected = texts(smollm2, place, dtype, "none")
    llm, tokens = texts(smollm2, place, dtype, "full")
    differ = [index for index, (got, want) in enumerate(zip(tokens, expected, strict=True)) if got != want]
    assert not differ, [(MANY[index][-20:], tokens[index], expected[index]) for index in differ]
    assert llm.stats.num_graph_steps > 60
    assert llm.stats.num_prefix_hit_tokens > 0 or place.page_size > 8  # prompts may be shorter than such a page

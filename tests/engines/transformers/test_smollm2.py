"""The default model in float32, under whatever version of transformers is installed: sdpa's tokens, on both roads."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import attn_backends.adapters.transformers as ab
from attn_backends.engine.models.checkpoint import DEFAULT_MODEL, find_model
from attn_backends.engine.models.hf import convert_gguf
from tests.helpers.hf_cases import generate_batch

pytestmark = pytest.mark.long  # `make test-engines` runs it
BASE = "The history of the city begins with a small harbour on the river, where traders from many lands met. " * 6
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    BASE + "In the year",
    BASE + "The first mayor was",
    "1 2 3 4 5",
]
NEW = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}


@pytest.fixture(scope="module")
def folder() -> Any:
    return find_model(os.environ.get("ATTN_BACKENDS_MODEL", DEFAULT_MODEL), convert_gguf)


def load(folder: Any, name: str) -> Any:
    ab.register()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=name).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Any) -> Any:
    made: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    made.pad_token = made.pad_token or made.eos_token
    return made


@pytest.fixture(scope="module")
def wanted(folder: Any, tokenizer: Any) -> list[list[int]]:
    """Each prompt by itself."""
    model, texts = load(folder, "sdpa"), []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        texts.append(model.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist())
    return texts


@pytest.fixture(scope="module")
def ours(folder: Any) -> Any:
    return load(folder, "attn_backends:TORCH")


def test_generate(ours: Any, tokenizer: Any, wanted: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert ours.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist() == tokens


def test_a_left_padded_batch(ours: Any, tokenizer: Any, wanted: list[list[int]]) -> None:
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert ours.generate(**batch, **GREEDY)[:, batch.input_ids.shape[1] :].tolist() == wanted


def test_generate_batch(ours: Any, tokenizer: Any, wanted: list[list[int]]) -> None:
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    outputs = generate_batch(ours, ids, NEW, page_size=32, num_blocks=256, max_batch_tokens=64)
    assert [output.generated_tokens for output in outputs] == wanted


def test_a_backend_is_named_in_what_is_kept(ours: Any) -> None:
    cache = ab.PagedCache(ours.config)
    with torch.no_grad():
        ours(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    assert (cache.backend, cache.get_seq_length()) == ("TORCH", 3)

"""Random models of many families, random batches: log-probabilities are eager's, on each of the three roads."""

from __future__ import annotations

import pytest
import torch

import attn_backends.adapters.transformers as ab
from tests.helpers.hf_cases import FAMILIES, IN_BATCHES, Case, draw_case, generate_batch

NAME = "attn_backends:TORCH"
CLOSE = 1e-5
MORE = [pytest.param(seed, marks=pytest.mark.long) for seed in range(100, 200)]


@pytest.fixture(autouse=True, scope="module")
def _names() -> None:
    ab.register()


def forward_error(case: Case) -> float:
    """A forward without a cache."""
    with torch.no_grad():
        out = case.under(NAME)(input_ids=case.ids, attention_mask=case.mask, use_cache=False).logits.log_softmax(-1)
    return float((out - case.log_probs(case.ids, case.mask))[case.mask.bool()].abs().max())


def generate_error(case: Case) -> float:
    """`generate()` of a left-padded batch, in one piece or in chunks: each step's log-probabilities."""
    new = int(case.rng.integers(2, 24))
    chunk = [None, int(case.rng.integers(1, 9))][case.rng.integers(2)]
    out = case.under(NAME).generate(
        case.ids, attention_mask=case.mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, prefill_chunk_size=chunk,
    )  # fmt: skip
    assert isinstance(out.past_key_values, ab.PagedCache)
    assert out.past_key_values.backend == "TORCH"
    mask = torch.cat([case.mask, torch.ones(len(case.ids), new, dtype=torch.long)], 1)
    wanted = case.log_probs(out.sequences, mask)[:, -new - 1 : -1]
    return float((torch.stack(out.logits, 1).log_softmax(-1) - wanted).abs().max())


def batch_error(case: Case) -> float:
    """`generate_batch()`: prompts in chunks, decodes beside them; the log-probability of every token."""
    new, page = int(case.rng.integers(2, 16)), int(case.rng.choice([4, 8, 16, 32]))
    prompts = case.prompts
    outputs = generate_batch(case.under(NAME), prompts, new, page_size=page, num_blocks=512 // page + 32,
                             max_batch_tokens=int(case.rng.integers(8, 64)))  # fmt: skip
    errors = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.generated_tokens) == new, output.error
        ids = torch.tensor([prompt + output.generated_tokens])
        wanted = case.log_probs(ids, torch.ones_like(ids))[0, len(prompt) - 1 : -1]
        chosen = wanted.gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        errors.append(float((torch.tensor(output.logprobs) - chosen).abs().max()))
    return max(errors)


# Attention is to these what it is to llama: other models around it.
LIKE_LLAMA = {"glm4", "olmo2", "phi3", "qwen2", "smollm3"}
EACH = [pytest.param(name, marks=[pytest.mark.long] * (name in LIKE_LLAMA)) for name in sorted(FAMILIES)]


@pytest.mark.parametrize("family", EACH)
def test_each_family(family: str) -> None:
    case = draw_case(sum(map(ord, family)), family)
    assert forward_error(case) < CLOSE, case
    assert generate_error(case) < CLOSE, case
    if family in IN_BATCHES:
        assert batch_error(case) < CLOSE, case


@pytest.mark.parametrize("seed", MORE)
def test_any_model(seed: int) -> None:
    case = draw_case(seed)
    assert forward_error(case) < CLOSE, case
    assert generate_error(case) < CLOSE, case
    if case.family in IN_BATCHES:
        assert batch_error(case) < CLOSE, case

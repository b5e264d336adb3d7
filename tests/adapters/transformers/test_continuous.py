"""Continuous batching over transformers' own pages: what no random model draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_backends.adapters.transformers as ab
from attn_backends.adapters.transformers.continuous import Group
from attn_backends.adapters.transformers.layers import CalledLayers
from attn_backends.spec import KVCacheSpec
from tests.helpers.hf_cases import Case, draw_case, generate_batch

NAME = "attn_backends:TORCH"


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def case(request: pytest.FixtureRequest) -> Case:
    ab.register()
    return draw_case(5, request.param, most_rows=4)


def tokens(outputs: list[Any]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs]


def alone(case: Case, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Each prompt by itself, by eager."""
    settings: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [case.eager.generate(torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in prompts]


def test_padded_rows_and_tokens(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are padded where steps are compiled or captured: rows of zero tokens, tokens that belong to no row, and
    slots that nothing reads."""
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    seen = []

    def always(self: Any, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        self.pad_inputs = True
        seen.append(num_q_tokens)
        return num_q_tokens + 3, max_kv_read + 8

    monkeypatch.setattr(ModelRunner, "maybe_pad_inputs", always)
    monkeypatch.setattr(ModelRunner, "warmup", lambda self, model: None)
    outputs = generate_batch(case.under(NAME), case.prompts, 7, page_size=8, num_blocks=64, max_batch_tokens=64)
    assert seen
    assert tokens(outputs) == alone(case, case.prompts, 7)


def test_a_shared_prefix(case: Case) -> None:
    """Full layers alone share pages: a request may find those of another."""
    start = case.prompts[0] * 3
    prompts = [[*start, 5, 6, 7], [*start, 8, 9], [*start, 5, 6]]
    outputs = generate_batch(case.under(NAME), prompts, 6, page_size=4, num_blocks=128, max_batch_tokens=16)
    assert tokens(outputs) == alone(case, prompts, 6)


def test_more_requests_than_pages(case: Case) -> None:
    """Requests wait for pages, and some are put back."""
    prompts = [torch.randint(3, 97, (n,)).tolist() for n in (30, 25, 20, 28, 3, 1, 17)]
    outputs = generate_batch(case.under(NAME), prompts, 12, page_size=8, num_blocks=14, max_batch_tokens=16)
    assert tokens(outputs) == alone(case, prompts, 12)


def test_a_second_run_has_caches_of_its_own(case: Case) -> None:
    model = case.under(NAME)
    for page_size in (8, 16):
        outputs = generate_batch(model, case.prompts, 5, page_size=page_size, num_blocks=64, max_batch_tokens=32)
        assert tokens(outputs) == alone(case, case.prompts, 5)
    assert model.config._attn_implementation == NAME


def test_generate_between_batches(case: Case) -> None:
    model = case.under(NAME)
    outputs = generate_batch(model, case.prompts, 5, page_size=8, num_blocks=64, max_batch_tokens=32)
    prompt = torch.tensor([case.prompts[0]])
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(prompt, **settings)[0, prompt.shape[1] :].tolist() == tokens(outputs)[0]


def test_full_layers_are_planned_once_a_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once a layer: a group's batch is made when its first layer runs."""
    made: list[int] = []
    batch = Group._batch
    monkeypatch.setattr(Group, "_batch", lambda self, *args: made.append(id(self)) or batch(self, *args))
    steps: list[int] = []
    serve = CalledLayers.serve
    monkeypatch.setattr(CalledLayers, "serve", lambda self, *args: steps.append(id(self)) or serve(self, *args))
    generate_batch(case.under(NAME), [[3, 4, 5]], 4, page_size=8, num_blocks=64, max_batch_tokens=32)
    layers = case.eager.config.num_hidden_layers
    assert len(made) == 4 * len(set(made)), "each group once in each of four steps"
    assert len(set(made)) <= layers
    assert len(steps) == (4 + 1) * layers, "the model is tried out once before"


@pytest.mark.parametrize("page_size", [1, 8])
def test_what_is_gathered_takes_no_page_more_than_it_needs(page_size: int) -> None:
    lens = torch.tensor([7, 8, 9, 0, 1, 15, 16, 17])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    group = Group(CalledLayers("TORCH", {}, [KVCacheSpec(None, page_size)]))
    first = group._lay_out(starts, lens, int(lens.sum()), page_size).tolist()
    pages = [-(-n // page_size) for n in lens.tolist()]
    assert first == [sum(pages[:row]) for row in range(len(pages))]
    assert group._slots.tolist() == [
        begin * page_size + i for begin, n in zip(first, lens.tolist(), strict=True) for i in range(n)
    ]

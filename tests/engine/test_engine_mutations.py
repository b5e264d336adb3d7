"""Tests of ours fail where the engine is broken on purpose: what each mutant does wrong, and the test that sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from attn_backends import LLM, machine
from attn_backends.engine import llm
from attn_backends.engine.live import Detokenizer
from attn_backends.engine.models.fused import linears
from attn_backends.engine.models.fused.linears import packable
from attn_backends.engine.models.kv_scales import KVScales, kv_scales
from attn_backends.engine.request import ScheduledBatch
from attn_backends.registry import measured, select
from tests import test_machine
from tests.engine import test_detokenizer, test_prompts, test_sample_rows
from tests.engine.models import test_kv_scales
from tests.engine.models.fused import test_linears
from tests.registry import test_measured

Patch = pytest.MonkeyPatch


def first_listed_stop(self: Detokenizer, new: str) -> str:
    """`Detokenizer._show` that cuts at the stop string listed first, of those in the text."""
    pending = self._held + new
    cuts = [at for at in (pending.find(stop) for stop in self._stop) if at >= 0]
    if not cuts:
        self._held = pending
        return ""
    self.stopped, self._held = True, ""
    self._shown.append(pending[: cuts[0]])
    return pending[: cuts[0]]


def test_the_first_listed_stop_string(tiny_llama: Path, monkeypatch: Patch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    test_detokenizer.check_stops(tokenizer, "cab", ["b", "ab"])
    monkeypatch.setattr(Detokenizer, "_show", first_listed_stop)
    with pytest.raises(AssertionError):
        test_detokenizer.check_stops(tokenizer, "cab", ["b", "ab"])


def test_sample_rows_in_another_order(tiny_llama: Path, monkeypatch: Patch) -> None:
    sampled = ScheduledBatch.sampled.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(ScheduledBatch, "sampled", property(lambda batch: sampled(batch)[::-1]))
    with pytest.raises(AssertionError):
        test_sample_rows.check_rows(tiny_llama, 0)


def dropped(*given: Any) -> dict[int, KVScales]:
    return {}


def exchanged(*given: Any) -> dict[int, KVScales]:
    return {layer: KVScales(*pair[::-1]) for layer, pair in kv_scales(*given).items()}


def of_the_next_layer(*given: Any) -> dict[int, KVScales]:
    found = kv_scales(*given)
    return {layer: found[(layer + 1) % len(found)] for layer in found}


def of_the_first_layer(*given: Any) -> dict[int, KVScales]:
    found = kv_scales(*given)
    return dict.fromkeys(found, found[0])


checkpoint = test_kv_scales.checkpoint


@pytest.mark.parametrize("mutant", [dropped, exchanged, of_the_next_layer, of_the_first_layer])
def test_scales_of_a_checkpoint(
    mutant: Callable[..., Any], checkpoint: Callable[..., Path], tiny_llama: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(llm, "kv_scales", mutant)
    found = test_kv_scales.engine(checkpoint(test_kv_scales.of_attention(test_kv_scales.drawn(0))))
    prompts = [found.model.tokenizer(prompt).input_ids for prompt in test_kv_scales.PROMPTS]
    expected = list(test_kv_scales.expected(tiny_llama, test_kv_scales.drawn(0), prompts))
    assert test_kv_scales.tokens(found) != expected


_mi300 = test_machine._mi300
gpu = test_measured.gpu


@pytest.mark.usefixtures("_mi300")
def test_hip_taken_for_cuda(monkeypatch: Patch) -> None:
    test_machine.test_capabilities_are_nvidias_numbers()
    monkeypatch.setattr(machine, "is_hip", lambda: False)
    with pytest.raises(AssertionError):
        test_machine.test_capabilities_are_nvidias_numbers()


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB"], indirect=True)
def test_times_of_another_gpu(gpu: str, monkeypatch: Patch) -> None:
    case = test_measured.test_another_gpu_has_the_order_by_priority_and_the_reason_says_so
    case(gpu)
    monkeypatch.setattr(select, "nearest", lambda groups, load, name: measured.nearest(groups, load, "NVIDIA H200"))
    with pytest.raises(AssertionError):
        case(gpu)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> LLM:
    return test_prompts.LLM.from_pretrained(tiny_llama, test_prompts.EngineConfig(device="cpu"))


def truncating(prompts: Any) -> Any:
    return [prompt if isinstance(prompt, str) else [int(token) for token in prompt] for prompt in prompts]


def test_prompts_that_are_converted(engine: LLM, monkeypatch: Patch) -> None:
    monkeypatch.setattr(llm, "check_prompts", truncating)
    for prompt in ([1.7, 2.2], b"Hi", [True, 5]):
        with pytest.raises(pytest.fail.Exception):
            test_prompts.test_a_prompt_of_the_wrong_type_is_named(engine, prompt, "prompts")


@pytest.mark.parametrize("name", ["why_not_text", "why_not_served"])
def test_prompts_that_are_not_looked_at(engine: LLM, name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(llm, name, lambda *given: None)
    with pytest.raises((AssertionError, TypeError, OverflowError)):
        test_prompts.test_a_prompt_that_is_no_text_or_has_unknown_ids_fails_alone(engine)


@pytest.mark.skipif(not packable(torch.ones(2, 2)), reason="this CPU's torch has no oneDNN")
def test_products_of_any_size(monkeypatch: Patch) -> None:
    monkeypatch.setattr(linears, "padded_size", lambda num_tokens: num_tokens)
    with pytest.raises(AssertionError):
        test_linears.check_few_sizes(monkeypatch)

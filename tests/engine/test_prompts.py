"""Calls with anything in them: what cannot be served is said in our words, and nothing is cut or converted unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine.config import CacheConfig, GraphsConfig, SchedulerConfig
from attn_backends.engine.prompts import check_prompts, why_not_served, why_not_text
from attn_backends.validation import ConfigError

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
VOCAB = 259


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM.from_pretrained(tiny_llama, EngineConfig(device="cpu", cache={"num_pages": 16}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1.7, 2.2], r"prompts\[1\]\[0\] is 1.7 \(float\); a token id is an integer"),
        ([5, 2.0], r"prompts\[1\]\[1\] is 2.0 \(float\)"),
        ([True, 5], r"prompts\[1\]\[0\] is True \(bool\)"),
        (["5"], r"prompts\[1\]\[0\] is '5' \(str\)"),
        ([[5]], r"prompts\[1\]\[0\] is \[5\] \(list\)"),
        ([None], r"prompts\[1\]\[0\] is None"),
        (b"Hi", r"prompts\[1\] is b'Hi' \(bytes\); decode it to text"),
        (bytearray(b"Hi"), "decode it to text"),
        (np.array([1.0, 2.0]), r"prompts\[1\]\[0\] is 1.0 \(float\)"),
        (np.array([True]), r"prompts\[1\]\[0\] is True"),
        (torch.ones(2, 2, dtype=torch.long), r"prompts\[1\]\[0\] is \[1, 1\] \(list\)"),
        ([np.float64(3)], r"prompts\[1\]\[0\] is np.float64\(3.0\) \(float64\)"),
        (7, r"prompts\[1\] is 7 \(int\); a prompt is a text or a list of token ids"),
        (np.int64(7), r"prompts\[1\] is np.int64\(7\)"),
        (None, r"prompts\[1\] is None"),
        ({5: 6}, r"prompts\[1\] is \{5: 6\} \(dict\)"),
        ({5}, r"prompts\[1\] is \{5\} \(set\)"),
        (iter([5]), r"prompts\[1\] is <list_iterator"),
    ],
)
def test_a_prompt_of_the_wrong_type_is_named(llm: LLM, prompt: Any, words: str) -> None:
    for call in (llm.generate, llm.stream):  # which says so before anything is asked of it
        with pytest.raises(TypeError, match=words):
            call(["fine", prompt])
    assert llm.allocator.num_used == 0
    assert len(llm.generate(["fine"], SHORT)) == 1


@pytest.mark.parametrize("prompts", ["text", b"bytes", 3, None, {"a": 1}, {"a"}, (p for p in "ab"), SHORT])
def test_what_is_no_list_of_prompts(llm: LLM, prompts: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(TypeError, match=r"^prompts is .*pass a list"):
            call(prompts)


@pytest.mark.parametrize(
    "ids", [np.array([5, 6], np.int16), torch.tensor([5, 6]), (5, 6), [np.int64(5), 6], range(5, 7)]
)
def test_token_ids_come_in_many_forms(llm: LLM, ids: Any) -> None:
    assert llm.generate([ids], SHORT)[0].token_ids == llm.generate([[5, 6]], SHORT)[0].token_ids


def test_a_prompt_that_is_no_text_or_has_unknown_ids_fails_alone(llm: LLM) -> None:
    prompts = ["fine", "so \ud800", [3, VOCAB], [-1], [10**30], "", "\udcff", [3, 4]]
    outputs = llm.generate(prompts, SHORT)  # type: ignore[arg-type]
    assert [output.index for output in outputs if output.error is None] == [0, 7]
    errors = {output.index: str(output.error) for output in outputs if output.finish_reason == "error"}
    assert errors[1] == "the prompt is no valid text: a lone surrogate, U+D800, at character 3; remove it"
    assert errors[2] == "token id 259 is not in the vocabulary: ids are 0 to 258"
    assert "token id -1 is not" in errors[3]
    assert f"token id {10**30} is not" in errors[4]
    assert "at character 0" in errors[6]
    assert outputs[0].token_ids == llm.generate(["fine"], SHORT)[0].token_ids
    assert llm.render_prompt("so \ud800") == "so \ud800"
    stops = SHORT.model_copy(update={"stop_token_ids": (5, VOCAB)})
    assert llm.generate(["fine"], stops)[0].error == "stop token id 259 is not in the vocabulary: ids are 0 to 258"


@pytest.mark.parametrize("sampling", [3, "abc", b"ab", {"max_tokens": 3}, [3, 4], [SHORT, None], [SHORT, {}], iter([])])
def test_what_is_no_sampling(llm: LLM, sampling: Any) -> None:
    with pytest.raises(TypeError, match=r"^sampling(\[\d\])? is .*pass SamplingParams"):
        llm.generate(["a", "b"], sampling)


@pytest.mark.parametrize("config", [{"device": "cpu"}, "cpu.yaml", 3])
def test_what_is_no_config(tiny_llama: Path, config: Any) -> None:
    with pytest.raises(TypeError, match=r"^config is .*pass an EngineConfig"):
        LLM.from_pretrained(tiny_llama, config)


@pytest.mark.parametrize("text", [b"Hi", 3, None, ["Hi"]])
def test_a_message_that_is_no_text(llm: LLM, text: Any) -> None:
    with pytest.raises(TypeError, match=r"^text is "):
        llm.render_prompt(text)


# Values of all kinds, nested as prompts are; text with surrogates among them.
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-300, 300), st.integers(), st.floats(), st.binary(max_size=4),
    st.text(st.characters(), max_size=6), st.sampled_from([np.int8(3), np.float32(2.5), np.bool_(True), object(), 3j]),
)  # fmt: skip
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.sets(st.integers()))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(prompts=st.one_of(values, st.lists(values, max_size=4)))
def test_any_prompts_are_served_or_refused_in_our_words(llm: LLM, prompts: Any) -> None:
    try:
        outputs = llm.generate(prompts, SHORT)
    except TypeError as error:
        assert str(error).startswith("prompts")  # noqa: PT017 (either outcome is right)
        return
    assert [output.index for output in outputs] == list(range(len(prompts)))
    for prompt, output in zip(prompts, outputs, strict=True):
        served = isinstance(prompt, str) or all(type(token) is not bool and token == int(token) for token in prompt)
        assert served, prompt
        assert output.finish_reason == ("error" if output.error else "length")
        assert isinstance(prompt, str) or [*output.prompt] == [*prompt]


MODELS = [SamplingParams, CacheConfig, SchedulerConfig, GraphsConfig, EngineConfig]
FIELDS = [(model, name) for model in MODELS for name in model.model_fields]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(field=st.sampled_from(FIELDS), value=values)
def test_any_setting_is_taken_as_it_is_or_refused_in_our_words(field: tuple[Any, str], value: Any) -> None:
    model, name = field
    for make in (lambda: model(**{name: value}), lambda: model.model_validate({name: value})):
        try:
            taken = getattr(make(), name)
        except ConfigError as error:
            assert f"\n  {name}" in str(error)  # noqa: PT017 (either outcome is right)
            assert "pydantic.dev" not in str(error)  # noqa: PT017
            continue
        if isinstance(value, float | int) and not isinstance(taken, bool):
            assert not isinstance(value, bool)
            assert taken == value, "converted"


@pytest.mark.parametrize("wrong", [
    {"max_tokens": True}, {"max_tokens": 2.0}, {"max_tokens": "2"}, {"max_tokens": np.float32(2)},
    {"max_tokens": b"2"}, {"temperature": "0.5"}, {"temperature": True}, {"top_k": 1.0}, {"seed": 1.5},
    {"seed": True}, {"stop": b"a"}, {"stop": [b"a"]}, {"stop": [1]}, {"stop": "\ud800"}, {"stop_token_ids": [1.0]},
    {"stop_token_ids": [True]}, {"stop_token_ids": 5}, {"stop_token_ids": b"Hi"},
], ids=str)  # fmt: skip
def test_sampling_converts_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)
    assert SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), top_k=4).max_tokens == 3  # type: ignore[arg-type]


@settings(max_examples=200, derandomize=True)
@given(text=st.text(st.characters(), max_size=8))
def test_text_is_what_encodes(text: str) -> None:
    surrogates = [place for place, char in enumerate(text) if "\ud800" <= char <= "\udfff"]
    wrong = why_not_text(text)
    assert (wrong is None) == (not surrogates)
    assert wrong is None or f"at character {surrogates[0]};" in wrong


@settings(max_examples=200, derandomize=True)
@given(ids=st.lists(st.integers(-3, 12)), stops=st.lists(st.integers(0, 12), max_size=3))
def test_every_id_is_looked_up(ids: list[int], stops: list[int]) -> None:
    wrong = why_not_served(ids, SamplingParams(stop_token_ids=tuple(stops)), 10)
    assert (wrong is None) == all(0 <= each < 10 for each in ids + stops)


def test_lists_are_copied() -> None:
    given_ids = [4, 5]
    (taken,) = check_prompts([given_ids])
    given_ids.append(6)
    assert taken == [4, 5]

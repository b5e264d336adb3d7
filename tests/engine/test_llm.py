"""The engine from outside, on a tiny model: what a caller gets, also when something is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from attn_backends import LLM, AttentionSpec, EngineConfig, MLASpec, SamplingParams, Unsupported
from attn_backends.backends.torch.metadata import TorchMetadata, TorchMetadataBuilder
from attn_backends.engine.request import ScheduledBatch
from attn_backends.engine.resolve import possible_caches
from attn_backends.engine.sampler import Sampler
from attn_backends.registry import UnknownBackendError, select_backend
from attn_backends.testing.graphs.simulator import GraphSimulator
from tests.helpers.tiny_models import save_tiny

LONG = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = ["a", "one two three", "the quick brown fox", "xyz" * 12, "the quick brown dog"]


def engine(folder: Path, **settings: object) -> LLM:
    return LLM.from_pretrained(folder, EngineConfig.model_validate({"cache": {"num_pages": 64}} | settings))


def tokens(llm: LLM, prompts: list[str], sampling: SamplingParams = LONG) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts, sampling)]


def test_matches_transformers_generate(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    llm = engine(tiny_llama)
    for prompt, got in zip(PROMPTS, tokens(llm, PROMPTS), strict=True):
        ids = torch.tensor([llm.model.tokenizer(prompt).input_ids])
        expected = model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None)
        assert list(got) == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("settings", [
    {"cache": {"num_pages": 5, "page_size": 16}},
    {"cache": {"num_pages": 17, "page_size": 4}, "scheduler": {"max_num_tokens": 7}},
    {"cache": {"num_pages": 64, "prefix_caching": False}, "scheduler": {"max_num_requests": 2}},
    {"cache": {"num_pages": 64, "layout": "HND"}},
])  # fmt: skip
def test_any_pool_and_budget_give_the_same_tokens(tiny_llama: Path, settings: dict[str, object]) -> None:
    llm = engine(tiny_llama, **settings)
    assert tokens(llm, PROMPTS * 3) == tokens(engine(tiny_llama), PROMPTS) * 3
    assert llm.allocator.num_used == 0


@pytest.mark.parametrize("num_steps", [2, 5, 64])
@pytest.mark.parametrize("settings", [
    {"cache": {"num_pages": 64}},
    {"cache": {"num_pages": 17, "page_size": 4}, "scheduler": {"max_num_tokens": 7}},
])  # fmt: skip
@pytest.mark.sampled
def test_several_steps_a_launch_stop_at_the_same_tokens(
    tiny_llama: Path, settings: dict[str, dict[str, object]], num_steps: int
) -> None:
    """Greedy and drawn, ended by length, by stop tokens and by strings."""
    llm = engine(tiny_llama, **settings)
    greedy = tokens(llm, PROMPTS)
    stops = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=[greedy[0][5], greedy[3][10]])
    drawn = SamplingParams(max_tokens=17, temperature=1.5, top_p=0.9, seed=3, stop=["e", "th"])
    scheduler = settings.get("scheduler", {}) | {"decode_steps_per_launch": num_steps}
    several = engine(tiny_llama, **settings | {"scheduler": scheduler})
    for sampling in (LONG, stops, drawn):
        outputs, expected = several.generate(PROMPTS, sampling), llm.generate(PROMPTS, sampling)
        assert [(o.text, o.token_ids, o.finish_reason) for o in outputs] == [
            (o.text, o.token_ids, o.finish_reason) for o in expected
        ]
        assert several.stats.num_new_tokens == llm.stats.num_new_tokens
    assert several.allocator.num_used == 0


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("settings", [
    {"cache": {"num_pages": 200, "page_size": 4}},
    {"cache": {"num_pages": 19, "page_size": 4}, "scheduler": {"max_num_requests": 3}},
    {"cache": {"num_pages": 64, "prefix_caching": False}, "scheduler": {"max_num_tokens": 7}},
    {"cache": {"num_pages": 64}, "graphs": {"mode": "full", "sizes": [1, 2, 4]}},
    {"cache": {"num_pages": 64}, "graphs": {"mode": "piecewise", "sizes": [2, 6]}},
])  # fmt: skip
@pytest.mark.sampled
def test_batches_that_follow_give_what_scheduled_ones_give(
    tiny_llama: Path, settings: dict[str, Any], num_steps: int, ahead: bool
) -> None:
    """Greedy and drawn; ended by length, end tokens, stop tokens and strings; requests come, go and are preempted."""
    plain = engine(tiny_llama, cache={"num_pages": 200})
    plain.scheduler.follow = lambda batch: None  # type: ignore[method-assign]
    steps = settings.get("scheduler", {}) | {"decode_steps_per_launch": num_steps}
    recorder = GraphSimulator() if "graphs" in settings else None
    llm = LLM.from_pretrained(
        tiny_llama, EngineConfig.model_validate(settings | {"scheduler": steps}), recorder=recorder
    )
    llm.launches_ahead = ahead
    number, follow = 0, llm.scheduler.follow

    def counted(batch: ScheduledBatch) -> ScheduledBatch | None:
        nonlocal number
        following = follow(batch)
        number += following is not None
        return following

    llm.scheduler.follow = counted  # type: ignore[method-assign]
    greedy = tokens(plain, PROMPTS)
    drawn = SamplingParams(max_tokens=17, temperature=1.5, top_p=0.9, seed=3, stop=["e", "th"])
    stops = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=[greedy[0][5], greedy[3][10]])
    mixed = [LONG, drawn, SamplingParams(max_tokens=9), stops, drawn.model_copy(update={"stop": ()})]
    for sampling in ([stops] * 5, mixed):
        expected = plain.generate(PROMPTS, sampling)
        assert llm.generate(PROMPTS, sampling) == expected
        assert llm.stats.num_new_tokens == plain.stats.num_new_tokens
    chunks = list(llm.stream(PROMPTS, mixed))
    assert sorted((c.output for c in chunks if c.output), key=lambda output: output.index) == expected
    assert ["".join(c.text for c in chunks if c.index == i) for i in range(5)] == [o.text for o in expected]
    assert number > 5
    assert llm.allocator.num_used == 0


def test_a_stream_that_launches_ahead_can_be_aborted_and_closed(tiny_llama: Path) -> None:
    llm = engine(tiny_llama, cache={"num_pages": 64, "page_size": 4})
    llm.launches_ahead = True
    reasons = {}
    for chunk in llm.stream(PROMPTS, LONG):
        llm.abort(1)
        if chunk.output:
            reasons[chunk.index] = chunk.output.finish_reason
    assert reasons == {0: "length", 1: "abort", 2: "length", 3: "length", 4: "length"}
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.allocator.num_used == 0
    assert tokens(llm, PROMPTS) == tokens(engine(tiny_llama), PROMPTS)


def test_the_last_prompt_can_be_aborted_as_the_others_are_closed(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    reasons = []
    for chunk in llm.stream(["one two", "three"], [LONG.model_copy(update={"max_tokens": n}) for n in (3, 24)]):
        if chunk.output:
            reasons.append(chunk.output.finish_reason)
            llm.abort(1)
    assert reasons == ["length", "abort"]


def test_a_shared_prefix_is_found_and_changes_nothing(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    build = TorchMetadataBuilder.build

    def spy(self: TorchMetadataBuilder, length: int, *rest: Any, **named: Any) -> TorchMetadata:
        asked.append(length)
        return build(self, length, *rest, **named)

    prompts = ["the same words at the start of every prompt, " + end for end in ("a", "be", "see")]
    expected = tokens(engine(tiny_llama, cache={"num_pages": 64, "prefix_caching": False}), prompts)
    llm = engine(tiny_llama)
    tokens(llm, prompts[:1])
    monkeypatch.setattr(TorchMetadataBuilder, "build", spy)
    assert tokens(llm, prompts) == expected
    assert set(asked[1:]) == {32}
    assert llm.stats.num_prefix_hit_tokens >= 3 * 32


def test_prefixes_of_other_salts_are_not_found(tiny_llama: Path) -> None:
    prompts = ["the same words at the start of every prompt, " + end for end in ("a", "be", "see")]
    llm, hits = engine(tiny_llama), []
    expected = tokens(llm, prompts)
    for salt in ("tenant", "tenant", "other", ["tenant", "other", None], ["new", "newer", "newest"]):
        assert [output.token_ids for output in llm.generate(prompts, LONG, salt)] == expected
        hits.append(llm.stats.num_prefix_hit_tokens)
    assert hits == [0, 96, 0, 96, 0]
    list(llm.stream(prompts, LONG, "tenant"))
    assert llm.stats.num_prefix_hit_tokens == 96


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        (["a"], "1 cache salts for 2 prompts: pass one, or one a prompt"),
        (b"ab", "cache_salt is b'ab' of type bytes"),
        (7, "cache_salt is 7 of type int; pass a string"),
        (["a", ""], "cache_salt is empty"),
    ],
)
def test_wrong_salts_are_refused_before_anything_runs(tiny_llama: Path, salt: Any, message: str) -> None:
    llm = engine(tiny_llama)
    with pytest.raises((TypeError, ValueError), match=message):
        llm.generate(["a", "b"], LONG, salt)
    assert not llm.scheduler.has_unfinished
    assert tokens(llm, PROMPTS) == tokens(engine(tiny_llama), PROMPTS)


def test_a_pool_far_too_small_finishes_every_request_by_preemption(tiny_llama: Path) -> None:
    llm = engine(tiny_llama, cache={"num_pages": 5, "page_size": 16})
    outputs = llm.generate(PROMPTS * 4, LONG)
    assert [len(output.token_ids) for output in outputs] == [24] * 20
    assert llm.stats.num_preemptions > 0
    assert llm.stats.peak_pages <= llm.stats.num_pages == 5


def test_the_pool_is_allocated_once_within_the_bytes_asked_for(tiny_llama: Path) -> None:
    llm = engine(tiny_llama, cache={"memory": "1MiB"})
    buffer = llm.runner.pool.buffer
    page_bytes = 4 * 2 * 16 * 2 * 16 * 4  # layers, K and V, tokens, heads, dim, float32
    assert 2**20 - page_bytes < buffer.numel() <= 2**20
    tokens(llm, PROMPTS * 3)
    assert llm.runner.pool.buffer is buffer


def test_a_pool_without_room_for_one_page_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match=r"one page of 16 tokens takes 16384: raise cache\.memory"):
        engine(tiny_llama, cache={"memory": 1000})


@pytest.mark.parametrize(("name", "value"), [("memory", "100TB"), ("num_pages", 10**12)])
def test_a_pool_that_the_machine_has_no_memory_for_is_refused(name: str, value: Any, tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match=rf"would take \d{{14,}} bytes, and cpu has \d+: lower cache\.{name}"):
        engine(tiny_llama, cache={name: value})


def test_memory_that_is_not_to_be_had_is_told(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("you tried to allocate 16384 bytes\nand more")

    monkeypatch.setattr("attn_backends.engine.runner.allocate_kv_cache", no_memory)
    with pytest.raises(ValueError, match=r"pool of 64 pages.*on cpu.*16384 bytes\): lower cache\.memory or"):
        engine(tiny_llama, cache={"num_pages": 64})


def test_requests_longer_than_the_model_s_are_refused(tiny_llama: Path) -> None:
    own = engine(tiny_llama).model.max_model_len
    assert engine(tiny_llama, scheduler={"max_model_len": own}).scheduler.max_model_len == own
    with pytest.raises(
        ValueError, match=rf"max_model_len is {own + 1}, and the model is made for {own} tokens: lower it"
    ):
        engine(tiny_llama, scheduler={"max_model_len": own + 1})


def test_one_token_a_request_leaves_none_for_a_prompt(tiny_llama: Path) -> None:
    (output,) = engine(tiny_llama, scheduler={"max_model_len": 1}).generate(["x"], LONG)
    assert "new ones included: raise scheduler.max_model_len" in (output.error or "")


def test_stream_adds_up_to_generate(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    texts, outputs = [""] * len(PROMPTS), {}
    for chunk in llm.stream(PROMPTS, LONG):
        texts[chunk.index] += chunk.text
        if chunk.output:
            outputs[chunk.index] = chunk.output
    assert [outputs[i].text for i in range(len(PROMPTS))] == texts
    assert [output.text for output in llm.generate(PROMPTS, LONG)] == texts


def test_prompts_that_cannot_be_served_fail_alone(tiny_llama: Path) -> None:
    llm = engine(tiny_llama, cache={"num_pages": 8, "page_size": 16}, scheduler={"max_model_len": 200})
    empty, fine, over_pool, over_model = llm.generate(["", "hello", "x" * 150, "x" * 250], LONG)
    assert empty.finish_reason == over_pool.finish_reason == over_model.finish_reason == "error"
    assert "the prompt is empty" in (empty.error or "")
    assert "150 tokens" in (over_pool.error or "")
    assert "250 tokens" in (over_model.error or "")
    assert fine.finish_reason == "length"
    assert "token id 999 is not in the vocabulary" in (llm.generate([[3, 999]])[0].error or "")
    assert fine.token_ids == tokens(engine(tiny_llama), ["hello"])[0]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("num_fine", [0, 1, 8])
def test_prompts_whose_logits_are_not_finite_fail_alone(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, num_fine: int, num_steps: int, ahead: bool
) -> None:
    """From a token on, whatever runs ahead; what they had until then stays, and nobody finds what came later."""
    plain = engine(tiny_llama).generate(PROMPTS, LONG)
    llm = engine(tiny_llama, scheduler={"decode_steps_per_launch": num_steps})
    llm.launches_ahead, choose, broken = ahead, Sampler.choose, {"1": float("nan"), "3": float("inf")}

    def at_some_token(sampler: Sampler, logits: torch.Tensor, requests: Any, num_ahead: int = 0) -> Any:
        logits = logits.clone()  # of inference mode
        for row, request in enumerate(requests):
            if request.request_id in broken and request.num_output_tokens + num_ahead >= num_fine:
                logits[row, 7] = broken[request.request_id]
        return choose(sampler, logits, requests, num_ahead)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "choose", at_some_token)
        chunks = list(llm.stream(PROMPTS, LONG))
    outputs = sorted((chunk.output for chunk in chunks if chunk.output), key=lambda output: output.index)
    for output, expected in zip(outputs, plain, strict=True):
        if output.index not in (1, 3):
            assert output == expected
            continue
        assert (output.finish_reason, output.token_ids) == ("error", expected.token_ids[:num_fine])
        assert "logits are not finite; check the model's weights" in (output.error or "")
        assert output.text == "".join(chunk.text for chunk in chunks if chunk.index == output.index)
        assert expected.text.startswith(output.text.rstrip("\ufffd"))
    assert llm.allocator.num_used == 0
    assert llm.generate(PROMPTS, LONG) == plain


def test_a_closed_stream_frees_everything(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    with pytest.raises(RuntimeError, match="already streaming"):
        llm.generate(["more"])
    stream.close()
    assert llm.allocator.num_used == 0
    assert not llm.scheduler.has_unfinished
    assert tokens(llm, PROMPTS) == tokens(engine(tiny_llama), PROMPTS)


def test_abort_ends_one_prompt(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    reasons = {}
    for chunk in llm.stream(PROMPTS, LONG):
        llm.abort(1)
        if chunk.output:
            reasons[chunk.index] = chunk.output.finish_reason
    assert reasons == {0: "length", 1: "abort", 2: "length", 3: "length", 4: "length"}


def test_stop_ids_and_strings_cut_the_text(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    whole = llm.generate(["one two three"], LONG)[0]
    by_id = llm.generate(["one two three"], SamplingParams(max_tokens=24, stop_token_ids=(whole.token_ids[5],)))[0]
    assert by_id.finish_reason == "stop"
    assert by_id.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[5]) + 1]
    at = max(i for i, char in enumerate(whole.text) if char.isascii() and char.isprintable())
    by_text = llm.generate(["one two three"], LONG.model_copy(update={"stop": (whole.text[at],)}))[0]
    assert by_text.finish_reason == "stop"
    assert by_text.text == whole.text.partition(whole.text[at])[0]


def test_seeds_do_not_depend_on_the_batch(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    drawn = SamplingParams(max_tokens=12, temperature=1.0, top_k=50, top_p=0.95, seed=7, ignore_eos=True)
    alone = llm.generate([PROMPTS[2]], drawn)[0].token_ids
    assert tokens(llm, PROMPTS, drawn)[2] == alone
    assert tokens(llm, [PROMPTS[2]], drawn.model_copy(update={"seed": 8}))[0] != alone


def test_wrong_calls(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    with pytest.raises(TypeError, match="pass a list"):
        llm.generate("one string")
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["a"], [LONG, LONG])
    with pytest.raises(ValueError, match="no chat template"):
        llm.render_prompt("hello", chat=True)
    assert llm.render_prompt("hello") == "hello"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_a_smaller_cache_dtype_runs(tiny_llama: Path, dtype: str) -> None:
    llm = engine(tiny_llama, cache={"num_pages": 64, "dtype": dtype})
    assert [len(ids) for ids in tokens(llm, PROMPTS)] == [24] * len(PROMPTS)
    assert llm.runner.pool.layers[0].key.dtype is getattr(torch, dtype)


def test_a_named_backend_is_used_or_refused(tmp_path: Path, tiny_llama: Path) -> None:
    assert engine(tiny_llama, backend="torch").selection.name == "TORCH"
    with pytest.raises(ValueError, match="TORCH"):
        engine(tmp_path / "no model, and never looked for", backend="TORHC")
    with pytest.raises(ValueError, match="cannot be used here"):
        engine(tiny_llama, device="meteor")
    for device in ("mps", "xla", "fpga"):  # of some torch says at length which kernels it has
        with pytest.raises(ValueError, match=r"^device '\w+' cannot be used here: .{9,120}\. Use auto, cpu or cuda$"):
            engine(tiny_llama, device=device)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="Use auto, cpu or cuda"):
            engine(tiny_llama, device="cuda")


def test_window_models_run_with_preemption(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "gemma2", "gemma2", tie_word_embeddings=False)
    small = engine(folder, cache={"num_pages": 16, "page_size": 4}, scheduler={"max_num_tokens": 9})
    assert tokens(small, PROMPTS) == tokens(engine(folder), PROMPTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_gpu_gives_the_same_tokens(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path / family, family, tie_word_embeddings=False)
    small = {"num_pages": 16, "page_size": 4}
    on_gpu = engine(folder, device="cuda", cache=small, scheduler={"max_num_tokens": 9})
    assert tokens(on_gpu, PROMPTS) == tokens(engine(folder, device="cpu"), PROMPTS)


def test_a_named_backend_refuses_before_weights_are_read(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.engine.llm.load_model", None)
    with pytest.raises(Unsupported, match="mla: got plain attention"):
        engine(tiny_llama, backend="TORCH_MLA")
    with pytest.raises(UnknownBackendError):
        engine(tiny_llama, backend="TORCHH")


def test_page_sizes_that_an_engine_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.interface.capabilities.gpu_mismatches", lambda *asked: [])  # as with a GPU
    plain, latent = {0: AttentionSpec(4, 2, 64)}, {0: MLASpec(16)}

    def sizes(**cache: int) -> list[int]:
        caches = possible_caches(EngineConfig.model_validate({"cache": cache}))
        assert {found.num_pages for found in caches} == {cache.get("num_pages", 1)}
        return [found.page_size for found in caches]

    def taken(backend: str, specs: Mapping[int, AttentionSpec], device: str, **cache: int) -> int:
        caches = possible_caches(EngineConfig.model_validate({"cache": cache}))
        return select_backend(backend, specs, caches, device).cache.page_size

    assert sizes() == sizes(num_pages=3) == [16, 32, 64, 128, 256]
    assert sizes(page_size=8) == [8]
    assert taken("TORCH", plain, "cuda") == taken("TORCH", plain, "cpu") == taken("TORCH_MLA", latent, "cpu") == 16
    assert taken("TORCH_MLA", latent, "cuda") == 64
    assert taken("TORCH_MLA", latent, "cuda", page_size=8) == 8

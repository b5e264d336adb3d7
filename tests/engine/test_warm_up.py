"""What an engine does before the first request: it leaves no trace in what requests get."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine import sampler
from attn_backends.engine.warm_up import (
    Product,
    ProductRecorder,
    Sized,
    rows_of_steps,
    run_products,
    run_steps,
    sizes_up_to,
    unlike,
)
from attn_backends.registry import get_backend
from attn_backends.spec import Limits
from tests.helpers.tiny_models import save_tiny

PROMPTS = ["a", "one two three", "the quick brown fox"]


def engine(folder: Path, **settings: object) -> LLM:
    given = {"cache": {"num_pages": 64}, "scheduler": {"max_num_requests": 6, "max_num_tokens": 48}} | settings
    return LLM.from_pretrained(folder, EngineConfig.model_validate(given))


def texts(llm: LLM) -> list[tuple[int, ...]]:
    sampling = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t) for t in (0.0, 1.0, 1.0)]
    return [output.token_ids for output in llm.generate(PROMPTS, sampling)]


@pytest.mark.parametrize("settings", [{}, {"cache": {"num_pages": 3, "page_size": 16}}], ids=["pool", "small_pool"])
def test_steps_leave_no_trace(tiny_llama: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, llm = texts(engine(tiny_llama, **settings)), engine(tiny_llama, **settings)
    limits, ran = Limits(6, 48, 256), []
    run, runner = llm.runner.run, llm.runner
    runner.run = lambda batch: (ran.append(batch.query_lens.tolist()), run(batch))[1]  # type: ignore[method-assign]
    copied: list[tuple[int, ...]] = []
    to_host = sampler._to_host
    monkeypatch.setattr(
        sampler, "_to_host", lambda steps: (copied.append((len(steps), *steps[0].shape)), to_host(steps))[1]
    )
    told: list[tuple[str, int, int | None]] = []
    run_steps(runner, llm.sampler, limits, llm.allocator.num_pages, 4, lambda *said: told.append(said))
    assert sorted(map(sum, ran), reverse=True)[0] == 48
    assert [1] * 6 in ran
    for num_rows in (1, 2, 3, 6):  # tokens and their logits, of each launch that may be on its way
        assert [copied.count((num_steps, num_rows)) >= 6 for num_steps in (1, 4)] == [True, True]
    assert told == [("running steps to warm up", done, len(ran)) for done in range(len(ran))]
    assert not runner._num_pages
    assert texts(llm) == expected
    assert llm.stats.num_prefix_hit_tokens == 0


def test_steps_of_any_limits_are_within_them() -> None:
    numbers = Random(0)
    for _ in range(300):
        limits = Limits(numbers.randint(1, 300), numbers.randint(1, 5000), 4096)
        longest = numbers.randint(1, 4096)
        sizes = []
        for rows in rows_of_steps(limits, longest):
            assert 1 <= len(rows) <= limits.max_num_requests
            assert all(new >= 1 and cached + new <= longest for cached, new in rows)
            assert [new for _, new in rows] == sorted(new for _, new in rows) or not rows[0][0]
            sizes.append(sum(new for _, new in rows))
        assert max(sizes) <= limits.max_num_tokens
        assert max(sizes) == min(limits.max_num_tokens, longest * limits.max_num_requests)
        assert min(sizes) == 1


def test_products_are_those_of_the_layers_at_other_sizes(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"accelerate": "off"}
    expected, llm = texts(engine(tiny_llama, **plain)), engine(tiny_llama, **plain)
    ran: list[tuple[set[tuple[int, ...]], int]] = []

    def run(product: Product, size: int) -> None:
        weights = {tuple(given.shape) for given in product.arguments if isinstance(given, torch.Tensor)}
        given = [given.empty(size) for given in product.arguments if isinstance(given, Sized)]
        assert all(tensor.shape.count(size) for tensor in given)
        assert bool(given)
        ran.append((weights, size))
        run_it(product, size)

    run_it = Product.run
    monkeypatch.setattr(Product, "run", run)
    run_products(llm.runner, llm.sampler, Limits(6, 48, 256), llm.allocator.num_pages, lambda *said: None)
    assert not llm.runner._num_pages
    shapes = {tuple(sorted(shape)) for weights, _ in ran for shape in weights if len(shape) == 2}
    linears = [module for module in llm.model.module.modules() if isinstance(module, torch.nn.Linear)]
    assert shapes == {tuple(sorted(linear.weight.shape)) for linear in linears}
    most = {
        shape: max(size for weights, size in ran if shape in {tuple(sorted(s)) for s in weights}) for shape in shapes
    }
    assert most.pop((64, 259)) == 6  # the logits of sampled rows alone
    assert set(most.values()) == {48}
    assert texts(llm) == expected


def test_a_product_keeps_its_layout_at_another_size() -> None:
    weight = torch.randn(3, 8, 5)
    given = torch.randn(7, 3, 8).transpose(0, 1)  # [3, 7, 8], the tokens in the middle and outermost in memory
    with ProductRecorder({7: 20}) as recorder:
        torch.bmm(given, weight)
        torch.bmm(given, weight)
        torch.mm(torch.randn(4, 8), weight[0])  # as long as no step is
    (product,) = recorder.products
    assert product.most == 20
    assert product.arguments[0].empty(11).shape == (3, 11, 8)
    assert product.arguments[0].empty(11).stride() == (8, 24, 1)
    assert product.arguments[1] is weight
    product.run(1)


def test_tensors_that_an_operator_does_not_define_are_defined() -> None:
    """torch takes a list with an undefined tensor from no mode. vLLM's FlashAttention 3 returns two, and an engine with
    it failed as it started."""

    def attention(*given: Any) -> list[torch.Tensor | None]:
        return [*given, None]

    attention.overloadpacket = SimpleNamespace(__name__="fwd")  # type: ignore[attr-defined]
    output = torch.zeros(2)
    first, second = ProductRecorder({7: 20}).__torch_dispatch__(attention, (), (output,))
    assert first is output
    assert second.numel() == 0


def test_sizes_of_products() -> None:
    for most in (*range(1, 300), *range(300, 9000, 37)):
        sizes = [*sizes_up_to(most)]
        assert sizes == sorted({*sizes})
        assert (sizes[0], sizes[-1]) == (1, most)
    assert unlike(8, {8, 7}) == 6
    assert unlike(3, {2, 3}) == 0


@pytest.mark.parametrize("limits", [(1, 1), (1, 2), (1, 7), (2, 2), (3, 3), (64, 64), (40, 200)])
def test_products_of_any_limits(tiny_llama: Path, limits: tuple[int, int]) -> None:
    scheduler = {"max_num_requests": limits[0], "max_num_tokens": limits[1]}
    llm = engine(tiny_llama, scheduler=scheduler)
    run_products(llm.runner, llm.sampler, Limits(*limits, 256), llm.allocator.num_pages, lambda *said: None)
    assert not llm.runner._num_pages


@pytest.mark.parametrize("limits", [(1, 48), (6, 36), (7, 49), (3, 7)])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v2"])
def test_attention_by_hand_is_no_product(family: str, limits: tuple[int, int], tmp_path: Path) -> None:
    """Its operands are all as long as the step, and logits twice: only products with weights run at other sizes."""
    scheduler = {"max_num_requests": limits[0], "max_num_tokens": limits[1]}
    backend = "TORCH_MLA" if family == "deepseek_v2" else "TORCH"
    llm = engine(save_tiny(tmp_path / family, family), scheduler=scheduler, backend=backend)
    run_products(llm.runner, llm.sampler, Limits(*limits, 256), llm.allocator.num_pages, lambda *said: None)
    assert not llm.runner._num_pages


def test_the_engine_compiles_before_it_captures(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    state = get_backend("TORCH").get_state_cls()
    monkeypatch.setattr(state, "warm_up", lambda state, progress=None: calls.append(progress))
    engine(tiny_llama, backend="TORCH")
    engine(tiny_llama, backend="TORCH", warm_up=False)
    assert len(calls) == 1
    assert callable(calls[0])

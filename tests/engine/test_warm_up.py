"""What an engine does before the first request: it leaves no trace in what requests get."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine.warm_up import rows_of_steps, run_steps
from attn_backends.registry import get_backend
from attn_backends.spec import Limits

PROMPTS = ["a", "one two three", "the quick brown fox"]


def engine(folder: Path, **settings: object) -> LLM:
    given = {"cache": {"num_pages": 64}, "scheduler": {"max_num_requests": 6, "max_num_tokens": 48}} | settings
    return LLM.from_pretrained(folder, EngineConfig.model_validate(given))


def texts(llm: LLM) -> list[tuple[int, ...]]:
    sampling = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t) for t in (0.0, 1.0, 1.0)]
    return [output.token_ids for output in llm.generate(PROMPTS, sampling)]


@pytest.mark.parametrize("settings", [{}, {"cache": {"num_pages": 3, "page_size": 16}}], ids=["pool", "small_pool"])
def test_steps_leave_no_trace(tiny_llama: Path, settings: dict[str, Any]) -> None:
    expected, llm = texts(engine(tiny_llama, **settings)), engine(tiny_llama, **settings)
    limits, ran = Limits(6, 48, 256), []
    run, runner = llm.runner.run, llm.runner
    runner.run = lambda batch: (ran.append(batch.query_lens.tolist()), run(batch))[1]  # type: ignore[method-assign]
    told: list[tuple[str, int, int | None]] = []
    run_steps(runner, llm.sampler, limits, llm.allocator.num_pages, lambda *said: told.append(said))
    assert sorted(map(sum, ran), reverse=True)[0] == 48
    assert [1] * 6 in ran
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


def test_the_engine_compiles_before_it_captures(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    state = get_backend("TORCH").get_state_cls()
    monkeypatch.setattr(state, "warm_up", lambda state, progress=None: calls.append(progress))
    engine(tiny_llama, backend="TORCH")
    engine(tiny_llama, backend="TORCH", warm_up=False)
    assert len(calls) == 1
    assert callable(calls[0])

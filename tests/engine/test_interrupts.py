"""Ctrl-C at every step of the books: all pages and rows come back, and the next call is as a new engine's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine import calls, live, llm as llm_module, page_allocator, request, runner, scheduler
from attn_backends.step import page_sets, rows

LONG = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [6, 5, 4]]
SMALL = {"cache": {"num_pages": 7, "page_size": 2}, "scheduler": {"max_num_tokens": 6}}  # requests are preempted
FILES = {module.__file__ for module in (calls, live, llm_module, page_allocator, request, runner, scheduler)} | {
    page_sets.__file__, rows.__file__
}  # fmt: skip

Tokens = list[tuple[int, ...]]


def engine(folder: Path) -> LLM:
    return LLM.from_pretrained(folder, EngineConfig.model_validate({"backend": "TORCH", "device": "cpu"} | SMALL))


def tokens(llm: LLM) -> Tokens:
    return [output.token_ids for output in llm.generate(PROMPTS, LONG)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The model is so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> Tokens:
    """What a new engine gives."""
    return tokens(engine(tiny_llama))


def check_all_is_back(llm: LLM) -> None:
    allocator, table = llm.allocator, llm.runner.table
    assert (allocator.num_used, sum(allocator._refcounts), len(llm._live)) == (0, 0, 0)
    assert sorted([*allocator._free, *allocator._cached]) == list(range(allocator.num_pages))
    assert allocator._page_of == {digest: page for page, digest in allocator._digest_of.items()}
    assert {*allocator._cached} == {*allocator._digest_of}
    books = (llm.scheduler.running, llm.scheduler.waiting, llm.scheduler._unfinished, llm.runner._num_pages)
    assert not any((*books, table.request_ids, table._row_of, table.num_pages.any(), table._sets._bits.any()))


@contextmanager
def watched(seen: Callable[[], None], event: str) -> Iterator[None]:
    """Call `seen` at each call or line of the engine's files."""

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "<genexpr>":
            return None  # what is raised as a generator is thrown away is lost
        if what == event:
            seen()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def number_of(llm: LLM, event: str) -> int:
    """How many calls or lines there are in one `generate`."""
    number = 0

    def seen() -> None:
        nonlocal number
        number += 1

    with watched(seen, event):
        tokens(llm)
    return number


def interrupt_at(llm: LLM, number: int, event: str) -> bool:
    """Run `generate` with a Ctrl-C at one call or line. Returns whether it came."""
    left, has_come = number, False

    def seen() -> None:
        nonlocal left, has_come
        left -= 1
        if left == -1:
            has_come = True
            raise KeyboardInterrupt

    try:
        with watched(seen, event):
            tokens(llm)
    except KeyboardInterrupt:
        pass
    return has_come


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("event", "stride"),
    [
        ("call", 19),
        ("line", 101),
        pytest.param("call", 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.sampled
def test_an_interrupt_anywhere_gives_everything_back(
    tiny_llama: Path, event: str, stride: int, ahead: bool, expected: Tokens
) -> None:
    """At calls is where Python looks for signals; between any two lines is more than they can do."""
    llm = engine(tiny_llama)
    llm.launches_ahead = ahead
    assert tokens(llm) == expected
    assert llm.stats.num_preemptions > 0
    for number in range(0, number_of(llm, event), stride):
        assert interrupt_at(llm, number, event)
        if event == "call":
            check_all_is_back(llm)
        assert tokens(llm) == expected
        check_all_is_back(llm)


@pytest.mark.parametrize("name", ["_publish", "_release", "_admit", "_grow", "update", "finish", "schedule"])
def test_an_interrupted_stream_gives_everything_back(tiny_llama: Path, name: str, expected: Tokens) -> None:
    llm = engine(tiny_llama)

    def interrupted(*_: Any) -> None:
        delattr(llm.scheduler, name)
        raise KeyboardInterrupt

    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    setattr(llm.scheduler, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    check_all_is_back(llm)
    assert tokens(llm) == expected


def test_an_interrupted_abort_ends_with_its_stream(tiny_llama: Path, expected: Tokens) -> None:
    llm = engine(tiny_llama)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    release, llm.scheduler._release = llm.scheduler._release, interrupted  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.abort(0)
    llm.scheduler._release = release  # type: ignore[method-assign]
    stream.close()  # type: ignore[attr-defined]
    check_all_is_back(llm)
    assert tokens(llm) == expected


def test_two_interrupts_are_made_up_for_by_the_next_call(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, expected: Tokens
) -> None:
    llm = engine(tiny_llama)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "_publish", interrupted)
        patch.setattr(llm.allocator, "free_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens(llm)
    assert llm.allocator.num_used > 0
    assert tokens(llm) == expected
    check_all_is_back(llm)


def test_published_pages_are_found_after_an_interrupt(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    llm.generate([PROMPTS[1]], LONG)
    assert interrupt_at(llm, 40, "call")
    llm.generate([PROMPTS[1]], LONG)
    assert llm.stats.num_prefix_hit_tokens == 6


def test_requests_of_which_none_can_run_are_told(tiny_llama: Path, expected: Tokens) -> None:
    llm = engine(tiny_llama)
    llm.allocator.allocate(6)  # pages that nobody gives back
    with pytest.raises(RuntimeError, match="3 requests have not ended and none can run, with 6 of 7 pages in use"):
        tokens(llm)
    assert tokens(llm) == expected


def test_a_stream_held_at_its_last_chunk_leaves_the_next_call_alone(tiny_llama: Path, expected: Tokens) -> None:
    llm = engine(tiny_llama)
    held = llm.stream([PROMPTS[0]], LONG)
    while not next(held).output:
        pass
    stream = llm.stream(PROMPTS, LONG)
    first = next(stream)
    assert [*held] == []
    outputs = [chunk.output for chunk in (first, *stream) if chunk.output]
    assert [output.token_ids for output in sorted(outputs, key=lambda output: output.index)] == expected

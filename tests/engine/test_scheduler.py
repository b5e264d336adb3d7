"""The scheduler with a model that is a function of the tokens found in the pages: wrong sharing changes its output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.engine.config import SamplingParams, SchedulerConfig
from attn_backends.engine.page_allocator import PageAllocator
from attn_backends.engine.request import Request, ScheduledBatch
from attn_backends.engine.scheduler import Scheduler

EOS = 0
VOCAB = 4  # so few that prompts and outputs often share pages
SALTS = [None, "tenant", "other tenant"]


def next_token(tokens: list[int]) -> int:
    """The fake model: depends on every token before."""
    state = len(tokens)
    for token in tokens:
        state = (state * 31 + token + 7) % 1009
    return state % VOCAB


def expected_output(prompt: list[int], sampling: SamplingParams, limit: int) -> tuple[list[int], str]:
    """What a request gives alone, without any scheduler."""
    tokens = list(prompt)
    while True:
        tokens.append(token := next_token(tokens))
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            return tokens[len(prompt) :], "stop"
        if len(tokens) - len(prompt) >= sampling.max_tokens or len(tokens) >= limit:
            return tokens[len(prompt) :], "length"


Launch = tuple[ScheduledBatch, list[list[int]]]  # and the tokens of its rows, step by step


class Engine:
    """Scheduler, allocator, and a pool whose slots hold (token, position, salt) in place of keys and values."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_pages: int,
        page_size: int,
        prefix_caching: bool = True,
        follow: str = "never",  # or "after" `update`, or "before" it: the host then learns of tokens one launch later
    ) -> None:
        self.config = config
        self.follow = follow
        self.launch: Launch | None = None  # whose tokens the scheduler has not seen
        self.allocator = PageAllocator(num_pages, page_size, prefix_caching)
        self.scheduler = Scheduler(config, self.allocator, config.max_model_len or 10_000)
        self.pool = np.full((num_pages * page_size, 3), -1, np.int64)
        self.batches: list[ScheduledBatch] = []

    def add(
        self, name: str, prompt: list[int], priority: int = 0, cache_salt: str | None = None, **sampling: object
    ) -> Request:
        request = Request(name, prompt, SamplingParams.model_validate(sampling), priority, cache_salt)
        self.scheduler.add(request)
        return request

    def step(self) -> bool:
        launch = self.launch or self._launch(self.scheduler.schedule())
        if launch is None:
            assert not self.scheduler.has_unfinished
            return False
        batch, each = launch
        ahead = self._launch(self.scheduler.follow(batch), each[-1]) if self.follow == "before" else None
        for tokens in each:
            finished = self.scheduler.update(batch, tokens, frozenset({EOS}))
            assert all(request.finish_reason and not request.num_pages for request in finished)
        self._check_pages()
        self.launch = self._launch(self.scheduler.follow(batch), each[-1]) if self.follow == "after" else ahead
        return True

    def _launch(self, batch: ScheduledBatch | None, last_tokens: list[int] | None = None) -> Launch | None:
        """Run all steps of a batch, at once: a device does the same, in order."""
        if batch is None:
            return None
        self.batches.append(batch)
        ids = np.array(last_tokens) if batch.follows else batch.token_ids
        self._check(replace(batch, token_ids=ids))
        each: list[list[int]] = []
        for done in range(batch.num_steps):
            step = replace(batch, token_ids=ids, context_lens=batch.context_lens + np.int32(done))
            tokens = self._forward(step)
            each.append([tokens[row] for row in batch.sample_rows])
            ids = np.array(each[-1])
        return batch, each

    def run(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"not done after {most_steps} steps")

    def _check(self, batch: ScheduledBatch) -> None:
        assert len(batch.requests) <= self.config.max_num_requests
        assert batch.query_lens.min() >= 1
        assert batch.query_lens.sum() == len(batch.token_ids) == len(batch.positions) <= self.config.max_num_tokens
        assert (batch.query_lens > 1).tolist() == sorted(batch.query_lens > 1)  # short rows first
        assert batch.context_lens.dtype == batch.query_lens.dtype == np.int32
        assert set(batch.requests) <= set(self.scheduler.running)
        self._check_pages()

    def _check_pages(self) -> None:
        held = {page for request in self.scheduler.running for page in request.page_ids.tolist()}
        assert self.allocator.num_used == len(held)
        assert not any(request.num_pages or request.num_computed_tokens for request in self.scheduler.waiting)

    def _forward(self, batch: ScheduledBatch) -> list[int]:
        """Write all new tokens through the builders' own slot mapping, then read back every row's whole history."""
        page_size = self.allocator.page_size
        groups = batch.groups()
        slots = CommonAttentionMetadata.from_sequence_groups(groups, page_size).slot_mapping.numpy()
        owners = [page for request in self.scheduler.running for page in set(request.page_ids.tolist())]
        assert all(owners.count(page) == 1 for page in set((slots // page_size).tolist()))  # no write to a shared page
        salts = np.array([SALTS.index(request.cache_salt) for request in batch.requests])
        self.pool[slots] = np.stack([batch.token_ids, batch.positions, salts.repeat(batch.query_lens)], axis=1)
        tokens = []
        for request, group in zip(batch.requests, groups, strict=True):
            (row,) = group.sequences
            positions = np.arange(row.seq_len)
            history = self.pool[np.asarray(row.pages)[positions // page_size] * page_size + positions % page_size]
            known = request.token_ids[: row.seq_len]
            assert history[: len(known), 0].tolist() == known
            assert history[:, 1].tolist() == positions.tolist()
            assert set(history[:, 2].tolist()) == {SALTS.index(request.cache_salt)}  # nobody else's pages
            tokens.append(next_token(history[:, 0].tolist()))
        return tokens


# Prompts share beginnings, and pools hold about two requests: most loads preempt or find prefixes.
SHARED = [1, 2, 3, 1, 0, 2, 2, 3, 1, 3]
prompts = st.tuples(st.integers(0, 10), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
often, seldom = st.sampled_from([True, True, False]), st.sampled_from([False, False, True])
salts = st.sampled_from([None, *SALTS])
requests = st.tuples(
    prompts.map(lambda p: SHARED[: p[0]] + p[1]), st.integers(0, 2), st.integers(1, 16), often, seldom, salts
)


@settings(max_examples=150, deadline=None)
@given(
    load=st.lists(requests, min_size=2, max_size=8),
    pool_tokens=st.integers(8, 44),
    page_size=st.integers(1, 4),
    max_num_requests=st.integers(1, 5),
    max_num_tokens=st.integers(1, 24),
    max_model_len=st.sampled_from([None, None, 12]),
    chunked=often,
    prefix_caching=often,
    follow=st.sampled_from(["never", "after", "before"]),
    num_steps=st.sampled_from([1, 1, 2, 5]),
    data=st.data(),
)
def test_any_load_gives_each_request_what_it_gives_alone(
    load: list[tuple[list[int], int, int, bool, bool, str | None]],
    pool_tokens: int,
    page_size: int,
    max_num_requests: int,
    max_num_tokens: int,
    max_model_len: int | None,
    chunked: bool,
    prefix_caching: bool,
    follow: str,
    num_steps: int,
    data: st.DataObject,
) -> None:
    config = SchedulerConfig(
        max_num_requests=max_num_requests,
        max_num_tokens=max_num_tokens,
        max_model_len=max_model_len,
        chunked_prefill=chunked,
        decode_steps_per_launch=num_steps,
    )
    num_pages = -(-pool_tokens // page_size)
    engine = Engine(config, num_pages, page_size, prefix_caching, follow)
    limit = min(max_model_len or 10_000, num_pages * page_size)
    added = []
    for i, (prompt, priority, max_tokens, ignore_eos, with_stop, salt) in enumerate(load):
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
        if added and data.draw(st.integers(0, 9)) == 0:
            engine.scheduler.abort(data.draw(st.sampled_from(added)).request_id)
        stop = [VOCAB - 1] if with_stop else []
        sampling = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "stop_token_ids": stop}
        added.append(engine.add(str(i), prompt, priority, salt, **sampling))
    engine.run()
    for request in added:
        prompt = request.prompt_token_ids
        if request.finish_reason == "error":
            assert len(prompt) >= limit or (not chunked and len(prompt) > max_num_tokens)
            continue
        output, reason = expected_output(prompt, request.sampling, limit)
        if request.finish_reason == "abort":
            assert request.output_token_ids == output[: request.num_output_tokens]
        else:
            assert (request.output_token_ids, request.finish_reason) == (output, reason)
    assert engine.allocator.num_used == 0
    assert engine.scheduler.num_preemptions == sum(request.num_preemptions for request in added)
    assert engine.scheduler.num_prefix_hit_tokens == sum(request.num_prefix_hit_tokens for request in added)


@pytest.mark.parametrize(("follow", "num_steps"), [("after", 1), ("before", 1), ("before", 4)])
def test_batches_follow_until_a_request_ends_or_comes(follow: str, num_steps: int) -> None:
    config = SchedulerConfig(decode_steps_per_launch=num_steps)
    engine = Engine(config, num_pages=32, page_size=2, follow=follow)
    short = engine.add("short", [1, 2, 3], max_tokens=9, ignore_eos=True)
    long = engine.add("long", [3, 2, 1], max_tokens=21, ignore_eos=True)
    for _ in range(2):
        engine.step()
    late = engine.add("late", [2, 2], max_tokens=5, ignore_eos=True)
    engine.run()
    for request in (short, long, late):
        assert request.output_token_ids == expected_output(request.prompt_token_ids, request.sampling, 64)[0]
    following = [batch for batch in engine.batches if batch.follows]
    assert any(len(batch.grown_rows) for batch in following)
    assert max(batch.num_steps for batch in engine.batches) == num_steps
    assert {len(batch.requests) for batch in following} == ({1, 2, 3} if num_steps == 1 else {1, 2})
    assert engine.allocator.num_used == 0


def test_nothing_follows_where_the_scheduler_has_to_choose() -> None:
    engine = Engine(SchedulerConfig(max_num_tokens=4), num_pages=8, page_size=2, prefix_caching=False)
    first = engine.add("first", [1, 2], max_tokens=12, ignore_eos=True)
    prompt = engine.scheduler.schedule()
    assert prompt is not None
    assert engine.scheduler.follow(prompt) is None, "two tokens a row"
    engine.scheduler.update(prompt, [1], frozenset())
    decode = engine.scheduler.schedule()
    assert decode is not None
    waiting = engine.add("waiting", [3, 3, 3], max_tokens=2)
    assert engine.scheduler.follow(decode) is None, "someone can be admitted"
    engine.scheduler.abort(waiting.request_id)
    following = engine.scheduler.follow(decode)
    assert following is not None
    assert (following.context_lens.tolist(), following.grown_rows.tolist()) == ([3], [])
    assert following.num_ahead == 1
    engine.scheduler.update(decode, [2], frozenset())
    assert following.num_ahead == 0
    engine.scheduler.abort(first.request_id)
    assert engine.scheduler.follow(following) is None, "its request is gone"


def test_preemption_gives_the_same_tokens_and_finds_its_pages_again() -> None:
    engine = Engine(SchedulerConfig(), num_pages=7, page_size=4)
    first = engine.add("first", [1, 2, 3, 1, 2], max_tokens=16, ignore_eos=True)
    second = engine.add("second", [3, 2, 1, 3, 3], max_tokens=16, ignore_eos=True)
    engine.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)  # the later one gives way
    for request in (first, second):
        assert request.output_token_ids == expected_output(request.prompt_token_ids, request.sampling, 28)[0]
    assert engine.scheduler.num_preemptions == 1
    assert engine.scheduler.num_prefix_hit_tokens == 0  # pages found again after a preemption are not counted
    (resumed,) = [b for b in engine.batches if second in b.requests and b.query_lens[-1] > 1][1:]
    assert resumed.context_lens.tolist() == [8]  # two of its pages were still cached


def test_pages_computed_again_after_a_preemption_can_be_found() -> None:
    engine = Engine(SchedulerConfig(), num_pages=8, page_size=2)
    engine.add("first", [1, 2, 3], max_tokens=13, ignore_eos=True)  # ends up with all pages
    second = engine.add("second", [3, 3, 3], max_tokens=9, ignore_eos=True)
    engine.run()
    assert second.num_preemptions == 1
    follow_up = engine.add("follow-up", second.token_ids, max_tokens=1)
    engine.run()
    assert follow_up.num_prefix_hit_tokens == 10


def test_without_chunked_prefill_a_preempted_request_may_outgrow_a_step() -> None:
    config = SchedulerConfig(max_num_tokens=4, chunked_prefill=False)
    engine = Engine(config, num_pages=6, page_size=2, prefix_caching=False)
    engine.add("first", [1, 2, 3], max_tokens=8, ignore_eos=True)
    second = engine.add("second", [3, 3, 3], max_tokens=8, ignore_eos=True)
    engine.run()
    resumed = [b for b in engine.batches if second in b.requests and b.query_lens[-1] > 1][1:]
    assert second.num_preemptions == 1
    assert [b.query_lens.tolist() for b in resumed] == [[4], [2]]
    assert second.output_token_ids == expected_output([3, 3, 3], second.sampling, 12)[0]


def test_admission_leaves_a_page_for_each_running_request() -> None:
    engine = Engine(SchedulerConfig(), num_pages=8, page_size=4)
    for name in "abcd":
        engine.add(name, [1, 2, 3, 1, 2], max_tokens=8, ignore_eos=True)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a", "b", "c"]  # 6 pages, 2 left
    engine.run()


def test_a_preempted_request_comes_before_later_arrivals() -> None:
    engine = Engine(SchedulerConfig(max_num_requests=2), num_pages=6, page_size=2, prefix_caching=False)
    early = [engine.add(name, [1, 2, 3], max_tokens=6, ignore_eos=True) for name in "ab"]
    late = engine.add("c", [1, 2, 3], max_tokens=6, ignore_eos=True)
    while not early[1].num_preemptions:
        engine.step()
    assert engine.scheduler.waiting == [early[1], late]
    engine.run()
    assert early[1].num_output_tokens == late.num_output_tokens == 6


def test_first_come_first_served_within_a_priority() -> None:
    engine = Engine(SchedulerConfig(max_num_requests=1), num_pages=8, page_size=4)
    names = [("a", 1), ("b", 0), ("c", 1), ("d", 0)]
    for name, priority in names:
        engine.add(name, [1, 2], priority, max_tokens=1)
    engine.run()
    assert [b.requests[0].request_id for b in engine.batches] == ["b", "d", "a", "c"]


def test_a_large_first_request_is_not_overtaken() -> None:
    engine = Engine(SchedulerConfig(), num_pages=8, page_size=2)
    engine.add("running", [1, 2, 3, 1, 2, 3, 1], max_tokens=5, ignore_eos=True)
    engine.step()
    large = engine.add("large", [2] * 9, max_tokens=1)
    small = engine.add("small", [3], max_tokens=1)
    engine.step()
    assert engine.scheduler.waiting == [large, small]
    engine.run()


def test_chunked_prefill_keeps_to_the_budget_beside_decodes() -> None:
    engine = Engine(SchedulerConfig(max_num_tokens=4), num_pages=16, page_size=4)
    engine.add("decoding", [1, 2], max_tokens=8, ignore_eos=True)
    engine.step()
    long = engine.add("long", [3, 2, 1, 2, 3, 2, 1, 1], max_tokens=2, ignore_eos=True)
    engine.run()
    steps = [b for b in engine.batches if long in b.requests]
    assert [b.query_lens.tolist() for b in steps] == [[1, 3], [1, 3], [1, 2], [1, 1]]
    assert [b.context_lens.tolist()[1] for b in steps] == [0, 3, 6, 8]
    assert [b.sample_rows.tolist() for b in steps] == [[0], [0], [0, 1], [0, 1]]
    assert steps[1].positions.tolist() == [3, 3, 4, 5]


def test_a_prompt_of_higher_priority_does_not_hold_up_decoding() -> None:
    engine = Engine(SchedulerConfig(max_num_tokens=4), num_pages=16, page_size=4)
    decoding = engine.add("decoding", [1, 2], priority=1, max_tokens=8, ignore_eos=True)
    engine.step()
    engine.add("urgent", [3, 2, 1, 2, 3, 2, 1, 1], priority=0, max_tokens=1)
    engine.run()
    assert all(decoding in b.requests for b in engine.batches)


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step() -> None:
    engine = Engine(SchedulerConfig(max_num_tokens=6, chunked_prefill=False), num_pages=16, page_size=4)
    engine.add("first", [1, 2, 3, 1], max_tokens=1)
    engine.add("second", [3, 2, 1], max_tokens=1)
    refused = engine.add("third", [1] * 7)
    engine.run()
    assert [b.query_lens.tolist() for b in engine.batches] == [[4], [3]]
    assert refused.error is not None
    assert "7 tokens and a step takes 6: turn scheduler.chunked_prefill on" in refused.error


def test_prefix_hits_are_counted_and_one_token_is_always_computed() -> None:
    engine = Engine(SchedulerConfig(), num_pages=16, page_size=4)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    first = engine.add("first", prompt, max_tokens=1)
    engine.run()
    same, longer = engine.add("same", prompt, max_tokens=1), engine.add("longer", [*prompt, 3], max_tokens=1)
    engine.run()
    assert [r.num_prefix_hit_tokens for r in (first, same, longer)] == [0, 4, 8]
    assert engine.scheduler.num_prefix_hit_tokens == 12
    assert sorted(engine.batches[-1].query_lens.tolist()) == [1, 4]
    assert first.output_token_ids == same.output_token_ids


def test_prefixes_are_shared_under_one_salt_alone() -> None:
    """Also what was generated behind a prompt, and what was published when a request gave up its pages."""
    engine = Engine(SchedulerConfig(), num_pages=64, page_size=2)
    prompt, found = [1, 2, 3, 1, 2, 3, 1, 2, 3], []
    for salt in (None, "tenant", "tenant", "other tenant", None, "other tenant", "tenant"):
        request = engine.add("same", prompt, cache_salt=salt, max_tokens=4, ignore_eos=True)
        engine.run()
        longer = engine.add("longer", request.token_ids, cache_salt=salt, max_tokens=1)
        engine.run()
        found.append((request.num_prefix_hit_tokens, longer.num_prefix_hit_tokens))
    assert found == [(0, 12), (0, 12), (8, 12), (0, 12), (8, 12), (8, 12), (8, 12)]
    engine, found = Engine(SchedulerConfig(), num_pages=64, page_size=8), []
    for salt in (None, "tenant", None):  # a first page that generated tokens fill
        request = engine.add("short", [1], cache_salt=salt, max_tokens=12, ignore_eos=True)
        engine.run()
        longer = engine.add("longer", request.token_ids, cache_salt=salt, max_tokens=1)
        engine.run()
        found.append((request.num_prefix_hit_tokens, longer.num_prefix_hit_tokens))
    assert found == [(0, 8)] * 3


@pytest.mark.parametrize(
    ("salt", "error", "message"),
    [
        (b"tenant", TypeError, "cache_salt is b'tenant' of type bytes; pass a string, or None"),
        (7, TypeError, "cache_salt is 7 of type int"),
        ("", ValueError, "cache_salt is empty: .* pass a name, or None"),
    ],
)
def test_salts_that_are_refused(salt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Request("r", [1], SamplingParams(), cache_salt=salt)


def test_generated_pages_are_found_by_the_next_turn() -> None:
    engine = Engine(SchedulerConfig(), num_pages=16, page_size=2)
    turn = engine.add("turn", [1, 2, 3], max_tokens=4, ignore_eos=True)
    engine.run()
    follow_up = engine.add("follow-up", [*turn.token_ids, 1], max_tokens=1)
    engine.run()
    assert follow_up.num_prefix_hit_tokens == 6  # all but the token that was never fed back, and the new one


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 40, "40 tokens and a request may have 40, new ones included: shorten the prompt to 39"),
        ([1] * 32, "32 tokens; with one new token it needs 9 pages of 4, and the pool has 8: raise cache.memory"),
    ],
)
def test_a_request_that_can_never_run_fails_alone(prompt: list[int], message: str) -> None:
    engine = Engine(SchedulerConfig(max_model_len=40), num_pages=8, page_size=4)
    bad, good = engine.add("bad", prompt), engine.add("good", [1, 2], max_tokens=2, ignore_eos=True)
    engine.run()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert bad.error is not None
    assert message in bad.error


@pytest.mark.parametrize(("max_model_len", "num_pages", "length"), [(9, 8, 9), (100, 3, 12)])
def test_model_and_pool_limit_the_length(max_model_len: int, num_pages: int, length: int) -> None:
    engine = Engine(SchedulerConfig(max_model_len=max_model_len), num_pages, page_size=4)
    request = engine.add("long", [1, 2, 3], max_tokens=50, ignore_eos=True)
    engine.run()
    assert (len(request.token_ids), request.finish_reason) == (length, "length")


def test_abort_frees_a_running_and_a_waiting_request() -> None:
    engine = Engine(SchedulerConfig(max_num_requests=1), num_pages=8, page_size=4)
    running, waiting = engine.add("running", [1, 2, 3]), engine.add("waiting", [1, 2, 3])
    engine.step()
    assert engine.allocator.num_used == 1
    for request in (running, waiting):
        engine.scheduler.abort(request.request_id)
        engine.scheduler.abort(request.request_id)  # twice is no error
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")
    assert not engine.scheduler.has_unfinished
    assert engine.allocator.num_used == 0
    assert engine.scheduler.schedule() is None


def test_pages_of_a_prompt_aborted_half_way_are_found_only_as_far_as_computed() -> None:
    engine = Engine(SchedulerConfig(max_num_tokens=5), num_pages=16, page_size=2)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    engine.add("aborted", prompt)
    engine.step()
    engine.scheduler.abort("aborted")
    again = engine.add("again", prompt, max_tokens=1)
    engine.run()
    assert again.num_prefix_hit_tokens == 4


def test_a_request_aborted_while_the_step_runs_keeps_its_tokens() -> None:
    engine = Engine(SchedulerConfig(), num_pages=8, page_size=4)
    gone, stays = engine.add("gone", [1, 2, 3]), engine.add("stays", [3, 2, 1])
    batch = engine.scheduler.schedule()
    assert batch is not None
    engine.scheduler.abort("gone")
    engine.scheduler.update(batch, [1, 2], frozenset())
    assert (gone.output_token_ids, stays.output_token_ids) == ([], [2])
    with pytest.raises(ValueError, match="1 tokens for 2 sampling rows"):
        engine.scheduler.update(batch, [1], frozenset())


def test_pages_of_a_request_that_failed_are_not_found() -> None:
    engine = Engine(SchedulerConfig(), num_pages=16, page_size=2)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    failed, over = engine.add("failed", prompt), engine.add("over", [3, 2, 1])
    engine.step()
    engine.scheduler.finish(over, "length")
    for request in (failed, over, failed):
        engine.scheduler.fail(request, "why")
    assert (failed.finish_reason, failed.error, failed.output_token_ids) == ("error", "why", failed.token_ids[8:])
    assert (over.finish_reason, over.error) == ("length", None)
    assert (engine.allocator.num_used, engine.scheduler.has_unfinished) == (0, False)
    again = engine.add("again", prompt, max_tokens=1)
    engine.run()
    assert (again.num_prefix_hit_tokens, again.finish_reason) == (0, "length")


def test_finish_by_the_caller() -> None:
    engine = Engine(SchedulerConfig(), num_pages=8, page_size=4)
    request = engine.add("text", [1, 2, 3])
    engine.step()
    engine.scheduler.finish(request, "stop")  # as for a stop string
    assert (request.finish_reason, engine.allocator.num_used) == ("stop", 0)
    again = engine.add("text", [1, 2, 3])  # the id is free again
    engine.scheduler.finish(request, "length")
    assert engine.scheduler.waiting == [again]
    with pytest.raises(ValueError, match="'text' is in use"):
        engine.add("text", [1])


def test_pages_of_a_request_grow_in_place() -> None:
    request = Request("r", [1], SamplingParams())
    for start in range(0, 60, 3):
        request.add_pages(np.arange(start, start + 3, dtype=np.int32))
    assert request.page_ids.tolist() == list(range(60))
    assert request.page_ids.dtype == np.int32
    assert request.page_ids.base is not None  # a view, not a copy
    request.clear_cache()
    assert request.num_pages == len(request.page_ids) == 0


def test_a_batch_in_another_order_samples_the_same_requests() -> None:
    """Of rows that go round in a circle, where an order is not its own opposite."""
    lens = [(0, 3), (4, 1), (2, 2)]  # tokens computed, and computed now
    requests = [
        Request(f"r{i}", list(range(10 * i, 10 * i + done + new + (i == 0))), SamplingParams())
        for i, (done, new) in enumerate(lens)
    ]
    for request, (done, _) in zip(requests, lens, strict=True):
        request.num_computed_tokens = done
    batch = ScheduledBatch.from_rows([(request, new) for request, (_, new) in zip(requests, lens, strict=True)])
    assert batch.sample_rows.tolist() == [1, 2]
    ordered = batch.in_order([1, 2, 0])
    assert [request.request_id for request in ordered.requests] == ["r1", "r2", "r0"]
    assert ordered.sample_rows.tolist() == [0, 1]
    assert [request.request_id for request in ordered.sampled] == ["r1", "r2"]
    assert ordered.token_ids.tolist() == [14, 22, 23, 0, 1, 2]

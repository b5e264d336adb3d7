"""Which tokens of which requests a step computes: continuous batching over a pool of pages. Host only, no tensors."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray

from attn_backends.batch.common import SequenceData, SequenceGroup
from attn_backends.batch.page_table import IntArray, token_positions
from attn_backends.engine.config import SchedulerConfig
from attn_backends.engine.page_allocator import PageAllocator
from attn_backends.engine.request import FinishReason, Request

_NONE: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True)
class ScheduledBatch:
    """One step's work. R rows, one a request, those with one new token first; T new tokens in all.

    It describes the requests as they are now: use it before the scheduler is called again.

    A batch that `follows` the one before has its rows, in their order, and each row's new token is the one that the
    last step sampled for it: nobody but the device has to know it.
    """

    requests: tuple[Request, ...]  # R
    context_lens: IntArray  # [R] i32, tokens already in the cache
    query_lens: IntArray  # [R] i32, new tokens, at least 1
    token_ids: NDArray[np.int64]  # [T] the new tokens, row after row; of a batch that follows [0]
    sample_rows: IntArray  # rows whose last new token is their last known one; chunks inside a prompt are not
    num_steps: int = 1  # decode steps to run before `update`; above 1 all rows decode, and own the pages for it
    follows: bool = False
    grown_rows: NDArray[np.int64] = field(default_factory=lambda: _NONE)  # [G] if it follows: rows that have new pages

    @property
    def positions(self) -> NDArray[np.int64]:  # [T]
        return token_positions(self.context_lens, self.query_lens)[1]

    @property
    def sampled(self) -> list[Request]:
        """The requests of `sample_rows`."""
        return [self.requests[row] for row in self.sample_rows.tolist()]

    @property
    def num_ahead(self) -> int:
        """Tokens that were sampled for each row and that the requests do not hold yet."""
        return int(self.context_lens[0]) + 1 - len(self.requests[0].token_ids) if self.follows else 0

    @property
    def is_decode(self) -> bool:
        """Whether every row has one new token, and samples the next."""
        num_rows = len(self.requests)
        return len(self.sample_rows) == num_rows and (self.follows or len(self.token_ids) == num_rows)

    @staticmethod
    def from_rows(rows: Sequence[tuple[Request, int]], num_steps: int = 1) -> ScheduledBatch:
        """Requests, in the order of the batch, with how many of their pending tokens are computed now."""
        requests = tuple([request for request, _ in rows])
        starts, counts = [request.num_computed_tokens for request in requests], [count for _, count in rows]
        known = [len(request.token_ids) for request in requests]
        sample = [row for row, (c, n, end) in enumerate(zip(starts, counts, known, strict=True)) if c + n == end]
        spans = [request.token_ids[c : c + n] for request, c, n in zip(requests, starts, counts, strict=True)]
        return ScheduledBatch(
            requests,
            np.array(starts, np.int32),
            np.array(counts, np.int32),
            np.array(list(chain.from_iterable(spans)), np.int64),
            np.array(sample, np.int32),
            num_steps,
        )

    def in_order(self, order: NDArray[np.int64] | Sequence[int]) -> ScheduledBatch:
        """The same work with row `order[i]` as row i."""
        index = np.asarray(order, np.int64)
        requests = tuple([self.requests[row] for row in index.tolist()])
        context_lens, query_lens = self.context_lens[index], self.query_lens[index]
        starts = np.cumsum(self.query_lens, dtype=np.int64) - self.query_lens  # of the rows' tokens as they were
        tokens = self.token_ids[token_positions(starts[index], query_lens)[1]]
        samples = np.zeros(len(index), np.bool_)
        samples[self.sample_rows] = True
        sample_rows = np.flatnonzero(samples[index]).astype(np.int32)
        return ScheduledBatch(requests, context_lens, query_lens, tokens, sample_rows, self.num_steps)

    def groups(self) -> list[SequenceGroup]:
        """What metadata builders take: one group a row, with a view of the request's pages."""
        lens = zip(self.context_lens.tolist(), self.query_lens.tolist(), strict=True)
        return [
            SequenceGroup(request.request_id, (SequenceData(context_len, query_len, request.page_ids),))
            for request, (context_len, query_len) in zip(self.requests, lens, strict=True)
        ]


class Scheduler:
    """First come first served within a priority, with chunked prefill, prefix caching and preemption by recompute.

    A request is admitted when pages for all of its known tokens are there, so that only decoding asks for more.
    When there are none, the last running request in order of service gives all of its pages back and waits; later
    its tokens are computed again and it goes on where it was. The first one is never preempted, so every request ends.

    Args:
        max_model_len: most tokens of one request, prompt and new ones. The pool's size may set a lower limit.
    """

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator, max_model_len: int) -> None:
        self.config = config
        self.allocator = allocator
        self.max_model_len = max_model_len
        self.pool_tokens = allocator.num_pages * allocator.page_size
        self.running: list[Request] = []  # in order of service
        self.waiting: list[Request] = []  # in order of service
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0  # tokens of prompts that were found in the prefix cache
        self.num_new_tokens = 0  # given to requests
        self.on_release: Callable[[Request], None] = lambda request: None  # told when a request's pages are freed
        self.on_finish: Callable[[Request], None] = lambda request: None  # told when a request has ended
        self._unfinished: dict[str, Request] = {}
        self._arrivals = count()
        self._is_settled = False  # nobody has begun or ceased to run since the last batch

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run is not queued: its `finish_reason` becomes "error".

        Raises:
            ValueError: its id is taken by a request that has not finished.
        """
        if request.request_id in self._unfinished:
            raise ValueError(f"request id {request.request_id!r} is in use: choose another, or abort that one first")
        request.arrival = next(self._arrivals)
        request.last_len = min(
            self.max_model_len, self.pool_tokens, request.num_prompt_tokens + request.sampling.max_tokens
        )
        if error := self._why_never(request):
            self.refuse(request, error)
        else:
            self._unfinished[request.request_id] = request
            insort(self.waiting, request, key=_order)

    def schedule(self) -> ScheduledBatch | None:
        """The next step's batch, its pages allocated; None if nothing is left to do. `update` must follow."""
        budget, page_size = self.config.max_num_tokens, self.allocator.page_size
        rows: list[tuple[Request, int]] = []
        # Prompts under way hold all their pages, so taking decodes first cannot preempt a request already in `rows`.
        decodes, prompts = self._by_kind()
        for request in chain(decodes, prompts):
            known = len(request.token_ids)
            if budget and (known <= request.num_pages * page_size or self._secure_pages(request)):
                rows.append((request, min(known - request.num_computed_tokens, budget)))
                budget -= rows[-1][1]
        if self.waiting:
            self._publish_running()
        while self.waiting and budget and len(self.running) < self.config.max_num_requests:
            request = self.waiting[0]
            if not self._admit(request, budget):
                break
            rows.append((request, min(request.num_pending_tokens, budget)))
            budget -= rows[-1][1]
        if self.config.max_num_tokens - budget > len(rows):
            rows.sort(key=lambda row: row[1] > 1)
        self._is_settled = len(rows) == len(self.running)
        return ScheduledBatch.from_rows(rows, self._secure_steps(rows)) if rows else None

    def follow(self, batch: ScheduledBatch) -> ScheduledBatch | None:
        """The batch that follows the last one, pages allocated; None if `schedule` has to look at the requests first.

        `update` of the last batch may come before or after. If after, the device can run on while the host looks at
        tokens; what is then computed for a request that has ended meanwhile is dropped.
        """
        if not self._is_settled or not batch.is_decode or self._can_admit(len(batch.requests)):
            return None
        context_lens = batch.context_lens + batch.num_steps
        ends = np.array([request.last_len for request in batch.requests], np.int32)
        num_steps = min(self.config.decode_steps_per_launch, int((ends - context_lens).min()) - 1)
        if num_steps < 1:
            return None  # a row ends with the last batch
        pages = np.array([request.num_pages for request in batch.requests], np.int32)
        for most in (num_steps, 1):  # several only if nobody has to be preempted for them
            missing = np.maximum(-(-(context_lens + most) // self.allocator.page_size) - pages, 0)
            if missing.sum() <= self.allocator.num_available:
                rows = self._grow(batch.requests, missing)
                return replace(
                    batch, context_lens=context_lens, token_ids=_NONE, num_steps=most, follows=True, grown_rows=rows
                )
        return None

    def update(
        self, batch: ScheduledBatch, sampled_token_ids: Sequence[int], eos_token_ids: frozenset[int]
    ) -> list[Request]:
        """Take in a step's result: one token for each of `batch.sample_rows`. Returns the requests that it finished.

        After a batch of several steps it is called once for each of them, in order, with the same batch.
        A request that was aborted or finished while the step ran is left as it is, and its token dropped.
        """
        if len(sampled_token_ids) != len(batch.sample_rows):
            raise ValueError(
                f"{len(sampled_token_ids)} tokens for {len(batch.sample_rows)} sampling rows: "
                "pass one token for each of batch.sample_rows, in their order"
            )
        for request, query_len in zip(batch.requests, batch.query_lens.tolist(), strict=True):
            if not request.finish_reason:
                request.num_computed_tokens += query_len
        pairs = zip(batch.sampled, sampled_token_ids, strict=True)
        live = [(request, token) for request, token in pairs if not request.finish_reason]
        self.num_new_tokens += len(live)
        finished = []
        for request, token in live:
            request.token_ids.append(token)
            if reason := self._why_finished(request, token, eos_token_ids):
                self.finish(request, reason)
                finished.append(request)
        return finished

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and free its pages. For one that has ended already, only the reason changes."""
        request.finish_reason = reason
        if self._unfinished.get(request.request_id) is request:
            del self._unfinished[request.request_id]
            (self.running if request in self.running else self.waiting).remove(request)
            self._release(request)
            self.on_finish(request)

    def refuse(self, request: Request, error: str) -> None:
        """End a request that was never queued."""
        request.finish_reason, request.error = "error", error
        self.on_finish(request)

    def abort(self, request_id: str) -> None:
        """End a request early, with reason "abort". One that has ended already, or never was, is no error."""
        if request := self._unfinished.get(request_id):
            self.finish(request, "abort")

    def _by_kind(self) -> tuple[list[Request], list[Request]]:
        """The running requests that decode, and those inside a prompt."""
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            is_decode = len(request.token_ids) - request.num_computed_tokens == 1
            (decodes if is_decode else prompts).append(request)
        return decodes, prompts

    def _can_admit(self, num_decodes: int) -> bool:
        """Whether a waiting request could run beside so many that decode."""
        budget = self.config.max_num_tokens - num_decodes
        if not self.waiting or not budget or len(self.running) >= self.config.max_num_requests:
            return False
        self._publish_running()
        return self._hits_if_fits(self.waiting[0], budget) is not None

    def _hits_if_fits(self, request: Request, budget: int) -> list[int] | None:
        """The pages of a waiting request that are cached; None if its pages and tokens do not fit into this step."""
        allocator, num_tokens = self.allocator, len(request.token_ids)
        allocator.extend_digests(request.page_digests, request.token_ids, request.cache_salt)
        # At least one token is computed, or there would be nothing to sample from.
        hits = allocator.match(request.page_digests[: (num_tokens - 1) // allocator.page_size])
        num_hit_tokens = len(hits) * allocator.page_size
        if not self.config.chunked_prefill and budget < num_tokens - num_hit_tokens <= self.config.max_num_tokens:
            return None  # whole, in a later step (only a preempted request can have grown past a whole step)
        num_new_pages = allocator.pages_for(num_tokens) - len(hits)
        # One page stays free for each running request: what is admitted now should not be preempted soon.
        return hits if num_new_pages + len(self.running) <= allocator.num_available_beside(hits) else None

    def _admit(self, request: Request, budget: int) -> bool:
        """Move the first waiting request to the running ones, if its pages and tokens fit into this step."""
        allocator, hits = self.allocator, self._hits_if_fits(request, budget)
        if hits is None:
            return False
        num_hit_tokens = len(hits) * allocator.page_size
        allocator.take(hits)
        request.add_pages(np.array(hits, np.int32))
        request.add_pages(allocator.allocate(allocator.pages_for(len(request.token_ids)) - len(hits)))
        request.num_computed_tokens = num_hit_tokens
        if not request.num_preemptions:
            request.num_prefix_hit_tokens = num_hit_tokens
            self.num_prefix_hit_tokens += num_hit_tokens
        insort(self.running, self.waiting.pop(0), key=_order)
        return True

    def _secure_pages(self, request: Request) -> bool:
        """Pages for all known tokens of a running request; False if it was, or had to be, preempted in this step."""
        if not request.num_pages:
            return False
        missing = self.allocator.pages_for(len(request.token_ids)) - request.num_pages
        while missing > self.allocator.num_available:
            last = self.running.pop()
            self._release(last)
            last.num_preemptions += 1
            self.num_preemptions += 1
            insort(self.waiting, last, key=_order)
            if last is request:
                return False
        if missing > 0:
            request.add_pages(self.allocator.allocate(missing))
        return True

    def _secure_steps(self, rows: Sequence[tuple[Request, int]]) -> int:
        """Decode steps that these rows can take at once, with the pages for them; 1 if any row is inside a prompt.

        No row can reach its length limit before the last of them. Nobody is preempted for more than one step.
        """
        most, requests = self.config.decode_steps_per_launch, [request for request, _ in rows]
        if most == 1 or any(request.num_pending_tokens > 1 for request in requests):
            return 1
        known = np.array([len(request.token_ids) for request in requests], np.int32)
        num_steps = min(most, *(request.last_len - len(request.token_ids) for request in requests))
        pages = np.array([request.num_pages for request in requests], np.int32)
        missing = np.maximum(-(-(known + num_steps - 1) // self.allocator.page_size) - pages, 0)
        if missing.sum() > self.allocator.num_available:
            return 1
        self._grow(requests, missing)
        return num_steps

    def _grow(self, requests: Sequence[Request], missing: IntArray) -> NDArray[np.int64]:
        """Give requests so many pages each. Returns the rows that got any."""
        grown = np.flatnonzero(missing)
        if not len(grown):
            return _NONE
        pages, end = self.allocator.allocate(int(missing.sum())), 0
        for row in grown.tolist():
            start, end = end, end + int(missing[row])
            requests[row].add_pages(pages[start:end])
        return grown

    def _release(self, request: Request) -> None:
        if request.num_pages:  # it was running
            self._is_settled = False
        self._publish(request)
        self.on_release(request)
        self.allocator.free(request.page_ids)
        request.clear_cache()

    def _publish_running(self) -> None:
        """Before a waiting request looks for pages."""
        for request in self.running:
            self._publish(request)

    def _publish(self, request: Request) -> None:
        """Tell the prefix cache of pages that have become full. Not at once: before it is asked, or they are freed."""
        num_full = request.num_computed_tokens // self.allocator.page_size
        if num_full == request.num_published_pages or not self.allocator.prefix_caching:
            return
        self.allocator.extend_digests(request.page_digests, request.token_ids, request.cache_salt)
        for i in range(request.num_published_pages, num_full):
            self.allocator.publish(int(request.page_ids[i]), request.page_digests[i])
        request.num_published_pages = num_full

    def _why_finished(self, request: Request, token: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Whether, and how, its last token ends a request."""
        if token in request.sampling.stop_token_ids or (token in eos_token_ids and not request.sampling.ignore_eos):
            return "stop"
        return "length" if len(request.token_ids) >= request.last_len else None

    def _why_never(self, request: Request) -> str | None:
        """What stops a request from ever making one token, and what to change."""
        length, step_tokens, allocator = request.num_prompt_tokens, self.config.max_num_tokens, self.allocator
        if length == 0:
            return "the prompt is empty: give at least one token"
        if length >= self.max_model_len:
            return (
                f"the prompt has {length} tokens and a request may have {self.max_model_len}, new ones included: "
                f"shorten the prompt to {self.max_model_len - 1}, or raise scheduler.max_model_len if the model can"
            )
        if length >= self.pool_tokens:
            return (
                f"the prompt has {length} tokens; with one new token it needs {allocator.pages_for(length + 1)} pages "
                f"of {allocator.page_size}, and the pool has {allocator.num_pages}: raise cache.memory or "
                f"cache.num_pages, or shorten the prompt to {self.pool_tokens - 1}"
            )
        if length > step_tokens and not self.config.chunked_prefill:
            return (
                f"the prompt has {length} tokens and a step takes {step_tokens}: turn scheduler.chunked_prefill on, "
                f"raise scheduler.max_num_tokens to {length}, or shorten the prompt"
            )
        return None


def _order(request: Request) -> tuple[int, int]:
    return request.order

"""Which tokens of which requests a step computes: continuous batching over a pool of pages. Host only, no tensors."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, count
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from attn_backends.batch.page_table import IntArray
from attn_backends.engine.config import SchedulerConfig
from attn_backends.engine.page_allocator import PageAllocator
from attn_backends.engine.prompts import why_never
from attn_backends.engine.request import NO_ROWS, FinishReason, Request, ScheduledBatch

SERVICE_ORDER = attrgetter("order")


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
        self.on_release: Callable[[Request], None] = lambda request: None  # called when a request's pages are freed
        self.on_finish: Callable[[Request], None] = lambda request: None  # called when a request has ended
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
        if error := why_never(request.num_prompt_tokens, self.config, self.allocator, self.max_model_len):
            self.refuse(request, error)
        else:
            self._unfinished[request.request_id] = request
            insort(self.waiting, request, key=SERVICE_ORDER)

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
        for most in (num_steps, 1):  # several only if nobody has to be preempted for them
            if (rows := self._grow(batch.requests, context_lens + most)) is not None:
                return replace(
                    batch, context_lens=context_lens, token_ids=NO_ROWS, num_steps=most, follows=True, grown_rows=rows
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

    def fail(self, request: Request, error: str) -> None:
        """End a request with reason "error", unless it has ended already: its tokens so far stay, and what it has
        written to pages since the last were published is found by no other."""
        if not request.finish_reason:
            request.error, request.num_computed_tokens = error, 0
            self.finish(request, "error")

    def refuse(self, request: Request, error: str) -> None:
        """End a request that was never queued."""
        request.finish_reason, request.error = "error", error
        self.on_finish(request)

    def abort(self, request_id: str) -> None:
        """End a request early, with reason "abort". One that has ended already, or never was, is no error."""
        if request := self._unfinished.get(request_id):
            self.finish(request, "abort")

    def drop_all(self) -> None:
        """End all requests and free all pages, unannounced; it mends what an interrupted call left half done."""
        for request in (*self._unfinished.values(), *self.running, *self.waiting):
            request.finish_reason = request.finish_reason or "abort"
            request.clear_cache()
        for kept in (self._unfinished, self.running, self.waiting):
            kept.clear()
        self._is_settled = False
        self.allocator.free_all()

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
        insort(self.running, self.waiting.pop(0), key=SERVICE_ORDER)
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
            insort(self.waiting, last, key=SERVICE_ORDER)
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
        return 1 if self._grow(requests, known + num_steps - 1) is None else num_steps

    def _grow(self, requests: Sequence[Request], num_tokens: IntArray) -> NDArray[np.int64] | None:
        """Give requests the pages of so many tokens each. Returns the rows that got any; None: there are too few."""
        pages = np.array([request.num_pages for request in requests], np.int32)
        missing = np.maximum(-(-num_tokens // self.allocator.page_size) - pages, 0)
        if missing.sum() > self.allocator.num_available:
            return None
        grown = np.flatnonzero(missing)
        if not len(grown):
            return NO_ROWS
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
        """Publish pages of running requests, before a waiting one looks for them."""
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

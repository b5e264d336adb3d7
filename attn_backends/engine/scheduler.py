"""Which tokens of which requests a step computes: continuous batching over a pool of pages. Host only, no tensors."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray

from attn_backends.batch import SequenceData, SequenceGroup
from attn_backends.config import SchedulerConfig
from attn_backends.engine.page_allocator import PageAllocator
from attn_backends.engine.request import FinishReason, Request
from attn_backends.page_table import IntArray, token_positions


@dataclass(frozen=True)
class ScheduledBatch:
    """One step's work. R rows, one a request, those with one new token first; T new tokens in all.

    It describes the requests as they are now: use it before the scheduler is called again.
    """

    requests: tuple[Request, ...]  # R
    context_lens: IntArray  # [R] i32, tokens already in the cache
    query_lens: IntArray  # [R] i32, new tokens, at least 1
    token_ids: NDArray[np.int64]  # [T] the new tokens, row after row
    positions: NDArray[np.int64]  # [T]
    sample_rows: IntArray  # rows whose last new token is their last known one; chunks inside a prompt are not
    num_steps: int = 1  # decode steps to run before `update`; above 1 all rows decode, and own the pages for it

    @staticmethod
    def from_rows(rows: Sequence[tuple[Request, int]], num_steps: int = 1) -> ScheduledBatch:
        """Requests, in the order of the batch, with how many of their pending tokens are computed now."""
        requests = tuple(request for request, _ in rows)
        context_lens = np.array([request.num_computed_tokens for request in requests], np.int32)
        query_lens = np.array([query_len for _, query_len in rows], np.int32)
        spans = (request.token_ids[(c := request.num_computed_tokens) : c + n] for request, n in rows)
        token_ids = np.fromiter(chain.from_iterable(spans), np.int64, int(query_lens.sum()))
        sample_rows = [row for row, (request, n) in enumerate(rows) if n == request.num_pending_tokens]
        _, positions = token_positions(context_lens, query_lens)
        sample = np.array(sample_rows, np.int32)
        return ScheduledBatch(requests, context_lens, query_lens, token_ids, positions, sample, num_steps)

    def in_order(self, order: Sequence[int]) -> ScheduledBatch:
        """The same work with row `order[i]` as row i."""
        return ScheduledBatch.from_rows([(self.requests[i], int(self.query_lens[i])) for i in order], self.num_steps)

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
        self.on_release: Callable[[Request], None] = lambda request: None  # told when a request's pages are freed
        self._unfinished: dict[str, Request] = {}
        self._arrivals = count()

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
        request.error = self._why_never(request)
        if request.error:
            request.finish_reason = "error"
        else:
            self._unfinished[request.request_id] = request
            insort(self.waiting, request, key=_order)

    def schedule(self) -> ScheduledBatch | None:
        """The next step's batch, its pages allocated; None if nothing is left to do. `update` must follow."""
        budget = self.config.max_num_tokens
        rows: list[tuple[Request, int]] = []
        # Prompts under way hold all their pages, so taking decodes first cannot preempt a request already in `rows`.
        for request in sorted(self.running, key=lambda request: request.num_pending_tokens > 1):
            if budget and self._secure_pages(request):
                rows.append((request, min(request.num_pending_tokens, budget)))
                budget -= rows[-1][1]
        while self.waiting and budget and len(self.running) < self.config.max_num_requests:
            request = self.waiting[0]
            if not self._admit(request, budget):
                break
            rows.append((request, min(request.num_pending_tokens, budget)))
            budget -= rows[-1][1]
        rows.sort(key=lambda row: row[1] > 1)
        return ScheduledBatch.from_rows(rows, self._secure_steps(rows)) if rows else None

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
        tokens = dict(zip(batch.sample_rows.tolist(), sampled_token_ids, strict=True))
        finished = []
        for row, (request, query_len) in enumerate(zip(batch.requests, batch.query_lens.tolist(), strict=True)):
            if request.finish_reason:
                continue
            request.num_computed_tokens += query_len
            self._publish(request)
            if row in tokens:
                request.token_ids.append(tokens[row])
                if reason := self._why_finished(request, eos_token_ids):
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

    def abort(self, request_id: str) -> None:
        """End a request early, with reason "abort". One that has ended already, or never was, is no error."""
        if request := self._unfinished.get(request_id):
            self.finish(request, "abort")

    def _admit(self, request: Request, budget: int) -> bool:
        """Move the first waiting request to the running ones, if its pages and tokens fit into this step."""
        allocator, num_tokens = self.allocator, len(request.token_ids)
        allocator.extend_digests(request.page_digests, request.token_ids)
        # At least one token is computed, or there would be nothing to sample from.
        hits = allocator.match(request.page_digests[: (num_tokens - 1) // allocator.page_size])
        num_hit_tokens = len(hits) * allocator.page_size
        if not self.config.chunked_prefill and budget < num_tokens - num_hit_tokens <= self.config.max_num_tokens:
            return False  # whole, in a later step (only a preempted request can have grown past a whole step)
        num_new_pages = allocator.pages_for(num_tokens) - len(hits)
        # One page stays free for each running request: what is admitted now should not be preempted soon.
        if num_new_pages + len(self.running) > allocator.num_available_beside(hits):
            return False
        allocator.take(hits)
        request.add_pages(np.array(hits, np.int32))
        request.add_pages(allocator.allocate(num_new_pages))
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
        requests = [request for request, _ in rows]
        if self.config.decode_steps_per_launch == 1 or any(request.num_pending_tokens > 1 for request in requests):
            return 1
        num_steps = min(self.config.decode_steps_per_launch, *(self._tokens_left(request) for request in requests))
        goals = [self.allocator.pages_for(len(request.token_ids) + num_steps - 1) for request in requests]
        missing = [max(0, goal - request.num_pages) for goal, request in zip(goals, requests, strict=True)]
        if sum(missing) > self.allocator.num_available:
            return 1
        for request, num_pages in zip(requests, missing, strict=True):
            request.add_pages(self.allocator.allocate(num_pages))
        return num_steps

    def _release(self, request: Request) -> None:
        self.on_release(request)
        self.allocator.free(request.page_ids)
        request.clear_cache()

    def _publish(self, request: Request) -> None:
        """Tell the prefix cache of pages that have become full."""
        num_full = request.num_computed_tokens // self.allocator.page_size
        if num_full == request.num_published_pages or not self.allocator.prefix_caching:
            return
        self.allocator.extend_digests(request.page_digests, request.token_ids)
        for i in range(request.num_published_pages, num_full):
            self.allocator.publish(int(request.page_ids[i]), request.page_digests[i])
        request.num_published_pages = num_full

    def _why_finished(self, request: Request, eos_token_ids: frozenset[int]) -> FinishReason | None:
        token, sampling = request.token_ids[-1], request.sampling
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if self._tokens_left(request) <= 0 else None

    def _tokens_left(self, request: Request) -> int:
        """How many more tokens a request may get."""
        room = min(self.max_model_len, self.pool_tokens) - len(request.token_ids)
        return min(room, request.sampling.max_tokens - request.num_output_tokens)

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

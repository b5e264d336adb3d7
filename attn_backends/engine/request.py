"""One request on its way through the engine: its tokens, its pages, and how it ended; and one step's work, which
requests, and which of their tokens, in the order of the batch's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attn_backends.batch.common import SequenceData, SequenceGroup
from attn_backends.batch.page_table import IntArray, token_positions
from attn_backends.engine.config import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Request:
    """Mutable; the scheduler writes it, others read it. Compared by identity.

    Raises:
        TypeError, ValueError: `cache_salt` is no string, or an empty one.
    """

    request_id: str
    token_ids: list[int]  # the prompt's at first (copied); new ones are appended
    sampling: SamplingParams
    priority: int = 0  # the lowest number is served first
    cache_salt: str | None = None  # it shares prefix pages with requests of an equal salt alone
    arrival: int = field(default=-1, init=False)  # given by the scheduler; breaks ties of priority
    num_prompt_tokens: int = field(init=False)
    is_greedy: bool = field(init=False)  # its tokens are the most likely ones: no randomness
    last_len: int = field(default=0, init=False)  # with so many tokens it ends; given by the scheduler
    num_computed_tokens: int = field(default=0, init=False)  # tokens whose keys and values are in the cache
    page_digests: list[bytes] = field(default_factory=list, init=False)  # of full pages of token_ids, as far as known
    num_published_pages: int = field(default=0, init=False)  # of its first pages, that the prefix cache knows
    num_prefix_hit_tokens: int = field(default=0, init=False)  # of the prompt, found in the prefix cache
    num_pages: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)  # why, if finish_reason is "error"
    _page_buffer: IntArray = field(default_factory=lambda: np.empty(8, np.int32), init=False, repr=False)

    def __post_init__(self) -> None:
        check_salt(self.cache_salt)
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.is_greedy = self.sampling.temperature == 0 or self.sampling.top_k == 1

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy: what was generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not in the cache: 1 for a request that decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Requests are served in this order, and preempted from its end."""
        return self.priority, self.arrival

    @property
    def page_ids(self) -> IntArray:
        """Its pages in order [num_pages] i32: a view, good until pages are added or cleared."""
        return self._page_buffer[: self.num_pages]

    def add_pages(self, pages: IntArray) -> None:
        """Append pages; the buffer doubles when it is full."""
        count = self.num_pages + len(pages)
        if count > len(self._page_buffer):
            grown = np.empty(max(count, 2 * len(self._page_buffer)), np.int32)
            grown[: self.num_pages] = self.page_ids
            self._page_buffer = grown
        self._page_buffer[self.num_pages : count] = pages
        self.num_pages = count

    def clear_cache(self) -> None:
        """Forget all pages, as if nothing had been computed; tokens and digests stay."""
        self.num_pages = 0
        self.num_computed_tokens = 0
        self.num_published_pages = 0


def check_salt(cache_salt: str | None) -> None:
    """Refuses a cache salt that is no string, and an empty one, which keeps nobody apart.

    Raises:
        TypeError, ValueError: as above; the message says what to pass.
    """
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise TypeError(
            f"cache_salt is {cache_salt!r} of type {type(cache_salt).__name__}; pass a string, or None to share "
            "prefixes with all requests that have none"
        )
    if cache_salt == "":
        raise ValueError("cache_salt is empty: requests with an unset name would share pages; pass a name, or None")


def salts_for(cache_salt: str | Sequence[str | None] | None, num_prompts: int) -> list[str | None]:
    """The cache salt of each prompt, [num_prompts]: the one for all, or those given one a prompt.

    Raises:
        TypeError, ValueError: not one a prompt, or one of them is refused.
    """
    if isinstance(cache_salt, Sequence) and not isinstance(cache_salt, (str, bytes)):
        salts = list(cache_salt)
    else:
        salts = [cache_salt] * num_prompts
    if len(salts) != num_prompts:
        raise ValueError(f"{len(salts)} cache salts for {num_prompts} prompts: pass one, or one a prompt")
    for salt in salts:
        check_salt(salt)
    return salts


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
    grown_rows: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)  # [G] rows of a following batch that grew

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

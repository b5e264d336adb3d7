"""One step's work: which requests, and which of their tokens, in the order of the batch's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from attn_backends.batch.common import SequenceData, SequenceGroup
from attn_backends.batch.page_table import IntArray, token_positions
from attn_backends.engine.request import Request

NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)


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

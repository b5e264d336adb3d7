"""The rows of running requests and the pages of each, on the host: edited in place as requests come, grow and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from attn_backends.batch.page_table import IntArray, starts_of, token_positions
from attn_backends.spec import KVCacheSpec, Limits
from attn_backends.step.page_sets import PageSets, RowArray


class PageRuns(NamedTuple):
    """Pages that the device does not have yet, in E runs, at most one a row.

    Run i is `pages[starts[i]:starts[i + 1]]`, for columns `first[i]` and on of row `rows[i]`.
    """

    rows: RowArray  # [E] i64, each once
    first: IntArray  # [E] i32
    starts: IntArray  # [E + 1] i32
    pages: IntArray  # [starts[-1]] i32


class RowMoves(NamedTuple):
    """Rows of the device's table that change places: what row `sources[i]` held at the last step belongs to `rows[i]`.

    All sources are read before any row is written. It goes ahead of the runs of the same step.
    """

    rows: RowArray  # [M] i64, each once
    sources: RowArray  # [M] i64, each once
    width: int  # leading columns that count


class PageRows:
    """Rows 0 to `num_rows - 1` are the running requests. Every edit costs what it edits, not what is there.

    An edit with wrong input raises `ValueError`, which names the request and the numbers, and changes nothing.

    Attributes:
        page_table: [max_num_requests, capacity] i32. Columns past a row's pages hold 0 or a former page.
        num_pages: [max_num_requests] i32, pages of a row, lookahead included.
        num_sent: [max_num_requests] i32, how many of them the last step's tensors on the device have.
        request_ids: the request of each row.
        row_on_device: [max_num_requests] i64, which row of the device's table holds a row's sent pages.
        has_unsent: whether `num_sent` may be behind `num_pages` in some row.
        has_moved: whether `row_on_device` may be another row than a row itself.
        num_moves: how often rows changed places so far.
        capacity: most pages of a row, `ceil(max_model_len / page_size)`.
    """

    def __init__(self, limits: Limits, cache: KVCacheSpec) -> None:
        self.limits = limits
        self.cache = cache
        self.capacity = -(-limits.max_model_len // cache.page_size)
        self.page_table = np.zeros((limits.max_num_requests, self.capacity), np.int32)
        self.num_pages = np.zeros(limits.max_num_requests, np.int32)
        self.num_sent = np.zeros(limits.max_num_requests, np.int32)
        self.row_on_device = np.arange(limits.max_num_requests)
        self.request_ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._sets = PageSets(limits.max_num_requests, cache.pages)
        self.has_unsent = self.has_moved = False
        self.num_moves = 0

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    def row_of(self, request_id: str) -> int:
        """Raises `ValueError` for a request without a row."""
        row = self._row_of.get(request_id)
        if row is None:
            raise ValueError(f"request {request_id!r} has no row: enter it first")
        return row

    def pages_of(self, request_id: str) -> IntArray:
        """A view, good until the next edit."""
        row = self.row_of(request_id)
        return self.page_table[row, : self.num_pages[row]]

    def enter(self, request_id: str, pages: IntArray | Sequence[int]) -> int:
        """Give a request the next row. A preempted one left, and enters anew. Returns the row."""
        if request_id in self._row_of:
            raise ValueError(f"request {request_id!r} has row {self._row_of[request_id]} already: extend it")
        if self.num_rows == self.limits.max_num_requests:
            raise ValueError(
                f"request {request_id!r} would be number {self.num_rows + 1}, and max_num_requests is "
                f"{self.limits.max_num_requests}: let one leave first"
            )
        row = self.num_rows
        self._add(request_id, row, pages)
        self.request_ids.append(request_id)
        self._row_of[request_id] = row
        return row

    def extend(self, request_id: str, pages: IntArray | Sequence[int]) -> None:
        """Append pages to a request."""
        self._add(request_id, self.row_of(request_id), pages)

    def append(self, rows: RowArray | Sequence[int], pages: IntArray | Sequence[int]) -> None:
        """Append one page each to different rows: what decoding needs. Costs the number of rows."""
        at = np.asarray(rows, np.int64)
        added = as_int32(pages, lambda i: f"row {at[i]}: page id")
        if at.shape != added.shape:
            raise ValueError(f"{at.size} rows and {added.size} pages: append takes one page for each row")
        if np.count_nonzero(at[1:] <= at[:-1]) or (len(at) and not 0 <= at[0] <= at[-1] < self.num_rows):
            self._check_rows(at)  # not sorted, or worse
        # Read as unsigned, a negative number is a large one; and counting is the quickest question to an array.
        wrong_pages = np.count_nonzero(added.view(np.uint32) >= self.cache.pages)
        columns = self.num_pages[at]
        if wrong_pages or np.count_nonzero(columns >= self.capacity) or not self._sets.add_each(at, added):
            for row, page in zip(at.tolist(), added[:, None], strict=True):
                self._check_pages(self.request_ids[row], row, page)
        self.page_table[at, columns] = added
        self.num_pages[at] = columns + 1
        self.has_unsent = True

    def leave(self, request_id: str) -> int:
        """Take a request's row away; the last row moves into its place. Returns the place."""
        row, last = self.row_of(request_id), self.num_rows - 1
        if row != last:
            self.swap_rows(row, last)
        self.num_moves += 1
        self._sets.clear(last)
        self.num_pages[last] = self.num_sent[last] = 0
        self.request_ids.pop()
        del self._row_of[request_id]
        return row

    def clear(self) -> None:
        """Take all rows away. Nothing is asked of what is there, so it mends what an interrupted edit left."""
        self.num_moves += 1
        self.request_ids.clear()
        self._row_of.clear()
        self._sets.clear_all()
        self.num_pages[:] = self.num_sent[:] = 0
        self.has_unsent = False
        self._put_in_place()

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows, with all that belongs to them."""
        if not (0 <= first < self.num_rows and 0 <= second < self.num_rows):
            raise ValueError(f"rows {first} and {second} are not both among rows 0 to {self.num_rows - 1}")
        if first == second:
            return
        pair, swapped = [first, second], [second, first]
        width = int(self.num_pages[pair].max())
        self.page_table[pair, :width] = self.page_table[swapped, :width]
        for of_rows in (self.num_pages, self.num_sent, self.row_on_device):
            of_rows[pair] = of_rows[swapped]
        self._sets.swap(first, second)
        self.has_moved = True
        self.num_moves += 1
        for row, request_id in zip(swapped, [self.request_ids[row] for row in pair], strict=True):
            self.request_ids[row] = request_id
            self._row_of[request_id] = row

    def arrange(
        self, request_ids: Sequence[str], query_lens: IntArray | Sequence[int], decode_threshold: int = 1
    ) -> RowArray:
        """Bring the requests of a step to rows 0 to n - 1, decodes first; all others behind. As few swaps as it takes.

        Args:
            query_lens: [n] new tokens of each; up to `decode_threshold` it is a decode.

        Returns:
            [n] order: row i is that of `request_ids[order[i]]`, so `query_lens[order]` is in the order of rows.
        """
        asked = as_int32(query_lens, lambda i: f"request {request_ids[i]!r}: query length")
        if len(asked) != len(request_ids):
            raise ValueError(f"{len(request_ids)} requests and {len(asked)} query lengths: pass one for each")
        is_prefill = asked > decode_threshold
        in_place = not is_prefill.any() or not (is_prefill[:-1] > is_prefill[1:]).any()
        if in_place and self.request_ids[: len(asked)] == list(request_ids):
            return np.arange(len(asked))
        rows = np.array([self.row_of(request_id) for request_id in request_ids], np.int64)
        self._check_rows(rows)
        kinds = np.full(self.num_rows, _UNSCHEDULED)
        kinds[rows] = is_prefill
        for first, second in _swaps(kinds, np.sort(kinds)):
            self.swap_rows(first, second)
        return np.argsort([self._row_of[request_id] for request_id in request_ids])

    def take_moves(self) -> RowMoves | None:
        """The rows that the device has to move before it takes new pages, counted as moved; None if there are none."""
        if not self.has_moved:
            return None
        sources, in_place = self.row_on_device[: self.num_rows].copy(), self._put_in_place()
        rows = np.flatnonzero((sources != in_place[: self.num_rows]) & (self.num_sent[: self.num_rows] > 0))
        return RowMoves(rows, sources[rows], int(self.num_sent[rows].max())) if len(rows) else None

    def take_unsent(self, most: int) -> PageRuns | None:
        """Pages that the device lacks, at most so many, and count them as sent; None if it lacks none."""
        if not self.has_unsent:
            return None
        counts = self.num_pages[: self.num_rows] - self.num_sent[: self.num_rows]
        rows = counts.nonzero()[0]
        first, counts = self.num_sent[rows], counts[rows]
        starts = starts_of(counts)
        self.has_unsent = bool(starts[-1] > most)
        if self.has_unsent:
            rows = rows[starts[:-1] < most]
            first, starts = first[: len(rows)], starts[: len(rows) + 1].clip(max=most)
        if starts[-1] == len(rows):  # one page each, as decoding brings them
            pages = self.page_table[rows, first]
        else:
            which, columns = token_positions(first, starts[1:] - starts[:-1])
            pages = self.page_table[rows[which], columns]
        self.num_sent[rows] += starts[1:] - starts[:-1]
        return PageRuns(rows, first, starts, pages)

    def mark_sent(self) -> None:
        """Count all pages as sent and all rows as moved: the device sees them where they are."""
        if self.has_unsent:
            self.num_sent[: self.num_rows] = self.num_pages[: self.num_rows]
            self.has_unsent = False
        if self.has_moved:
            self._put_in_place()

    def _put_in_place(self) -> RowArray:
        self.has_moved = False
        self.row_on_device[:] = np.arange(len(self.row_on_device))
        return self.row_on_device

    def _add(self, request_id: str, row: int, pages: IntArray | Sequence[int]) -> None:
        added = as_int32(pages, lambda _: f"request {request_id!r}: page id")
        self._check_pages(request_id, row, added)
        count = int(self.num_pages[row])
        self.page_table[row, count : count + len(added)] = added
        self.num_pages[row] = count + len(added)
        self._sets.add_all(row, added)
        self.has_unsent = True

    def _check_rows(self, rows: RowArray) -> None:
        for row in rows[(rows < 0) | (rows >= self.num_rows)].tolist():
            raise ValueError(f"row {row} is not one of rows 0 to {self.num_rows - 1}")
        for row in np.flatnonzero(np.bincount(rows) > 1).tolist():
            raise ValueError(f"request {self.request_ids[row]!r} (row {row}) is named twice")

    def _check_pages(self, request_id: str, row: int, added: IntArray) -> None:
        """Whether a row can take these pages behind its own."""
        for page in added[(added < 0) | (added >= self.cache.pages)].tolist():
            raise ValueError(f"request {request_id!r}: page id {page} is not one of 0 to {self.cache.pages - 1}")
        count = int(self.num_pages[row]) + len(added)
        if count > self.capacity:
            raise ValueError(
                f"request {request_id!r} would have {count} pages of {self.cache.page_size} slots; "
                f"max_model_len is {self.limits.max_model_len}, which {self.capacity} pages hold"
            )
        ordered = np.sort(added)
        twice = np.concatenate([added[self._sets.has(row, added)], ordered[1:][ordered[1:] == ordered[:-1]]])
        for page in twice.tolist():
            raise ValueError(f"request {request_id!r} would have page {page} twice")


_UNSCHEDULED = 2  # after decodes (0) and prefills (1)


def _swaps(kinds: RowArray, wanted: RowArray) -> Iterator[tuple[int, int]]:
    """Pairs of rows to swap, the fewest that bring three kinds of rows where they are wanted."""
    wrong = {(place, kind): np.flatnonzero((wanted == place) & (kinds == kind)).tolist()
             for place, kind in product(range(3), repeat=2)}  # fmt: skip
    for place, kind in ((0, 1), (0, 2), (1, 2)):
        for row in wrong[place, kind]:
            other = 3 - place - kind
            if wrong[kind, place]:
                yield row, wrong[kind, place].pop()
            else:  # a cycle of three: the row goes where neither of the two belongs, and moves on later
                through = wrong[other, place].pop()
                wrong[other, kind].append(through)
                yield row, through


def as_int32(values: IntArray | Sequence[int], what: Callable[[int], str]) -> IntArray:
    """[n] i32. Raises `ValueError` for anything else, with `what(i)` for the first value that does not fit."""
    array = np.asarray(values)
    if array.dtype == np.int32 and array.ndim == 1:
        return array
    if array.ndim != 1:
        raise ValueError(f"{what(0)}: got an array of shape {list(array.shape)}; pass one dimension")
    fits = (array >= -(2**31)) & (array < 2**31) if array.dtype.kind in "iu" else np.zeros(len(array), np.bool_)
    if not fits.all():
        at = int(fits.argmin())
        raise ValueError(f"{what(at)} {array[at]} is no 32-bit integer")
    return array.astype(np.int32)

"""One compiler: page lists of a batch → CSR, dense table and slot mapping, in numpy, with no loop over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
PAD_SLOT = -1  # in a slot mapping: padding, never written
_LAST_PAGE = 2**31 - 1


@dataclass(frozen=True)
class CompiledPageTable:
    """The same page table in the three forms that kernels take.

    Rows from `num_reqs` on are padding for a graph: no pages, `last_page_len` 0, slots -1.
    """

    page_table: IntArray  # [num_rows, max_pages] i32; columns past a row's pages are 0
    paged_kv_indptr: IntArray  # [num_rows + 1] i32
    paged_kv_indices: IntArray  # [paged_kv_indptr[-1]] i32
    paged_kv_last_page_len: IntArray  # [num_rows] i32; 1 to page_size, 0 for a row with no keys
    slot_mapping: NDArray[np.int64]  # [num_new_kv + padded tokens] i64


def starts_of(counts: IntArray) -> IntArray:
    """[len(counts) + 1] i32: where each row begins if they lie one behind the other, and their end."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def token_positions(starts: IntArray, counts: IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and position of every token where row i holds `counts[i]` tokens from position `starts[i]` on.

    >>> token_positions(np.array([5, 0]), np.array([1, 2]))[1].tolist()
    [5, 0, 1]
    """
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts, dtype=np.int64) - counts
    return rows, np.arange(len(rows), dtype=np.int64) - (first - starts)[rows]


def compile_page_table(
    pages: Sequence[IntArray],
    seq_lens: IntArray,
    new_kv_lens: IntArray,
    page_size: int,
    num_padded_rows: int = 0,
    num_padded_tokens: int = 0,
) -> CompiledPageTable:
    """Compile a batch's page lists.

    Args:
        pages: one array of integers a row, the row's pages in order. Lookahead pages beyond
            `ceil(seq_len / page_size)` may follow and are left out of every form.
        seq_lens: [num_rows] i32, keys a row has after this step.
        new_kv_lens: [num_rows] i32, how many of them (the last ones) this step writes.
        num_padded_rows, num_padded_tokens: padding added behind the batch.

    Raises:
        ValueError: a row has fewer pages than its length needs, or a page id is negative or no 32-bit integer.
    """
    num_rows = len(pages)
    used = -(-seq_lens // page_size)
    _check_counts(pages, seq_lens, used, page_size)
    rows_total = num_rows + num_padded_rows
    trimmed = [row_pages[:count] for row_pages, count in zip(pages, used.tolist(), strict=True)]
    wide = np.concatenate(trimmed, dtype=np.int64) if trimmed else np.zeros(0, np.int64)
    wrong = wide.view(np.uint64) > _LAST_PAGE  # read as unsigned, a negative id is a large one
    if np.count_nonzero(wrong):
        raise ValueError(f"page id {wide[wrong.argmax()]} in the page lists: ids count from 0, to {_LAST_PAGE}")
    indices = wide.astype(np.int32)
    table = np.zeros((rows_total, max(1, int(used.max(initial=0)))), np.int32)
    indptr = starts_of(np.concatenate([used, np.zeros(num_padded_rows, np.int32)]))
    for row, (first, stop) in enumerate(pairwise(indptr[: num_rows + 1].tolist())):
        table[row, : stop - first] = indices[first:stop]

    last_page_len = np.zeros(rows_total, np.int32)
    last_page_len[:num_rows] = np.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0)

    rows, positions = token_positions(seq_lens - new_kv_lens, new_kv_lens)
    slots = np.full(len(rows) + num_padded_tokens, PAD_SLOT, np.int64)
    slots[: len(rows)] = table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size
    return CompiledPageTable(table, indptr, indices, last_page_len, slots)


def check_pages(
    request_ids: Sequence[str], pages: Sequence[IntArray], seq_lens: IntArray, page_size: int, num_pages: int | None
) -> None:
    """What `compile_page_table` asks of page lists, where requests have names, and of a pool, if it is known.

    Raises:
        ValueError: a row lacks pages, the pool has not all of them, or ids are no integers; pages have no slots.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1, as the pool's is")
    for request_id, row_pages, seq_len in zip(request_ids, pages, seq_lens.tolist(), strict=True):
        if len(row_pages) * page_size < seq_len:
            raise ValueError(
                f"request {request_id!r} has {len(row_pages)} pages of {page_size} slots, which hold "
                f"{len(row_pages) * page_size} keys, but its length is {seq_len}: allocate pages before the step"
            )
        if row_pages.dtype.kind not in "iu":
            raise ValueError(f"request {request_id!r} has page ids in {row_pages.dtype}: pass integers")
        if num_pages is not None and row_pages.max(initial=-1) >= num_pages:
            raise ValueError(
                f"request {request_id!r} has page {row_pages.max()}, and the pool pages 0 to {num_pages - 1}"
            )


def _check_counts(pages: Sequence[IntArray], seq_lens: IntArray, used: IntArray, page_size: int) -> None:
    for row in np.flatnonzero(np.fromiter(map(len, pages), np.int64, len(pages)) < used).tolist():
        raise ValueError(
            f"row {row} has {len(pages[row])} pages of {page_size} slots for {seq_lens[row]} keys; "
            f"it needs {used[row]}: allocate the missing pages before the step"
        )


def common_prefix_len(
    page_lists: Sequence[IntArray | Sequence[int]], context_lens: IntArray | Sequence[int], page_size: int
) -> int:
    """Leading keys that all rows share in the same pages: what a builder is given as `common_prefix_len`.

    Whole pages only, and no more than the shortest context: pages that this step writes are never shared. A single row
    shares all of its context with itself.

    Args:
        page_lists: one a row, the row's pages in order, as `SequenceData.pages`.
        context_lens: one a row, tokens already in the cache.

    Raises:
        ValueError: no rows, unequal counts, or a row with fewer pages than its context needs.

    >>> common_prefix_len([[4, 5, 6], [4, 5, 9]], [40, 37], 16)
    32
    """
    if not page_lists or len(page_lists) != len(context_lens):
        raise ValueError(
            f"{len(page_lists)} page lists for {len(context_lens)} context lengths: need one of each a row, and a row"
        )
    for row, (pages, context_len) in enumerate(zip(page_lists, context_lens, strict=True)):
        if len(pages) * page_size < context_len:
            raise ValueError(f"row {row} has {len(pages)} pages of {page_size} slots for a context of {context_len}")
    shared = int(min(context_lens)) // page_size
    if not shared or any(pages[0] != page_lists[0][0] for pages in page_lists):
        return 0  # most batches end here, before any list becomes an array
    first = np.asarray(page_lists[0][:shared])
    for pages in page_lists[1:]:
        differs = np.asarray(pages[:shared]) != first[:shared]
        if differs.any():
            shared = int(differs.argmax())
    return shared * page_size

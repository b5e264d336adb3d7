"""Launches of `equal_cuts.cut_kernel`: the list of a step's work items, which the device makes."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import torch
import triton

from attn_backends.kernels.equal_cuts import LISTED_PAGES, cut_kernel
from attn_backends.kernels.launch import launch
from attn_backends.kernels.operators import operator

_ITEMS, _WARPS = 64, 4  # of a program


class SplitSizes(NamedTuple):
    """What follows from the shape of a batch of decode rows, whatever their lengths."""

    num_rows: int
    target: int  # cuts that fill the GPU
    window_left: int  # positions before its own that a query sees
    chunk: int  # positions in a chunk; a query sees its own chunk alone
    block_n: int  # keys of a block
    min_blocks: int  # blocks of a cut at least


class CutTensors(NamedTuple):
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    work_items: torch.Tensor
    more_items: torch.Tensor
    counters: torch.Tensor
    page_table: torch.Tensor
    item_pages: torch.Tensor


class CutNumbers(NamedTuple):
    num_rows: int
    max_cuts: int
    few_cuts: int
    long_cut: int
    heads: int
    num_sms: int
    resident: int
    row_keys: int
    much_alike: int
    part_keys: int
    whole_keys: int
    halves: int
    num_programs: int
    window_left: int
    chunk: int
    most_tokens: int
    num_counters: int
    table_row: int = 0


class CutConstants(NamedTuple):
    BLOCK_N: int
    MIN_BLOCKS: int
    MAX_ROWS: int
    BLOCK_ITEMS: int
    PAGE_SIZE: int


class Filling(NamedTuple):
    """How a launch fills a GPU."""

    few_cuts: int  # at most, where they are short and rows fewer than there can be cuts
    long_cut: int  # blocks from which on a cut is long
    heads: int  # programs for each cut: KV heads times tiles of queries
    num_sms: int  # multiprocessors
    resident: int  # programs that a multiprocessor holds at a time
    row_keys: int  # that are read in the time that a row takes beside its own
    much_alike: int  # blocks, by which a multiprocessor may have more than others where rows are apart
    part_keys: int = 0  # of the shortest parts of rows, where programs are to spare; 0: as many as of others
    whole_keys: int = 0  # of a row, up to which it is no such parts
    halves: int = 1  # of a row's queries, for each of which such parts and whole rows beside them are listed; 2 at most


def max_split_items(max_cuts: int) -> int:
    """Number of work items that can be splits of rows: a cut shares its first row and its last one at most."""
    return 2 * max_cuts - 2


def num_programs(num_rows: int, max_cuts: int) -> int:
    """Number of programs that a launch has: for each cut, or for each short row and some splits of others. Where most
    have nothing, the GPU gives some multiprocessors more of the rest than others."""
    return max(max_cuts, num_rows + max_cuts // 4)


@operator(("work_items", "more_items", "counters", "item_pages"))
def cut_work(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, work_items: torch.Tensor, more_items: torch.Tensor,
    counters: torch.Tensor, page_table: torch.Tensor, item_pages: torch.Tensor, numbers: CutNumbers,
    constants: CutConstants,
) -> None:  # fmt: skip
    """List the work items for lengths [num_rows] and query starts [num_rows + 1], i32, in one launch."""
    tensors = CutTensors(seq_lens, query_start_loc, work_items, more_items, counters, page_table, item_pages)
    launch(cut_kernel, -(-(numbers.num_rows + numbers.max_cuts) // _ITEMS), tensors, numbers, (constants,), _WARPS)


class CutList:
    """The work items of batches of one shape, by cuts.

    A work item is all that a program has to know: the row (-1: none), its first key, the end of its keys, the row's
    first partial slot, the row's number of splits times MAX_SPLITS plus the number of this one, the row's length, its
    first query token, and its number of query tokens; HALF more for the first half of these tokens' queries alone, and
    twice that for the second. With a page size there is a list of the first pages' ids beside it, which come as soon as
    the item does: of a page table they would come after it.

    Args:
        sizes: `target` is how many cuts there are at most, and `min_blocks` what one has at least.
        counters: [num_counters] i32, which every listing sets to 0: what a launch that was cut short left there must
            not be found by the next step.
        most_tokens: as `cut_kernel` has them.
        page_size: slots of a page, if page ids are to be listed; 0: none are.
    """

    def __init__(
        self, sizes: SplitSizes, filling: Filling, counters: torch.Tensor, most_tokens: int, page_size: int = 0
    ) -> None:
        self.num_programs = num_programs(sizes.num_rows, sizes.target)
        self.counters = counters
        num_items = self.num_programs + sizes.num_rows + sizes.target
        num_pages = num_items if page_size else 0, int(LISTED_PAGES.value)
        self._sizes = (num_items, 8), (self.num_programs, 2), num_pages
        self.work_items, self.more_items, self.item_pages = map(counters.new_empty, self._sizes)
        self._numbers = CutNumbers(
            num_rows=sizes.num_rows, max_cuts=sizes.target, **filling._asdict(), num_programs=self.num_programs,
            window_left=sizes.window_left, chunk=sizes.chunk, most_tokens=most_tokens, num_counters=len(counters),
        )  # fmt: skip
        self._constants = CutConstants(
            BLOCK_N=sizes.block_n, MIN_BLOCKS=sizes.min_blocks, MAX_ROWS=triton.next_power_of_2(sizes.num_rows),
            BLOCK_ITEMS=_ITEMS, PAGE_SIZE=page_size,
        )  # fmt: skip

    def anew(self) -> CutList:
        """The same for another step, with work items of its own."""
        made = copy(self)
        made.work_items, made.more_items, made.item_pages = map(self.counters.new_empty, self._sizes)
        return made

    def fill(
        self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, page_table: torch.Tensor | None = None
    ) -> None:
        """List the work items for lengths [num_rows], query starts [num_rows + 1] and, where page ids are listed, a
        page table [num_rows, max_pages], i32, in one launch."""
        table, numbers = seq_lens, self._numbers
        if page_table is not None:
            table, numbers = page_table, numbers._replace(table_row=page_table.stride(0))
        cut_work(seq_lens, query_start_loc, self.work_items, self.more_items, self.counters, table, self.item_pages,
                 numbers, self._constants)  # fmt: skip

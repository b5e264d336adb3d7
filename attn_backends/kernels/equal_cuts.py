"""The keys of all decode rows, cut as one into parts of one size: the device itself cuts, in one small launch a step.

A row's end is no reason to end a part: so every program of a grid that fills the GPU reads as much as any other,
whatever the rows' lengths and however few or many they are. What a part has of a row is a work item of `split_kv`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.split_kv import MAX_SPLITS, clear_counters, first_key, load_rows, of_row, store_items

SHORT_KEYS = tl.constexpr(128)  # of a row in the mean, up to which no program walks on to another row
LEAST_KEYS = tl.constexpr(128)  # of a part of a row of few: fewer are sooner read than joined
PART_SIZES = tl.constexpr(3)  # of short parts that are tried at most, each twice the one before
MOST_PART_KEYS = tl.constexpr(64)  # of a short part
FEW_PARTS = tl.constexpr(8)  # of a row: where none has more they may take more of the programs
MANY_PARTS = tl.constexpr(128)  # of a row, behind which fewer that are longer are faster
LISTED_PAGES = tl.constexpr(8)  # page ids that are listed with a work item, of its first keys
# Added to a work item's number of query tokens: once if it is for the first half of a row's queries, twice if for the
# second, and not at all if for all of them.
HALF = tl.constexpr(1 << 16)
MUCH_IDLE = tl.constexpr(2)  # blocks of a row, times the part of a GPU beyond half that its last round leaves idle
_VARY = ["num_rows", "max_cuts", "few_cuts", "long_cut", "heads", "num_sms", "resident", "row_keys", "much_alike",
         "part_keys", "whole_keys", "halves", "num_programs", "window_left", "chunk", "most_tokens", "num_counters",
         "table_row"]  # fmt: skip


@triton.jit(do_not_specialize=_VARY, do_not_specialize_on_alignment=["page_table"])  # type: ignore[untyped-decorator]
def cut_kernel(  # type: ignore[no-untyped-def]
    seq_lens,  # [num_rows] i32
    query_start_loc,  # [num_rows + 1] i32
    work_items,  # [num_programs + num_rows + max_cuts, 8] i32, see below
    more_items,  # [num_programs, 2] i32: begin and end of each program's items but the first
    counters,  # [num_counters] i32, become 0
    page_table,  # [num_rows, max_pages] i32, if PAGE_SIZE
    item_pages,  # [as many as work items, LISTED_PAGES] i32, if PAGE_SIZE: the ids of an item's first pages
    num_rows,
    max_cuts,
    few_cuts,  # for this and the next nine see `cut_list.Filling`
    long_cut,
    heads,
    num_sms,
    resident,
    row_keys,
    much_alike,
    part_keys,
    whole_keys,
    halves,
    num_programs,  # of the launch, see `cut_list.num_programs`
    window_left,  # positions before its own that a query sees
    chunk,  # positions in a chunk; a query sees its own chunk alone
    most_tokens,  # rows of more query tokens are left alone, and those without any
    num_counters,
    table_row,  # elements from row to row of the page table
    BLOCK_N: tl.constexpr,  # keys of a block
    MIN_BLOCKS: tl.constexpr,  # blocks of a cut at least
    MAX_ROWS: tl.constexpr,  # a power of two, at least num_rows
    BLOCK_ITEMS: tl.constexpr,  # work items, and cuts, of a program
    PAGE_SIZE: tl.constexpr,  # slots; 0: no page ids are listed
):
    """List what each cut has of each row: a program's first item, or a row of -1, where it finds it without looking, at
    its own number, and all others behind these. `cut_list.max_split_items` are splits at most."""
    clear_counters(counters, num_counters)
    rows = tl.arange(0, MAX_ROWS)
    lens, starts, query_lens = load_rows(seq_lens, query_start_loc, rows, rows < num_rows)
    exists = (query_lens > 0) & (query_lens <= most_tokens)  # others have none
    first = first_key(lens - query_lens, window_left, chunk) // BLOCK_N
    blocks = tl.where(exists, tl.maximum((lens + BLOCK_N - 1) // BLOCK_N - first, 0), 0)
    filling = (few_cuts, long_cut, heads, num_sms, resident, row_keys, much_alike, part_keys, whole_keys, halves)
    cuts = _cut(exists, blocks, max_cuts, filling, num_programs, BLOCK_N, MIN_BLOCKS)
    work_item = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    of_rows = (rows, num_rows, lens, starts, query_lens, first, blocks)
    at, row, begin, end = _list_items(work_items, work_item, num_programs, of_rows, cuts, BLOCK_N)
    if PAGE_SIZE:
        _list_pages(item_pages, page_table + row.to(tl.int64) * table_row, at, row < num_rows, begin, end, PAGE_SIZE)
    _list_programs(work_items, more_items, work_item, num_programs, cuts[3], cuts[4])


@triton.jit  # type: ignore[untyped-decorator]
def _list_items(work_items, work_item, num_programs, of_rows, cuts, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """List some work items [BLOCK_ITEMS] of all rows. Returns where each is, its row, its first key, and the end of its
    keys."""
    rows, num_rows, lens, starts, query_lens, first, blocks = of_rows
    ends, num_blocks, num_cuts, first_cut, num_items, is_apart, halves = cuts
    item_ends, num_splits = tl.cumsum(num_items, 0), num_items // halves
    num_partials = tl.where(num_splits > 1, num_splits, 0)
    slots_before = tl.cumsum(num_partials, 0) - num_partials
    row = tl.sum((item_ends[None] <= work_item[:, None]).to(tl.int32), 1)
    mine = rows[None] == row[:, None]
    row_splits, row_num_blocks = tl.maximum(of_row(mine, num_splits), 1), of_row(mine, blocks)
    row_begin, row_first, row_len = of_row(mine, ends - blocks), of_row(mine, first), of_row(mine, lens)
    nth = work_item - of_row(mine, item_ends - num_items)  # of the row's
    split, cut = nth // halves, of_row(mine, first_cut) + nth
    half = tl.where(halves > 1, nth % halves + 1, 0)
    start, stop = _part_of(split, row_splits, row_num_blocks, cut, row_begin, num_blocks, num_cuts, is_apart)
    at = tl.where(_items_before(cut, first_cut, num_items) == work_item, cut, num_programs + work_item)
    begin, end = (row_first + start) * BLOCK_N, tl.minimum((row_first + stop) * BLOCK_N, row_len)
    store_items(
        work_items + at * 8, row < num_rows, (row, begin, end, of_row(mine, slots_before),
        row_splits * MAX_SPLITS + split, row_len, of_row(mine, starts),
        of_row(mine, query_lens) + half * HALF),
    )  # fmt: skip
    return at, row, begin, end


@triton.jit  # type: ignore[untyped-decorator]
def _list_pages(item_pages, pages, at, exists, begin, end, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """List the ids of each item's first pages; `pages` point to its row's first page id. Where it has fewer pages they
    end with its last one's, again and again: so keys behind its last one are read in that one's page."""
    for i in tl.static_range(LISTED_PAGES):
        page = tl.minimum(begin // PAGE_SIZE + i, (end - 1) // PAGE_SIZE)
        page_id = tl.load(pages + page, mask=exists & (begin < end), other=0)
        tl.store(item_pages + at * LISTED_PAGES + i, page_id, mask=exists)


@triton.jit
def _part_of(  # type: ignore[no-untyped-def]
    split, num_splits, blocks_of_row, cut, row_begin, num_blocks, num_cuts, is_apart
):
    """[BLOCK_ITEMS]: the first of a row's blocks that a split has, and the end of its blocks."""
    start = tl.where(split == 0, 0, _begin_of(cut, num_blocks, num_cuts) - row_begin)
    stop = tl.where(split == num_splits - 1, blocks_of_row, _begin_of(cut + 1, num_blocks, num_cuts) - row_begin)
    if is_apart:
        start, stop = _begin_of(split, blocks_of_row, num_splits), _begin_of(split + 1, blocks_of_row, num_splits)
    return start, stop


@triton.jit
def _list_programs(  # type: ignore[no-untyped-def]
    work_items, more_items, program, num_programs, first_cut, num_splits
):
    """List which items but the first are those of each of some programs [BLOCK_ITEMS]; one that has nothing gets an
    item that says so."""
    is_there = program < num_programs
    before, until = _items_before(program, first_cut, num_splits), _items_before(program + 1, first_cut, num_splits)
    tl.store(more_items + program * 2, num_programs + before + 1, mask=is_there)
    tl.store(more_items + program * 2 + 1, num_programs + until, mask=is_there)
    nothing = is_there & (before == until)
    tl.store(work_items + program[:, None] * 8 + tl.arange(0, 8)[None], -1, mask=nothing[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _cut(  # type: ignore[no-untyped-def]
    exists,  # [MAX_ROWS]: there is such a row
    blocks,  # [MAX_ROWS] i32, of keys that are seen
    max_cuts,
    filling,  # see `cut_list.Filling`
    num_programs,  # of the launch
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):
    """Where cuts lie. A row takes a little longer than its blocks: it counts as some more, in front of them, which are
    no one's. There are as many cuts as a GPU holds at once if they are long or fewer than rows, and else so many that
    they are joined soon; of a row that would be in many of the shortest, so many of twice their length as take all
    multiprocessors the same time.

    A program that goes from one row to another waits for each, and so rows may be cut apart instead, each for itself
    (see `_are_faster_apart`); where there is little to do, and programs to spare, parts may be up to twice as long as
    the shortest, unless those all run side by side. Where even short ones leave some of the GPU, they are those.

    Returns each row's end, all blocks, the number of cuts, each row's first cut, how many it is in, whether rows are
    apart, and how many halves of its queries a row's parts are listed for."""
    few_cuts, long_cut, heads, num_sms, resident, row_keys, _much_alike, _part_keys, _whole_keys, _halves = filling
    widths = tl.where(exists, tl.maximum(blocks + row_keys // BLOCK_N, 1), 0)
    ends, num_blocks = tl.cumsum(widths, 0), tl.sum(widths, 0)
    are_few = (num_blocks < max_cuts * long_cut) & (tl.sum((blocks > 0).to(tl.int32), 0) < max_cuts)
    most = tl.where(are_few, few_cuts, max_cuts)
    longer_parts = num_blocks.to(tl.int64) * heads // (2 * MIN_BLOCKS)  # twice as long as the shortest
    even = tl.maximum((longer_parts + num_sms - 1) // num_sms * num_sms // heads, 1)
    most = tl.where(tl.max(blocks, 0) > MANY_PARTS * MIN_BLOCKS, tl.minimum(most, even).to(tl.int32), most)
    num_cuts = tl.maximum(tl.minimum(most, num_blocks // MIN_BLOCKS), 1)
    size = tl.maximum(num_blocks // num_cuts, 1)  # where no row exists
    least: tl.constexpr = LEAST_KEYS // BLOCK_N if LEAST_KEYS > MIN_BLOCKS * BLOCK_N else MIN_BLOCKS
    shortest = tl.where(exists, (tl.maximum(blocks, 1) + least - 1) // least, 0)
    of_few = tl.where(tl.sum(shortest, 0) * heads <= num_sms * resident, least, tl.maximum(2 * MIN_BLOCKS - 1, least))
    longest = tl.where(num_cuts < most, of_few, size + size // 16)
    apart = tl.where(exists, (tl.maximum(blocks, 1) + longest - 1) // longest, 0)
    part, counts, halves = _short_parts(exists, blocks, filling, BLOCK_N)
    longest, apart = tl.where(part > 0, part, longest), tl.where(part > 0, counts, apart)
    is_apart = (tl.sum(apart, 0) <= num_programs) & (tl.sum(tl.where(apart > 1, apart, 0), 0) <= 2 * max_cuts - 2)
    is_apart &= _are_faster_apart(blocks, apart, longest, num_blocks, filling, BLOCK_N)
    halves = tl.where(is_apart & (halves * tl.sum(apart, 0) <= max_cuts), halves, 1)
    first_cut = _cut_of(tl.minimum(ends - blocks, ends - 1), num_blocks, num_cuts)
    num_splits = tl.where(exists, _cut_of(ends - 1, num_blocks, num_cuts) - first_cut + 1, 0)
    first_cut = tl.where(is_apart, halves * (tl.cumsum(apart, 0) - apart), first_cut)
    return ends, num_blocks, num_cuts, first_cut, tl.where(is_apart, halves * apart, num_splits), is_apart, halves


@triton.jit  # type: ignore[untyped-decorator]
def _short_parts(  # type: ignore[no-untyped-def]
    exists, blocks, filling, BLOCK_N: tl.constexpr
):
    """How many blocks short parts of rows have; 0: there are no such. They are the shortest that no row is in many of,
    and no more than half of the programs that a GPU holds at once have one of; two thirds where no row is in more than
    FEW_PARTS. And how many parts each row is in, and how many halves each of these is wished in: all can be attended
    for at once if they are of the first size."""
    _few_cuts, _long_cut, heads, num_sms, resident, _row_keys, _much_alike, part_keys, whole_keys, halves = filling
    slots = num_sms * resident
    part, part_blocks = part_keys * 0, tl.maximum(part_keys // BLOCK_N, 1)
    counts = tl.where(exists, 1, 0)
    for _ in tl.static_range(PART_SIZES):
        tried = tl.where(exists & (blocks > whole_keys // BLOCK_N), (blocks + part_blocks - 1) // part_blocks, 1)
        tried = tl.where(exists, tried, 0)
        share = tl.where(tl.max(tried, 0) <= FEW_PARTS, 3, 4)
        fits = (part == 0) & (part_keys > 0) & (share * tl.sum(tried, 0) * heads <= 2 * slots)
        fits &= (tl.max(tried, 0) <= MANY_PARTS) & (part_blocks * BLOCK_N <= MOST_PART_KEYS)
        part, counts = tl.where(fits, part_blocks, part), tl.where(fits, tried, counts)
        part_blocks *= 2
    return part, counts, tl.where((part > 0) & (part * BLOCK_N <= part_keys), halves, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _are_faster_apart(  # type: ignore[no-untyped-def]
    blocks,  # [MAX_ROWS] i32, of rows
    apart,  # [MAX_ROWS] i32, parts of each
    longest,  # blocks that a part has at most
    num_blocks,  # of cuts
    filling,  # see `cut_list.Filling`
    BLOCK_N: tl.constexpr,
):
    """Whether parts of rows take less time than equal cuts: where none is joined, and half of the last round is there
    or rows are short; where all run side by side and no multiprocessor has much more than others, by the longer ones;
    and where they are short in the mean and not many."""
    _few_cuts, _long_cut, heads, num_sms, resident, _row_keys, much_alike, _part_keys, _whole_keys, _halves = filling
    num_parts, slots = tl.sum(apart, 0), num_sms * resident
    is_big = 2 * blocks > longest * apart
    big_parts, big_blocks = tl.sum(tl.where(is_big, apart, 0), 0), tl.sum(tl.where(is_big, blocks, 0), 0)
    load = (big_parts * heads + num_sms - 1) // num_sms * big_blocks.to(tl.float32) / tl.maximum(big_parts, 1)
    rounds, idle = num_parts * heads / slots, (slots - 1 - (num_parts * heads + slots - 1) % slots) / slots
    are_even = load <= num_blocks.to(tl.float32) * heads / num_sms + much_alike
    are_short = tl.sum(blocks, 0) <= num_parts * (SHORT_KEYS // BLOCK_N)
    are_whole = (tl.max(apart, 0) <= 1) & ((idle - 0.5) * tl.max(blocks, 0) <= MUCH_IDLE)
    return are_whole | (are_even & (rounds <= 1)) | (are_short & (rounds <= 2))


@triton.jit
def _begin_of(cut, num_blocks, num_cuts):  # type: ignore[no-untyped-def]
    """The first of all blocks that a cut has."""
    return (cut.to(tl.int64) * num_blocks // num_cuts).to(tl.int32)


@triton.jit
def _cut_of(block, num_blocks, num_cuts):  # type: ignore[no-untyped-def]
    """The cut that a block is in."""
    return (((block.to(tl.int64) + 1) * num_cuts - 1) // tl.maximum(num_blocks, 1)).to(tl.int32)


@triton.jit
def _items_before(cut, first_cut, num_splits):  # type: ignore[no-untyped-def]
    """[BLOCK_ITEMS]: how many work items lie in cuts before each of these."""
    return tl.sum(tl.minimum(tl.maximum(cut[:, None] - first_cut[None], 0), num_splits[None]), 1)

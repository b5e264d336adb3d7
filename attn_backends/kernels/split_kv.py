"""Splitting the keys of decode rows over a GPU and joining the parts: what kernels of ours share.

The device itself cuts the work: one small launch a step reads the lengths and lists items, runs of keys of one row that
take about equally long. How many there may be follows from the number of rows and of multiprocessors alone, so the grid
is the same for every batch of a graph, and one long row among short ones is as fast as the same keys in even rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import triton
import triton.language as tl

from attn_backends.kernels.launch import ALIGNED, INTERPRETED, operator, power_of_two, start_kernel
from attn_backends.spec import AttentionSpec

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 30)  # beyond any position
MOST_ITEMS = tl.constexpr(1 << 15)  # of a row
HOPPER_PAGE = 16  # slots, of which the pages of kernels for Hopper are multiples, as those of a load are
COUNTERS = tl.constexpr(1024)  # that a scheduling program clears at a time
_ITEMS = 64  # of a scheduling program


class Tile(Protocol):
    """Sizes of a kernel's tile, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def keys(self) -> int: ...
    @property
    def stages(self) -> int: ...


TileT = TypeVar("TileT", bound=Tile)


def fitted(tile: TileT, need: Callable[[TileT], int], room: int) -> TileT:
    """The tile, or the nearest whose bytes fit: of fewer blocks under way, then of smaller ones, then of fewer rows.

    One that nothing helps comes back as small as can be: Triton says what it lacks.
    """
    stages = tile.stages
    while need(tile) > room:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > 16:
            tile = replace(tile, keys=tile.keys // 2, stages=stages)
        elif tile.stages > 1:
            tile = replace(tile, stages=1)
        elif getattr(tile, "rows", 0) > 16:
            tile = replace(tile, rows=tile.rows // 2)  # type: ignore[attr-defined]
        else:
            break
    return tile


def block_bytes(spec: AttentionSpec, keys: int, stages: int, dim: int) -> int:
    """Of blocks of keys under way, `dim` wide in all; those of another dtype than the queries are converted beside."""
    converted = spec.dtype.itemsize if spec.cache_dtype is not spec.dtype else 0
    return keys * dim * (stages * spec.cache_dtype.itemsize + converted)


def padded(size: int) -> int:
    """A power of two, of at least 16: what a tile of a matrix unit can be."""
    return max(16, power_of_two(size))


@operator(("items", "counters"))
def list_items(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, items: torch.Tensor, counters: torch.Tensor, how: list[int]
) -> None:
    """For lengths [num_rows] and query starts [num_rows + 1], i32. One launch."""
    _launch_schedule(seq_lens, query_start_loc, items, counters, how)


def _launch_schedule(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, items: torch.Tensor, counters: torch.Tensor, how: list[int]
) -> tuple[Any, tuple[int, ...]]:
    """Returns the compiled kernel on its grid, and its arguments behind the first two tensors."""
    num_rows, target, behind, chunk, keys, min_blocks = how
    grid = (-(-len(items) // _ITEMS), 1, 1)
    numbers = (num_rows, target, len(items), behind, chunk, len(counters), keys, min_blocks,
               triton.next_power_of_2(num_rows), _ITEMS)  # fmt: skip
    compiled = start_kernel(schedule_kernel, grid, seq_lens, query_start_loc, items, counters, *numbers, num_warps=4)
    return None if compiled is None else compiled[grid], (items.data_ptr(), counters.data_ptr(), *numbers)


class ItemList:
    """The items of batches of one shape. What Triton does to find the kernel takes longer than to launch it: once.

    Args:
        items: [max_items, 8] i32, which every batch is listed into.
        how: number of rows, target, keys behind a query that it sees, size of its chunk, keys of a block, and blocks of
            an item at least (see `schedule_kernel`).
        counters: [num_counters] i32, which every listing sets to 0: what a launch that was cut short left there must
            not be found by the next step. None: there are none.
    """

    def __init__(self, items: torch.Tensor, how: list[int], counters: torch.Tensor | None = None) -> None:
        self.items = items
        self.counters = items.new_empty(0) if counters is None else counters
        self._how = how
        self._kernel: Any = None
        self._arguments: tuple[int, ...] = ()

    def fill(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """List the items for lengths [num_rows] and query starts [num_rows + 1], i32. One launch."""
        at = (seq_lens.data_ptr(), query_start_loc.data_ptr())
        if self._kernel is not None and not (at[0] | at[1]) % ALIGNED:
            self._kernel(*at, *self._arguments)
        elif INTERPRETED or (at[0] | at[1]) % ALIGNED:
            list_items(seq_lens, query_start_loc, self.items, self.counters, self._how)
        else:
            given = (seq_lens, query_start_loc, self.items, self.counters, self._how)
            self._kernel, self._arguments = _launch_schedule(*given)


_VARY = ["num_rows", "target", "max_items", "behind", "chunk", "num_counters"]


@triton.jit(do_not_specialize=_VARY)  # type: ignore[untyped-decorator]
def schedule_kernel(  # type: ignore[no-untyped-def]
    seq_lens, query_start_loc, items, counters, num_rows, target, max_items, behind, chunk, num_counters,
    KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr, MAX_ROWS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """`items` [max_items, 8] i32, all that a program has to know: row (-1: none), first key, end of keys, place of the
    row's partial results, how many items the row has and which this is, its length, first query token and their number.

    About `target` items in all, or one a row. A row with less than half as many blocks again as an item has is not
    split: at most 4 / 3 of `target` items are parts of rows.

    `counters` [num_counters] i32 become 0.
    """
    for first in range(tl.program_id(0) * COUNTERS, num_counters, tl.num_programs(0) * COUNTERS):
        counter = first + tl.arange(0, COUNTERS)
        tl.store(counters + counter, counter * 0, mask=counter < num_counters)
    rows = tl.arange(0, MAX_ROWS)
    exists = rows < num_rows
    lens = tl.load(seq_lens + rows, mask=exists, other=0)
    starts = tl.load(query_start_loc + rows, mask=exists, other=0)
    query_lens = tl.load(query_start_loc + rows + 1, mask=exists, other=0) - starts
    first = first_key(lens - query_lens, behind, chunk) // KEYS
    blocks = tl.maximum((lens + KEYS - 1) // KEYS - first, 0)
    size = tl.maximum((tl.sum(blocks, 0) + target - 1) // target, MIN_BLOCKS)
    counts = tl.where(exists, tl.maximum((blocks + size // 2) // size, 1), 0)
    ends = tl.cumsum(counts, 0)
    parts = tl.where(counts > 1, counts, 0)
    parts_before = tl.cumsum(parts, 0) - parts

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row = tl.sum((ends[None] <= item[:, None]).to(tl.int32), 1)
    mine = rows[None] == row[:, None]
    count = tl.maximum(tl.sum(tl.where(mine, counts[None], 0), 1), 1)
    nth = item - tl.sum(tl.where(mine, (ends - counts)[None], 0), 1)
    place = tl.sum(tl.where(mine, parts_before[None], 0), 1) + nth
    row_first = tl.sum(tl.where(mine, first[None], 0), 1)
    row_blocks = tl.sum(tl.where(mine, blocks[None], 0), 1)
    row_len = tl.sum(tl.where(mine, lens[None], 0), 1)
    start = (row_first + nth * row_blocks // count) * KEYS
    stop = tl.minimum((row_first + (nth + 1) * row_blocks // count) * KEYS, row_len)
    inside = item < max_items
    at = items + item * 8
    tl.store(at, tl.where(row < num_rows, row, -1), mask=inside)
    tl.store(at + 1, start, mask=inside)
    tl.store(at + 2, stop, mask=inside)
    tl.store(at + 3, place - nth, mask=inside)
    tl.store(at + 4, count * MOST_ITEMS + nth, mask=inside)
    tl.store(at + 5, row_len, mask=inside)
    tl.store(at + 6, tl.sum(tl.where(mine, starts[None], 0), 1), mask=inside)
    tl.store(at + 7, tl.sum(tl.where(mine, query_lens[None], 0), 1), mask=inside)


@triton.jit
def first_key(position, behind, chunk):  # type: ignore[no-untyped-def]
    """The oldest key that a query sees, by its position."""
    position = tl.maximum(position, 0)
    return tl.maximum(position - behind, position // chunk * chunk)


@triton.jit
def seen_by_all(oldest, newest, seq_len, ahead, behind, chunk):  # type: ignore[no-untyped-def]
    """Of queries from one position to another: the first key that all of them see, and the first behind those."""
    chunk_end = (tl.maximum(oldest, 0) // chunk + 1) * chunk
    return first_key(newest, behind, chunk), tl.minimum(tl.minimum(seq_len, oldest + 1 + ahead), chunk_end)


@triton.jit  # type: ignore[untyped-decorator]
def join(  # type: ignore[no-untyped-def]
    partial, partial_sums, first, step, count, num_lanes,
    LANES: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """All parts of a row, each weighing exp2 of its highest logit, PARTS at a time: so many loads are under way."""
    inner = tl.arange(0, LANES)
    dims = tl.arange(0, BLOCK_DIM_VO)
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES, BLOCK_DIM_VO], tl.float32)
    for start in range(0, count, PARTS):
        nth = start + tl.arange(0, PARTS)
        at = (first + nth.to(tl.int64) * step)[:, None] * LANES + inner[None]  # [PARTS, LANES]
        there = (nth < count)[:, None] & (inner < num_lanes)[None]
        tops = tl.load(partial_sums + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(partial_sums + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        parts = tl.load(partial + at[:, :, None] * BLOCK_DIM_VO + dims[None, None], mask=there[:, :, None], other=0.0,
                        cache_modifier=".cg")  # fmt: skip
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tops - base[None])
        shrunk = tl.exp2(top - base)
        total = total * shrunk + tl.sum(totals * weights, 0)
        sums = sums * shrunk[:, None] + tl.sum(parts * weights[:, :, None], 0)
        top = new_top
    return sums, top, total


@triton.jit  # type: ignore[untyped-decorator]
def load_block(at, live, within, MASKED: tl.constexpr, FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros where nothing is to be read: what lies there may be NaN. Without a mask where all is read."""
    if MASKED:
        loaded = tl.load(at, mask=live, other=0.0) if FULL else tl.load(at, mask=live & within, other=0.0)
    else:
        loaded = tl.load(at) if FULL else tl.load(at, mask=within, other=0.0)
    return loaded

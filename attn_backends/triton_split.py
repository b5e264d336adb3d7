"""Splitting the keys of decode rows over a GPU and joining the parts: what kernels of ours share.

The device itself cuts the work: one small launch a step reads the lengths and lists items, runs of keys of one row that
take about equally long. How many there may be follows from the number of rows and of multiprocessors alone, so the grid
is the same for every batch of a graph, and one long row among short ones is as fast as the same keys in even rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_ITEMS = 64  # of a scheduling program


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; on a CPU a few, so that little work is split there too."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def padded(size: int) -> int:
    """A power of two, of at least 16: what a tile of a matrix unit can be."""
    return max(16, 1 << (size - 1).bit_length())


def operator(mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Nothing where kernels are compiled: an operator takes longer to call than a kernel to launch."""

    def wrap(launch: Callable[..., None]) -> Callable[..., None]:
        if not INTERPRETED:
            return launch
        name = f"attn_backends::triton_{launch.__name__.strip('_')}"
        made: Callable[..., None] = torch.library.custom_op(name, launch, mutates_args=mutates, device_types="cpu")
        return made

    return wrap


@operator(("items",))
def list_items(seq_lens: torch.Tensor, query_start_loc: torch.Tensor, items: torch.Tensor, how: list[int]) -> None:
    """For lengths [num_rows] and [num_rows + 1] i32; the starts are read with a window or chunks alone. One launch."""
    num_rows, target, window, chunk, keys, min_blocks = how
    grid = (-(-len(items) // _ITEMS),)
    schedule_kernel[grid](
        seq_lens, query_start_loc, items, num_rows, target, len(items),
        window, chunk, window >= 0 or chunk > 0, keys, min_blocks, triton.next_power_of_2(num_rows), _ITEMS,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "target", "max_items"])  # type: ignore[untyped-decorator]
def schedule_kernel(  # type: ignore[no-untyped-def]
    seq_lens, query_start_loc, items, num_rows, target, max_items,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, POSITIONAL: tl.constexpr, KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    MAX_ROWS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """`items` [max_items, 8] i32: row (-1: none), first key, end of keys, items of the row, place of partial results.

    About `target` items in all, or one a row. A row with less than half as many blocks again as an item has is not
    split: at most 4 / 3 of `target` items are parts of rows.
    """
    rows = tl.arange(0, MAX_ROWS)
    exists = rows < num_rows
    lens = tl.load(seq_lens + rows, mask=exists, other=0)
    position = lens
    if POSITIONAL:
        starts = tl.load(query_start_loc + rows, mask=exists, other=0)
        position -= tl.load(query_start_loc + rows + 1, mask=exists, other=0) - starts
    first = first_key(position, WINDOW, CHUNK) // KEYS
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
    tl.store(items + item * 8, tl.where(row < num_rows, row, -1), mask=inside)
    tl.store(items + item * 8 + 1, start, mask=inside)
    tl.store(items + item * 8 + 2, stop, mask=inside)
    tl.store(items + item * 8 + 3, count, mask=inside)
    tl.store(items + item * 8 + 4, place - nth, mask=inside)
    tl.store(items + item * 8 + 5, nth, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The oldest key that a query sees, by its position."""
    if WINDOW >= 0:
        return tl.maximum(position - WINDOW, 0)
    if CHUNK > 0:
        return tl.maximum(position, 0) // CHUNK * CHUNK
    return tl.maximum(position, 0) * 0


@triton.jit  # type: ignore[untyped-decorator]
def join(  # type: ignore[no-untyped-def]
    partial, partial_sums, place, count, head, lane, live, dims_vo,
    KV_HEADS: tl.constexpr, LANES: tl.constexpr, BLOCK_DIM_VO: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All parts of a row, each weighing exp2 of its highest logit."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for nth in tl.range(0, count, loop_unroll_factor=4):
        at = ((place + nth) * KV_HEADS + head) * LANES + lane
        top = tl.maximum(top, tl.load(partial_sums + at * 2, mask=live, other=0.0, cache_modifier=".cg"))
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.zeros([ROWS, BLOCK_DIM_VO], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for nth in tl.range(0, count, loop_unroll_factor=4):
        at = ((place + nth) * KV_HEADS + head) * LANES + lane
        part_top = tl.load(partial_sums + at * 2, mask=live, other=0.0, cache_modifier=".cg")
        part_total = tl.load(partial_sums + at * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        part = tl.load(partial + at[:, None].to(tl.int64) * BLOCK_DIM_VO + dims_vo[None], mask=live[:, None],
                       other=0.0, cache_modifier=".cg")  # fmt: skip
        weight = tl.exp2(part_top - base)
        total += part_total * weight
        sums += part * weight[:, None]
    return sums, top, total


@triton.jit  # type: ignore[untyped-decorator]
def finish(sums, top, total, sinks, value_scale, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Outputs [ROWS, DV] f32 and natural LSEs [ROWS] f32; zeros and -inf for a row that saw no key.

    A sink, one logit [ROWS] a row, takes its share of the softmax and gives nothing.
    """
    saw = total > 0
    if SINKS:
        sinks = sinks * LOG2_E
        higher = tl.maximum(top, sinks)
        shrunk = tl.exp2(top - higher)
        sums = sums * shrunk[:, None]
        total = total * shrunk + tl.exp2(sinks - higher)
        top = higher
    out = tl.where(saw[:, None], sums * (value_scale / tl.where(saw, total, 1.0))[:, None], 0.0)
    return out, tl.where(saw, (top + tl.log2(tl.where(saw, total, 1.0))) * LN_2, float("-inf"))

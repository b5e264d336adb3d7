"""Launches around a prefill whose keys are split: its tiles are listed once a step, and each layer's splits joined."""

from __future__ import annotations

import torch

from attn_backends.kernels.launch import launch, num_multiprocessors
from attn_backends.kernels.operators import operator
from attn_backends.kernels.prefill.arguments import (
    Flags,
    JoinConstants,
    JoinScale,
    JoinSpread,
    JoinStrides,
    JoinTensors,
    ListConstants,
    ListNumbers,
    ListTensors,
    VisibleRange,
)
from attn_backends.kernels.prefill.by_length import UNSPLIT
from attn_backends.kernels.prefill.list_kernel import list_kernel
from attn_backends.kernels.prefill.split_kernels import join_kernel
from attn_backends.kernels.prefill.splits import FEW_ROWS, PrefillSplits

MANY_ROWS = 512  # that a program of the list looks at at a time, where there are more than FEW_ROWS
LIST_PROGRAMS = 256  # of a list, if it has no more rows
JOIN_WARPS = 1
JOIN_QUERIES, JOIN_COLUMNS = 4, 64  # of a program at a time, where a tile has few splits, and where it has many
_JOIN_NUMBERS = 2048  # of splits that a program loads at a time
_JOINING = 16  # programs of a multiprocessor, at a time
_MOST_SPREAD = 16  # programs for each split


class TileList:
    """The tiles of a step's prefill, the longest rows' first, with the splits of some, on the device; and where those
    of a tile meet.

    Args:
        splits: the most that there are, and tiles in front that are whole; `splits.num_splits` has those of each row.
            Tiles may be by their own lengths, and then be split by these.
        num_kv_heads: of a launch, or more.
        first_row, num_rows: rows from `first_row` on, of whose tensors others may be in front.
        num_tiles: of these rows for one KV head, or an upper bound.
        partial_acc, partial_ml: f32, of the workspace that its launches use.
        counters: [2] i32, where the prefill's programs count; each listing sets them to 0.
        others_tokens, num_tokens: for graphs of mixed batches: rows of up to so many query tokens are another launch's,
            and what is behind all rows, up to so many tokens, sees no keys.

    Raises:
        ValueError: the batch is above the limits that the workspace was sized from.
    """

    def __init__(
        self, splits: PrefillSplits, num_kv_heads: int, visible: VisibleRange, first_row: int, num_rows: int,
        num_tiles: int, block_dim_vo: int, workspace: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        others_tokens: int = 0, num_tokens: int = 0,
    ) -> None:  # fmt: skip
        target, self.tile, self.num_whole, _, by_length, split_blocks = splits
        num_rows = min(num_rows, FEW_ROWS) if split_blocks else num_rows  # there are no more, but for padding behind
        tile, self.num_kv_heads = self.tile, num_kv_heads
        self.partial_acc, self.partial_ml, self._counters = workspace
        needs = target * tile.rows * block_dim_vo, 2 * target * tile.rows
        has = self.partial_acc.numel(), self.partial_ml.numel()
        if needs[0] > has[0] or needs[1] > has[1]:
            raise ValueError(
                f"a step of {num_rows} rows whose keys are split needs {needs} floats of the workspace, which has "
                f"{has}: make the state with Limits that hold the batch"
            )
        self.is_mixed = num_tokens > 0
        self._form = list_form(num_rows, is_mixed=self.is_mixed, by_length=by_length)
        self.max_split_items = target // num_kv_heads
        max_items = max(1, num_tiles + self.max_split_items)
        self.work_items = self._counters.new_empty(max_items, 8)
        self._numbers = ListNumbers(
            first_row, num_rows, max_items, self.num_whole, max(1, target), num_kv_heads, *visible, others_tokens,
            num_tokens, len(self._counters), tile.tokens, tile.rows, tile.group_size, tile.keys, tile.min_blocks,
            split_blocks * tile.keys * tile.group_size or int(UNSPLIT.value),
        )  # fmt: skip

    def fill(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """List the tiles for lengths [rows] and query starts [rows + 1], i32, in one launch."""
        _list_tiles(seq_lens, query_start_loc, self.work_items, self._counters, self._numbers, *self._form)


@operator(("work_items", "counters"))
def _list_tiles(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, work_items: torch.Tensor, counters: torch.Tensor,
    numbers: ListNumbers, constants: ListConstants, warps: int,
) -> None:  # fmt: skip
    columns = -(-(numbers.num_rows + constants.MIXED) // constants.OWN_ROWS)
    turns = -(-numbers.max_items // constants.BLOCK_ITEMS)  # of a column, if all items are one row's
    grid = max(1, columns), max(1, min(LIST_PROGRAMS // max(1, columns), turns))
    launch(
        list_kernel, grid, ListTensors(seq_lens, query_start_loc, work_items, counters), numbers, (constants,), warps
    )


def list_form(num_rows: int, *, is_mixed: bool, by_length: bool = False) -> tuple[ListConstants, int]:
    """How so many rows are listed, and by how many warps a program: few of them by one, without what several of them
    would wait for, and a program for each. Of many rows the tiles are by their rows' lengths, whatever was asked."""
    if num_rows + is_mixed <= FEW_ROWS:
        return ListConstants(BLOCK_ROWS=FEW_ROWS, OWN_ROWS=1, BLOCK_ITEMS=32, MIXED=int(is_mixed),
                             BY_LENGTH=int(by_length and not is_mixed)), 1  # fmt: skip
    return ListConstants(BLOCK_ROWS=MANY_ROWS, OWN_ROWS=8, BLOCK_ITEMS=32, MIXED=int(is_mixed), BY_LENGTH=0), 4


def splits_at_a_time(block_dim_vo: int) -> int:
    """Number of splits, a power of two, whose numbers of one query a program holds."""
    return max(JOIN_QUERIES, _JOIN_NUMBERS // block_dim_vo)


def join_splits(
    output: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor, splits: TileList, num_kv_heads: int,
    group_size: int, dims: tuple[int, int], value_scale: float, has_sinks: int, use_pdl: bool,
) -> None:  # fmt: skip
    """Join what the prefill in front of it has left, if anything is split. Args: dims: of values, and padded."""
    items = splits.work_items[splits.num_whole :]
    count = min(splits.max_split_items, len(items)) * num_kv_heads
    if not count:
        return
    constants = JoinConstants(
        KV_HEADS=num_kv_heads, GROUP=group_size, BLOCK_M=splits.tile.rows, DIM_VO=dims[0],
        BLOCK_DIM_VO=dims[1], QUERIES=JOIN_QUERIES, BLOCK_SPLITS=splits_at_a_time(dims[1]),
        COLUMNS=min(JOIN_COLUMNS, dims[1]), PDL=int(use_pdl),
    )  # fmt: skip
    spread = max(1, min(_MOST_SPREAD, _JOINING * num_multiprocessors(output.device) // count))
    _join(output, lse, sinks, items, splits.partial_acc, splits.partial_ml, value_scale, has_sinks,
          constants, count * spread, spread)  # fmt: skip


@operator(("output", "lse"))
def _join(
    output: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor, work_items: torch.Tensor,
    partial_acc: torch.Tensor, partial_ml: torch.Tensor, value_scale: float, has_sinks: int, constants: JoinConstants,
    grid: int, spread: int,
) -> None:  # fmt: skip
    tensors = JoinTensors(output, partial_ml if lse is None else lse, sinks, work_items, partial_acc, partial_ml)
    strides = JoinStrides._make((*output.stride()[:2], 0 if lse is None else lse.stride(0)))
    groups = (JoinScale(value_scale), Flags(has_sinks, int(lse is not None)), strides, constants)
    launch(join_kernel, grid, tensors, JoinSpread(spread), groups, JOIN_WARPS, use_pdl=constants.PDL > 0)

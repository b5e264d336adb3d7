"""The schedule of a CUDA graph whose rows have a few query tokens each, in tiles that fit such rows.

FlashInfer's fa2 scheduler (`PrefillPlan` of its attention/scheduler.cuh) is not told how long a graph's rows can be. It
takes tiles for one row of nearly all tokens: 128 packed queries, where rows of 2 tokens and 4 query heads a KV head
have 8. Its first plan lays out the arrays that kernels read; smaller tiles need no more room there. From then on this
fills them, by the same rules but with the tile of such rows, of which each is one tile.

A graph of at least as many rows as the GPU runs tiles at once splits no row. Its blocks are as many as its rows, and
write outputs themselves; FlashInfer's would leave partial results even so, and merge those. The kernel then reads
neither mask nor merge_indptr (`BatchPrefillWithPagedKVCacheDevice` of its attention/prefill.cuh, without partition_kv):
every block takes the item that it finds. That of a row without keys writes zeros, that of one without tokens nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attn_backends.backends.flashinfer.metadata import Rows
from attn_backends.backends.flashinfer.workspace import fa2_tile, graph_tile, tiles_at_once
from attn_backends.batch.page_table import IntArray
from attn_backends.spec import AttentionSpec

MIN_CHUNK = 128  # keys, as in `PrefillSplitQOKVIndptr`


class Layout(NamedTuple):
    """The numbers of FlashInfer's `PrefillPlanInfo`, in its order. Offsets are bytes in the int workspace."""

    padded_batch_size: int  # work items that the arrays have room for, and blocks of a launch a KV head
    total_num_rows: int  # query tokens at most
    total_num_rows_offset: int
    cta_tile_q: int
    request_indices_offset: int
    qo_tile_indices_offset: int
    kv_tile_indices_offset: int
    merge_indptr_offset: int
    o_indptr_offset: int
    kv_chunk_size_ptr_offset: int
    v_offset: int  # in the float workspace, as is `s_offset`
    s_offset: int
    block_valid_mask_offset: int
    enable_cuda_graph: int
    split_kv: int

    def of_whole_rows(self, num_rows: int) -> Layout:
        """The same arrays for a launch of a block a row, which leaves no partial results."""
        return self._replace(padded_batch_size=num_rows, split_kv=0)

    @property
    def arrays(self) -> slice:
        """The bytes from the first array to the end of the last."""
        return slice(self.request_indices_offset, self.block_valid_mask_offset + self.padded_batch_size)

    def is_known(self, num_rows: int) -> bool:
        """Whether it is of a graph, and its arrays lie one behind the other as in FlashInfer's known versions."""
        of_items = 4 * self.padded_batch_size
        arrays = (
            (self.request_indices_offset, of_items), (self.qo_tile_indices_offset, of_items),
            (self.kv_tile_indices_offset, of_items), (self.o_indptr_offset, 4 * (num_rows + 1)),
            (self.kv_chunk_size_ptr_offset, 4), (self.total_num_rows_offset, 4),
            (self.merge_indptr_offset, 4 * (self.total_num_rows + 1)), (self.block_valid_mask_offset, 0),
        )  # fmt: skip
        ends = [0, *(offset + size for offset, size in arrays)]
        in_order = all(offset >= end and offset % 4 == 0 for (offset, _), end in zip(arrays, ends, strict=False))
        return in_order and self.enable_cuda_graph == self.split_kv == 1


@dataclass(frozen=True)
class GraphSchedule:
    """What fills the arrays of a layout."""

    layout: Layout  # with the tile of these rows
    group_size: int
    page_size: int
    most_items: int  # to split rows into, a KV head; where rows are as many, none is split
    most_pages: int | None  # of a row that its tile sees, with a window

    @classmethod
    def replacing(
        cls, planned: Sequence[int], rows: Rows, spec: AttentionSpec, page_size: int, num_sms: int
    ) -> GraphSchedule | None:
        """The schedule over what FlashInfer has planned for rows of a graph, none of which gets longer later.

        None: its tiles are as small, or its numbers are not those of a version that is known.
        """
        longest = int(np.diff(rows.qo_indptr_cpu.numpy()).max())
        tile, at_once = fa2_tile(longest * spec.group_size, spec.head_dim), tiles_at_once(spec, num_sms)
        theirs = graph_tile(spec, rows.num_rows, rows.num_tokens)
        if tile >= theirs or len(planned) != len(Layout._fields):
            return None
        layout = Layout(*map(int, planned))
        has_room = layout.padded_batch_size >= max(rows.num_rows, at_once) and layout.total_num_rows == rows.num_tokens
        if layout.cta_tile_q != theirs or not has_room or not layout.is_known(rows.num_rows):
            return None
        most_pages = None if spec.window_left < 0 else -(-(spec.window_left + tile) // page_size)
        if rows.num_rows >= at_once:
            layout = layout.of_whole_rows(rows.num_rows)
        return cls(layout._replace(cta_tile_q=tile), spec.group_size, page_size, at_once, most_pages)

    @property
    def splits(self) -> bool:
        """Whether rows are split, as their lengths say. If not, the schedule of rows of other lengths is the same."""
        return self.layout.split_kv == 1

    def fill(self, ints: IntArray, rows: Rows) -> None:
        """Write the schedule of these rows.

        Args:
            ints: [at least as many as the layout has] i32, of the host; what lies between and behind is left.

        Raises:
            RuntimeError: rows are longer, or more, than those that the graph was planned for.
        """
        layout, starts, page_starts = self.layout, rows.qo_indptr_cpu.numpy(), rows.kv_indptr_cpu.numpy()
        tokens, pages = starts[1:] - starts[:-1], page_starts[1:] - page_starts[:-1]
        if int(tokens.max()) * self.group_size > layout.cta_tile_q or starts[-1] > layout.total_num_rows:
            raise RuntimeError(
                f"a graph of {layout.total_num_rows} tokens, in tiles of {layout.cta_tile_q} packed queries, got rows "
                f"of up to {tokens.max()} tokens, {starts[-1]} in all: capture one for rows as long"
            )
        chunk, num_splits = self._split(pages, tokens > 0)
        ends = num_splits.cumsum()
        count, num_tokens = int(ends[-1]), int(starts[-1])

        def array(offset: int, size: int) -> IntArray:
            return ints[offset // 4 : offset // 4 + size]

        array(layout.request_indices_offset, count)[:] = np.arange(len(num_splits)).repeat(num_splits)
        array(layout.qo_tile_indices_offset, count)[:] = 0
        array(layout.kv_tile_indices_offset, count)[:] = np.arange(count) - (ends - num_splits).repeat(num_splits)
        array(layout.kv_chunk_size_ptr_offset, 1)[:] = chunk * self.page_size
        array(layout.total_num_rows_offset, 1)[:] = num_tokens
        merge_indptr = array(layout.merge_indptr_offset, num_tokens + 1)  # a token's partial results
        merge_indptr[0], merge_indptr[1:] = 0, num_splits.repeat(tokens).cumsum()
        array(layout.o_indptr_offset, len(starts))[:] = merge_indptr[starts]
        is_valid = ints.view(np.uint8)[layout.block_valid_mask_offset :][: layout.padded_batch_size]
        is_valid[:count], is_valid[count:] = 1, 0

    def _split(self, pages: IntArray, has_tokens: IntArray) -> tuple[int, IntArray]:
        """Pages of a chunk, and each row's number of chunks. Kernels divide by the one even where no row is split."""
        if not self.splits:
            return 1, np.ones_like(pages)
        if self.most_pages is not None:
            pages = np.minimum(pages, self.most_pages)
        pages = np.maximum(pages, 1)
        chunk = self._chunk_pages(pages, has_tokens)
        return chunk, (pages + (chunk - 1)) // chunk * has_tokens

    def _chunk_pages(self, pages: IntArray, has_tokens: IntArray) -> int:
        """Pages of a chunk: as few as leave no more work items than run at once, and where rows alone are more, all.

        It is what `PrefillBinarySearchKVChunkSize` finds, between bounds that are nearer to it.
        """
        low, high = max(MIN_CHUNK // self.page_size, 1), int(pages.max())
        later = pages[has_tokens] - 1  # those after a row's first page: it has later // chunk splits more than one
        more, num_later = self.most_items - len(later), int(later.sum())
        if more < 0:
            return max(low, high)
        low, high = max(low, num_later // self.most_items + 1), min(high, -(-num_later // more)) if more else high
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if int((later // middle).sum()) > more else (low, middle)
        return low

"""The work list of the emulated fa2 in graphs: what a plan writes into the int workspace, and what a run makes of it.

An item of the list is one tile of a row's packed queries (a token's query heads of one KV head lie together) over one
chunk of its keys. It leaves partial results, each in a slot of the float workspace, which are merged for every token.
Where a plan info says that nothing is split, an item goes over all keys of its row and writes outputs itself; there is
no mask then, and every block of the launch follows the item that it finds.
`PrefillSplitQOKVIndptr` of FlashInfer's scheduler.cuh writes such lists; kernels of prefill.cuh and cascade.cuh read
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from tests.emulated.flashinfer_kernel import Rows, place
from tests.emulated.flashinfer_schedule import Fa2Tiles

TILES = (16, 64, 128)


class PlanInfo(NamedTuple):
    """The numbers of `PrefillPlanInfo`, in its order; those that end in `at` are offsets in bytes."""

    padded: int  # items that the list has room for, and blocks of a launch
    most_tokens: int
    num_tokens_at: int
    tile_q: int
    requests_at: int
    qo_tiles_at: int
    kv_tiles_at: int
    merge_at: int
    o_indptr_at: int
    chunk_at: int
    v_at: int  # in the float workspace, as is `s_at`
    s_at: int
    valid_at: int
    graph: int
    split: int

    @property
    def stop(self) -> int:
        """The end of a graph's list."""
        return self.valid_at + self.padded if self.split else self.num_tokens_at + 4


class Planned(list[int]):
    """Numbers that the library itself has returned: it knows more of such a plan than its list says."""


class WorkList(NamedTuple):
    """The list of one plan."""

    requests: list[int]  # of each item, as the next two
    qo_tiles: list[int]
    kv_tiles: list[int]
    merge_indptr: list[int]  # [num_tokens + 1]: a token's partial results
    o_indptr: list[int]  # [batch_size + 1]: a row's partial results
    chunk: int  # pages


def work_list(qo_indptr: Sequence[int], tiles: Fa2Tiles) -> WorkList:
    """Step 3 of `PrefillSplitQOKVIndptr`."""
    work = WorkList([], [], [], [0], [0], tiles.chunk)
    for row, (start, stop) in enumerate(pairwise(qo_indptr)):
        for q_tile in range(tiles.q_tiles[row]):
            for kv_tile in range(tiles.num_chunks[row]):
                work.requests.append(row)
                work.qo_tiles.append(q_tile)
                work.kv_tiles.append(kv_tile)
        for _ in range(stop - start):
            work.merge_indptr.append(work.merge_indptr[-1] + tiles.num_chunks[row])
        work.o_indptr.append(work.o_indptr[-1] + (stop - start) * tiles.num_chunks[row])
    return work


def write_work(pinned: torch.Tensor, info: PlanInfo, work: WorkList, page_size: int) -> None:
    """Fill the list in; what is behind its items stays as it was, but for the mask, which says that it counts not."""
    lists = {
        info.requests_at: work.requests, info.qo_tiles_at: work.qo_tiles, info.kv_tiles_at: work.kv_tiles,
        info.o_indptr_at: work.o_indptr, info.chunk_at: [work.chunk * page_size],
        info.num_tokens_at: [len(work.merge_indptr) - 1],
    } | ({info.merge_at: work.merge_indptr} if info.split else {})  # fmt: skip
    for at, values in lists.items():
        _ints(pinned, at, len(values)).copy_(torch.tensor(values, device="cpu"))
    if info.split:
        count = torch.arange(info.padded, device="cpu") < len(work.requests)
        pinned.view(torch.uint8)[info.valid_at : info.stop].copy_(count)


class Reach(NamedTuple):
    """What a run makes of a list."""

    keys: torch.Tensor  # [num_tokens, num_slots] bool: the keys of a row that tiles of a token go over
    merged: torch.Tensor  # [num_tokens] bool: whose output is written
    broken: torch.Tensor  # [num_tokens] bool: whose output is made of what no tile has written for it alone


def follow(
    int_workspace: torch.Tensor, info: PlanInfo, rows: Rows, query: torch.Tensor, key_shape: Sequence[int],
    head_dim_vo: int, window_left: int,
) -> Reach:  # fmt: skip
    """Where the items of a list lead, without reading the device.

    Raises:
        RuntimeError: kernels are not compiled for the tile; an item is beyond the rows or the float workspace.
        IndexError: likewise.
    """
    if info.tile_q not in TILES:
        raise RuntimeError(f"Unsupported cta_tile_q: {info.tile_q}")
    num_tokens, num_heads = query.shape[:2]
    blocks = _Blocks(int_workspace, info, rows, window_left, num_heads // key_shape[1])
    if not info.split:
        return _written(blocks, num_tokens, key_shape[0])
    partial = _Partials(blocks, (info.s_at - info.v_at) // (4 * num_heads * head_dim_vo))
    tokens = torch.arange(num_tokens, device=query.device)
    merged = tokens < _ints(int_workspace, info.num_tokens_at, 1)
    merge = _ints(int_workspace, info.merge_at, info.most_tokens + 1).long()
    begin, end = (merge[at.clamp(max=info.most_tokens)] for at in (tokens, tokens + 1))
    begin, end = begin.where(merged, 0), end.where(merged, 0)
    slots = begin[:, None] + torch.arange(info.padded, device=query.device)
    used = slots < end[:, None]
    slots = slots.masked_fill(~used, 0)
    own = partial.owner.index_select(0, slots.flatten()).view(slots.shape) == tokens[:, None]
    broken = (used & ~own).any(1) | (end < begin) | (end - begin > info.padded)
    kv_tiles = partial.kv_tile.index_select(0, slots.flatten()).view(slots.shape)
    over = torch.zeros(num_tokens, info.padded + 1, dtype=torch.bool, device=query.device)
    over = over.scatter(1, kv_tiles.masked_fill(~(used & own), info.padded), True)[:, : info.padded]
    key_index = blocks.key_index(num_tokens, key_shape[0])
    chunk = key_index // partial.chunk
    keys = (key_index >= 0) & (chunk < info.padded) & over.gather(1, chunk.clamp(0, info.padded - 1))
    return Reach(keys, merged, broken)


def _written(blocks: _Blocks, num_tokens: int, num_slots: int) -> Reach:
    """What blocks leave that write outputs themselves: a token is broken unless all its heads are written, and by no
    block that attends another one's query."""
    rows, group = blocks.rows, blocks.group
    starts = _ints(blocks.int_workspace, blocks.info.o_indptr_at, len(rows.kv_lens) + 1).long()
    requests = blocks.requests
    at = (starts.index_select(0, requests)[:, None] + blocks.token) * group + blocks.head
    at = at.masked_fill(~blocks.writes, num_tokens * group).flatten()
    sources = (rows.qo_indptr.index_select(0, requests)[:, None] + blocks.token).flatten()
    size, tokens = (num_tokens * group + 1,), torch.arange(num_tokens, device=at.device)[:, None]
    least = at.new_full(size, num_tokens).scatter_reduce(0, at, sources, "amin")[:-1].view(-1, group)
    most = at.new_full(size, -1).scatter_reduce(0, at, sources, "amax")[:-1].view(-1, group)
    keys, everywhere = blocks.key_index(num_tokens, num_slots) >= 0, torch.ones_like(tokens[:, 0], dtype=torch.bool)
    return Reach(keys, everywhere, ((least != tokens) | (most != tokens)).any(1))


@dataclass
class _Blocks:
    """The blocks of a launch (a KV head): what each finds of the list, and the packed queries whose results it writes.

    [padded] i64: requests, qo_tiles, kv_tiles. [padded, tile_q]: token, in its row, and head i64; writes bool.
    """

    int_workspace: torch.Tensor
    info: PlanInfo
    rows: Rows
    window_left: int
    group: int

    def __post_init__(self) -> None:
        info, rows = self.info, self.rows
        self.qo_lens = rows.qo_indptr[1:] - rows.qo_indptr[:-1]
        found = (
            _ints(self.int_workspace, at, info.padded).long()
            for at in (info.requests_at, info.qo_tiles_at, info.kv_tiles_at)
        )
        if info.split:
            valid = self.int_workspace.view(torch.uint8)[info.valid_at : info.stop] != 0
            found = (each.masked_fill(~valid, 0) for each in found)
        else:
            valid = torch.ones(info.padded, dtype=torch.bool, device=rows.kv_lens.device)
        self.requests, self.qo_tiles, self.kv_tiles = found
        packed = self.qo_tiles[:, None] * info.tile_q + torch.arange(info.tile_q, device=valid.device)
        self.token, self.head = packed // self.group, packed % self.group
        self.writes = valid[:, None] & (self.token < self.qo_lens.index_select(0, self.requests)[:, None])

    def key_index(self, num_tokens: int, num_slots: int) -> torch.Tensor:
        """[num_tokens, num_slots] i64: how far each key lies behind where the tile of the token begins."""
        row, index, _ = place(num_tokens, self.rows.qo_indptr, self.qo_lens)
        first = self._first_key(row, index * self.group // self.info.tile_q)
        return torch.arange(num_slots, device=row.device) - (self.rows.key_indptr[row] + first)[:, None]

    def _first_key(self, row: torch.Tensor, q_tile: torch.Tensor) -> torch.Tensor:
        """The place in its row where a tile's first chunk begins: with a window, behind keys that no query sees."""
        if self.window_left < 0:
            return torch.zeros_like(row)
        ahead = q_tile * self.info.tile_q // self.group - self.qo_lens[row] - self.window_left
        return (self.rows.kv_lens[row] + ahead).clamp(min=0)


@dataclass
class _Partials:
    """Who has written which slot: owner [capacity] i64, the token (-1: nobody, or not one alone), and its kv_tile."""

    blocks: _Blocks
    capacity: int

    def __post_init__(self) -> None:
        blocks, info, rows = self.blocks, self.blocks.info, self.blocks.rows
        group, requests, kv_tiles, token = blocks.group, blocks.requests, blocks.kv_tiles, blocks.token
        self.chunk = _ints(blocks.int_workspace, info.chunk_at, 1).long()
        o_indptr = _ints(blocks.int_workspace, info.o_indptr_at, len(rows.kv_lens) + 1).long()
        slot = o_indptr.index_select(0, requests)[:, None] + kv_tiles[:, None]
        slot = slot + token * self._num_chunks().index_select(0, requests)[:, None]
        at = (slot * group + blocks.head).masked_fill(~blocks.writes, self.capacity * group).flatten()
        size = (self.capacity * group + 1,)
        times = slot.new_zeros(size).scatter_add(0, at, torch.ones_like(at))
        tokens = rows.qo_indptr.index_select(0, requests)[:, None] + token
        owners, tiles = (
            slot.new_full(size, -1).scatter(0, at, values.expand_as(slot).flatten())[:-1].view(-1, group)
            for values in (tokens, kv_tiles[:, None])
        )
        is_one = (times[:-1].view(-1, group) == 1).all(1) & (owners == owners[:, :1]).all(1)
        self.owner, self.kv_tile = owners[:, 0].masked_fill(~is_one, -1), tiles[:, 0]

    def _num_chunks(self) -> torch.Tensor:
        """[batch_size], as a kernel counts them by itself."""
        lens = self.blocks.rows.kv_lens.clamp(min=1)
        if self.blocks.window_left >= 0:
            lens = lens.clamp(max=self.blocks.window_left + self.blocks.info.tile_q)
        return -(-lens // self.chunk)


def _ints(workspace: torch.Tensor, at: int, count: int) -> torch.Tensor:
    return workspace.view(torch.uint8)[at : at + 4 * count].view(torch.int32)

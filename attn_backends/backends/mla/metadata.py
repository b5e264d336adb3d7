"""A batch as the family sees it: decode rows over the latent cache, prefill rows over expanded keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from attn_backends.backends.mla.options import workspace_tokens
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.order import SwappableRows, reorder_batch_to_split_decodes_and_prefills
from attn_backends.batch.page_table import IntArray
from attn_backends.interface import AttentionMetadata, AttentionMetadataBuilder


@dataclass(frozen=True)
class DecodeRows:
    """Rows of equal query lengths, attended on the latent cache. Token t of a row sees its first `seq_len - query_len +
    t + 1` keys. In a graph padded rows are among them."""

    num_rows: int
    query_len: int
    page_table: torch.Tensor  # [num_rows, max_pages] i32
    seq_lens: torch.Tensor  # [num_rows] i32, this step's tokens included; 0 for padding
    seq_lens_cpu: torch.Tensor  # [num_rows] i32; may be upper bounds, and in a graph no launch may depend on them
    idle: torch.Tensor | None  # [num_rows * query_len] bool, in a graph: tokens of padded rows. None: all are live

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.query_len


@dataclass(frozen=True)
class RaggedRows:
    """Rows whose queries and keys lie one row after the other, as kernels for variable lengths take them.

    Every row has keys. If `causal`, row i has as many keys as queries, and query j sees keys 0 to j; else it sees all.
    """

    query_starts: torch.Tensor  # [num_rows + 1] i32
    key_starts: torch.Tensor  # [num_rows + 1] i32
    query_starts_cpu: torch.Tensor  # [num_rows + 1] i32
    key_starts_cpu: torch.Tensor  # [num_rows + 1] i32
    max_query_len: int
    max_key_len: int
    causal: bool


class ExpandedTensors(NamedTuple):
    """What ragged rows read, and where they write."""

    query: torch.Tensor  # [num_queries, num_qo_heads, head_dim]
    key: torch.Tensor  # [num_keys, num_qo_heads, head_dim]
    value: torch.Tensor  # [num_keys, num_qo_heads, head_dim_vo], strided
    output: torch.Tensor  # [num_queries, num_qo_heads, head_dim_vo] of spec.dtype, written in place
    lse: torch.Tensor | None  # [num_queries, num_qo_heads] f32 (f64 for f64 queries), written in place


@dataclass(frozen=True)
class ContextChunk:
    """A bounded part of what some neighbouring prefill rows have cached; all their new tokens see all of it."""

    tokens: slice  # of the prefill tokens
    slots: torch.Tensor  # [num_keys] i64, at most the workspace's tokens
    rows: RaggedRows


@dataclass(frozen=True)
class PrefillRows:
    """Rows attended on keys and values expanded from latent rows: their own new ones, then chunks of context."""

    num_tokens: int
    new: RaggedRows  # the new tokens among themselves
    new_slots: torch.Tensor | None  # [num_tokens] i64: read the new tokens' rows back from the cache; None: as given
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True)
class MLAMetadata(AttentionMetadata):
    """Decode rows stand in front; `prefill` counts its tokens from 0."""

    decode: DecodeRows | None
    prefill: PrefillRows | None

    def decode_fields(self) -> dict[str, Any]:
        return {"prefill": None}

    def prefill_fields(self) -> dict[str, Any]:
        return {"decode": None}


class Piece(NamedTuple):
    """Keys `first` to `stop` of a row's context."""

    row: int
    first: int
    stop: int


def cut_contexts(context_lens: Sequence[int], limit: int) -> list[list[Piece]]:
    """Contexts in chunks of at most `limit` keys, as few as neighbouring rows allow; rows without context are in none.

    >>> [[tuple(piece) for piece in chunk] for chunk in cut_contexts([5, 2, 0, 3], 4)]
    [[(0, 0, 4)], [(0, 4, 5), (1, 0, 2)], [(3, 0, 3)]]
    """
    chunks: list[list[Piece]] = [[]]
    room = limit
    for row, length in enumerate(context_lens):
        done = 0
        while done < length:
            if not room or (chunks[-1] and chunks[-1][-1].row < row - 1):
                chunks.append([])
                room = limit
            stop = min(length, done + room)
            chunks[-1].append(Piece(row, done, stop))
            done, room = stop, room - (stop - done)
    return [chunk for chunk in chunks if chunk]


class MLAMetadataBuilder(AttentionMetadataBuilder[MLAMetadata]):
    """Decodes are the leading rows of one query length, at most `decode_threshold`: all others are prefills.

    Host lengths may be upper bounds (`seq_lens_are_upper_bounds`) unless a prefill row has context: that is cut into
    chunks on the host.
    """

    decode_threshold = 8  # the verify lengths of speculative decoding
    metadata_cls: ClassVar[type[MLAMetadata]] = MLAMetadata  # what `build` returns

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:
        common = common_attn_metadata
        self.check_batch(common)
        if common.for_graph:
            return self._build_for_graph(common)
        actual, num_decodes = common.num_actual_reqs, self._num_decodes(common)
        return self.metadata_cls.of_batch(
            common,
            self.group.index,
            num_decodes,
            num_decode_tokens=int(common.query_start_loc_cpu[num_decodes]),
            decode=_decode_rows(common, num_decodes, None) if num_decodes else None,
            prefill=self._prefill_rows(common, num_decodes) if num_decodes < actual else None,
            planned_for=self.group.spec,
        )

    def needs_lengths_of(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """The context of prefill rows is cut into chunks on the host."""
        common = common_attn_metadata
        if self.needs_exact_lengths or common.for_graph or common.is_profile_run:
            return self.needs_exact_lengths
        return bool(common.context_lens_cpu.numpy()[self._num_decodes(common) : common.num_actual_reqs].any())

    def reorder_batch(self, batch: SwappableRows, query_lens: Sequence[int]) -> bool:
        """Bring all rows of the commonest query length that counts as decode to the front."""
        lens = np.asarray(query_lens, np.int32)
        short = lens[(lens >= 1) & (lens <= self.decode_threshold)]
        front = np.bincount(short).argmax() if len(short) else 0
        kinds = np.where(lens < 1, lens, np.where(lens == front, 1, 2))  # lengths without meaning are refused there
        return reorder_batch_to_split_decodes_and_prefills(batch, kinds.astype(np.int32))

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Decodes alone, of equal query lengths."""
        common = common_attn_metadata
        return not (common.is_profile_run or common.is_mixed) and common.max_query_len <= self.decode_threshold

    def _build_for_graph(self, common: CommonAttentionMetadata) -> MLAMetadata:
        if not self.can_run_in_cudagraph(common):
            raise ValueError(
                f"MLA graphs serve decode rows of up to {self.decode_threshold} tokens, as many each, and of lengths "
                f"that the backend gathers, and this batch has {common.max_query_len} tokens a row and "
                f"{common.max_seq_len} keys{' in rows of any lengths' if common.is_mixed else ''}: "
                "run it eager"
            )
        query_len = common.num_tokens // common.num_reqs
        idle = (common.seq_lens == 0).repeat_interleave(query_len)
        rows = _decode_rows(common, common.num_reqs, idle)
        given = self.group.index, common.slot_mapping, rows.num_rows, rows.num_tokens
        return self.metadata_cls.of_graph(*given, decode=rows, prefill=None, planned_for=self.group.spec)

    def _num_decodes(self, common: CommonAttentionMetadata) -> int:
        query_lens: IntArray = common.query_lens_cpu[: common.num_actual_reqs].numpy()
        if common.is_profile_run or query_lens[0] > self.decode_threshold:
            return 0
        others = np.flatnonzero(query_lens != query_lens[0])
        return int(others[0]) if len(others) else len(query_lens)

    def _prefill_rows(self, common: CommonAttentionMetadata, first_row: int) -> PrefillRows:
        rows = slice(first_row, common.num_actual_reqs)
        starts_cpu = common.query_start_loc_cpu[first_row : common.num_actual_reqs + 1]
        starts = common.query_start_loc[first_row : common.num_actual_reqs + 1]
        if first_row:
            starts_cpu, starts = starts_cpu - starts_cpu[0], starts - int(starts_cpu[0])
        query_lens, context_lens = starts_cpu.diff(), common.context_lens_cpu[rows]
        longest = int(query_lens.max())
        new = RaggedRows(starts, starts, starts_cpu, starts_cpu, longest, longest, True)
        new_slots, chunks = None, []
        if not common.is_profile_run:
            spec, table = self.group.spec, common.page_table[rows]
            if not common.num_new_kv or spec.cache_dtype is not spec.dtype:
                lens = zip(context_lens.tolist(), query_lens.tolist(), strict=True)
                all_new = [Piece(i, first, first + count) for i, (first, count) in enumerate(lens)]
                new_slots, _, _ = _slots(all_new, table, common.page_size)
            limit = workspace_tokens(self.options, self.limits)
            chunks = [
                _chunk(pieces, table, common.page_size, starts, starts_cpu)
                for pieces in cut_contexts(context_lens.tolist(), limit)
            ]
        return PrefillRows(int(starts_cpu[-1]), new, new_slots, tuple(chunks))


def _decode_rows(common: CommonAttentionMetadata, num_rows: int, idle: torch.Tensor | None) -> DecodeRows:
    query_len = int(common.query_start_loc_cpu[1])
    return DecodeRows(num_rows, query_len, common.page_table[:num_rows], common.seq_lens[:num_rows],
                      common.seq_lens_cpu[:num_rows], idle)  # fmt: skip


def _chunk(
    pieces: Sequence[Piece], table: torch.Tensor, page_size: int, starts: torch.Tensor, starts_cpu: torch.Tensor
) -> ContextChunk:
    slots, key_starts, key_starts_cpu = _slots(pieces, table, page_size)
    first, stop = pieces[0].row, pieces[-1].row + 1
    begin, end = int(starts_cpu[first]), int(starts_cpu[stop])
    query_starts_cpu = starts_cpu[first : stop + 1] - begin
    rows = RaggedRows(
        query_starts=starts[first : stop + 1] - begin,
        key_starts=key_starts,
        query_starts_cpu=query_starts_cpu,
        key_starts_cpu=key_starts_cpu,
        max_query_len=int(query_starts_cpu.diff().max()),
        max_key_len=int(key_starts_cpu.diff().max()),
        causal=False,
    )
    return ContextChunk(slice(begin, end), slots, rows)


def _slots(
    pieces: Sequence[Piece], table: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the pieces' keys are cached, [num_keys] i64, and where each piece starts among them: device and host."""
    columns = [[*(piece.row for piece in pieces), 0], [*(piece.first for piece in pieces), 0],
               np.cumsum([0, *(piece.stop - piece.first for piece in pieces)])]  # fmt: skip
    host = torch.from_numpy(np.array(columns, np.int32))
    rows, firsts, starts = host.to(table.device, non_blocking=True).unbind()
    starts_cpu = host[2]
    num_keys = int(starts_cpu[-1])
    piece_of = torch.arange(len(pieces), device=table.device).repeat_interleave(starts.diff(), output_size=num_keys)
    positions = torch.arange(num_keys, device=table.device) + (firsts - starts)[piece_of]
    pages = table[rows[piece_of].long(), positions // page_size].long()
    return pages * page_size + positions % page_size, starts, starts_cpu

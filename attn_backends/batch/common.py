"""What a scheduler hands over (`SequenceGroup`), and what every builder starts from (`CommonAttentionMetadata`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from attn_backends.batch.csr import PagedCsr, csr_of
from attn_backends.batch.page_table import CompiledPageTable, IntArray, check_pages, compile_page_table, starts_of
from attn_backends.batch.placeholders import NO_PLACEHOLDERS, IndexMap, PlaceholderMaps, check_maps, join_maps
from attn_backends.batch.tensors import BatchTensors


@dataclass(frozen=True, eq=False)
class SequenceData:
    """One row of a batch: which tokens are new, and which pages hold its keys.

    A prefix-cache hit is a first step with `context_len > 0`; a chunk of a long prompt is a step with
    `query_len` below the prompt's rest. `pages` may run ahead of the sequence (lookahead). With `pages=None` no cache
    exists yet (a profile run, or encoder attention): keys are this step's own.

    Cross attention names its keys itself: `seq_len` is the encoder's length, `new_kv_len` how many of them this step
    writes (all at the first step, none later).
    """

    context_len: int  # tokens already in the cache
    query_len: int  # new this step
    pages: IntArray | Sequence[int] | None
    seq_len: int = cast(int, None)  # None: context_len + query_len
    new_kv_len: int = cast(int, None)  # None: query_len
    placeholders: Mapping[str, IndexMap] = NO_PLACEHOLDERS  # of its new tokens; attention does not look at them

    def __post_init__(self) -> None:
        if self.seq_len is None:
            object.__setattr__(self, "seq_len", self.context_len + self.query_len)
        if self.new_kv_len is None:
            object.__setattr__(self, "new_kv_len", self.query_len)
        if self.context_len < 0 or self.query_len < 1 or not 0 <= self.new_kv_len <= self.seq_len:
            raise ValueError(
                f"context_len {self.context_len}, query_len {self.query_len}, seq_len {self.seq_len}, new_kv_len "
                f"{self.new_kv_len}: need context_len >= 0, query_len >= 1 and 0 <= new_kv_len <= seq_len"
            )
        if self.placeholders is not NO_PLACEHOLDERS:
            check_maps(self.placeholders, self.query_len)


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """One request as a scheduler sees it: one sequence, or several that sample from one prompt."""

    request_id: str
    sequences: tuple[SequenceData, ...]


@dataclass(frozen=True, eq=False)
class CommonAttentionMetadata:
    """One step's batch, the same for every layer and backend. Frozen; made by `from_sequence_groups` or `from_tensors`.

    R rows (`num_reqs`, padding included), T query tokens (`num_tokens`, padding included), N new keys. Tensors named
    `_cpu` stay on the host; the others are on the step's device, all copied in one transfer.
    """

    page_size: int
    num_reqs: int  # R
    num_actual_reqs: int  # without padding
    num_tokens: int  # T
    num_actual_tokens: int  # without padding
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # [R + 1] i32
    query_start_loc_cpu: torch.Tensor  # [R + 1] i32
    seq_lens: torch.Tensor  # [R] i32; 0 for padding
    seq_lens_cpu: torch.Tensor  # [R] i32
    context_lens_cpu: torch.Tensor  # [R] i32
    page_table: torch.Tensor  # [R, max_pages] i32; it and the slots are empty in a profile run
    slot_mapping: torch.Tensor  # [N + padding] i64; -1 is padding, always behind the real slots
    num_new_kv: int  # N
    new_kv_start_loc_cpu: (
        torch.Tensor
    )  # [R + 1] i32: which new keys are whose; query_start_loc except for cross attention
    is_profile_run: bool
    seq_lens_are_upper_bounds: bool = False  # host lengths (`_cpu`, `max_seq_len`) may exceed those on the device
    for_graph: bool = False  # padded to a captured shape: metadata must not depend on host lengths
    is_mixed: bool = False  # of a graph's batch: its rows have any query lengths, those of padding none
    csr: PagedCsr | None = None  # None: worked out from the table at first use
    multi_modal_placeholder_index_maps: PlaceholderMaps = NO_PLACEHOLDERS  # of the batch's tokens

    @property
    def paged_kv(self) -> PagedCsr:
        """The pages as CSR. Its indices may have others behind those that count, which `paged_kv_indices` has not."""
        return self._worked_out if self.csr is None else self.csr

    @cached_property
    def _worked_out(self) -> PagedCsr:
        lens = torch.zeros_like(self.seq_lens) if self.is_profile_run else self.seq_lens  # no pages hold its keys
        return csr_of(self.page_table, lens, self.page_size, self._num_pages)

    @property
    def paged_kv_indptr(self) -> torch.Tensor:  # [R + 1] i32
        return self.paged_kv.indptr

    @property
    def paged_kv_indices(self) -> torch.Tensor:  # [paged_kv_indptr_cpu[-1]] i32
        return self.paged_kv.indices[: self._num_pages]

    @property
    def paged_kv_last_page_len(self) -> torch.Tensor:  # [R] i32
        return self.paged_kv.last_page_len

    @cached_property
    def paged_kv_indptr_cpu(self) -> torch.Tensor:  # [R + 1] i32
        indptr = np.zeros(self.num_reqs + 1, np.int32)
        if not self.is_profile_run:
            ((self.seq_lens_cpu.numpy() + (self.page_size - 1)) // self.page_size).cumsum(out=indptr[1:])
        return torch.from_numpy(indptr)

    @property
    def _num_pages(self) -> int:
        return int(self.paged_kv_indptr_cpu[-1])

    @cached_property
    def paged_kv_last_page_len_cpu(self) -> torch.Tensor:  # [R] i32
        lens = np.zeros(self.num_reqs, np.int32) if self.is_profile_run else self.seq_lens_cpu.numpy()
        return torch.from_numpy(np.where(lens > 0, (lens - 1) % self.page_size + 1, 0).astype(np.int32))

    @property
    def num_computed_tokens_cpu(self) -> torch.Tensor:  # [R] i32
        """`context_lens_cpu`, under the name that vLLM V1 gives it."""
        return self.context_lens_cpu

    @property
    def query_lens_cpu(self) -> torch.Tensor:  # [R] i32
        return self.query_start_loc_cpu.diff()

    @staticmethod
    def from_sequence_groups(
        groups: Sequence[SequenceGroup],
        page_size: int,
        device: torch.device | str = "cpu",
        num_padded_reqs: int = 0,
        padded_query_len: int = 1,
        num_pages: int | None = None,
    ) -> CommonAttentionMetadata:
        """Compile a scheduler's groups; every sequence becomes one row, in order.

        Args:
            num_padded_reqs: rows added behind the batch for a CUDA graph, each of `padded_query_len` tokens.
            num_pages: of the pool, if known.

        Raises:
            ValueError: the batch is empty, a row lacks pages, only some rows have pages, or there is no such page.
        """
        named = [(group.request_id, seq) for group in groups for seq in group.sequences]
        rows = [seq for _, seq in named]
        if not rows:
            raise ValueError("the batch is empty: a step needs at least one sequence")
        without = [name for name, seq in named if seq.pages is None]
        if without and len(without) != len(rows):
            raise ValueError(f"requests {without[:5]} have no pages while others have: a profile run has none at all")
        lens = np.array([(seq.seq_len, seq.new_kv_len, seq.query_len, seq.context_len) for seq in rows], np.int32)
        seq_lens, new_kv_lens, query_lens, contexts = np.ascontiguousarray(lens.T)
        num_padded_tokens = num_padded_reqs * padded_query_len
        if without:
            compiled = _no_pages(len(rows) + num_padded_reqs)
        else:
            pages = [_as_array(seq.pages) for seq in rows if seq.pages is not None]
            check_pages([name for name, _ in named], pages, seq_lens, page_size, num_pages)
            compiled = compile_page_table(pages, seq_lens, new_kv_lens, page_size, num_padded_reqs, num_padded_tokens)
        padded = np.zeros(num_padded_reqs, np.int32)
        query_start_loc = starts_of(np.concatenate([query_lens, padded + padded_query_len]))
        seq_lens = np.concatenate([seq_lens, padded])
        host, on_device = _pack(compiled, query_start_loc, seq_lens, torch.device(device))
        return CommonAttentionMetadata(
            page_size=page_size,
            num_reqs=len(rows) + num_padded_reqs,
            num_actual_reqs=len(rows),
            num_tokens=int(query_start_loc[-1]),
            num_actual_tokens=int(query_start_loc[-1]) - num_padded_tokens,
            max_query_len=max(int(query_lens.max()), padded_query_len if num_padded_reqs else 0),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=on_device[0],
            query_start_loc_cpu=host[0],
            seq_lens=on_device[1],
            seq_lens_cpu=host[1],
            context_lens_cpu=torch.from_numpy(np.concatenate([contexts, padded])),
            page_table=on_device[2].view(compiled.page_table.shape),
            slot_mapping=on_device[6].view(torch.int64),
            num_new_kv=int(new_kv_lens.sum()),
            new_kv_start_loc_cpu=torch.from_numpy(starts_of(np.concatenate([new_kv_lens, padded]))),
            is_profile_run=bool(without),
            csr=PagedCsr(on_device[3], on_device[4], on_device[5]),
            multi_modal_placeholder_index_maps=join_maps(
                [seq.placeholders for seq in rows], query_start_loc[: len(rows)]
            ),
        )

    @staticmethod
    def from_tensors(
        page_size: int,
        query_start_loc: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor | None,
        page_table: torch.Tensor,
        slot_mapping: torch.Tensor | None = None,
        *,
        num_tokens: int | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        num_actual_reqs: int | None = None,
        context_lens_cpu: torch.Tensor | None = None,
        csr: PagedCsr | None = None,
        exact: bool = True,
        for_graph: bool = False,
        is_mixed: bool = False,
    ) -> CommonAttentionMetadata:
        """A batch of tensors that an engine has already. Those on the device are read where they are, not copied; those
        on the host are copied, so they may be buffers that the next step overwrites.

        Rows of zero tokens are left out, and the outputs of tokens that belong to no row are zeros. With `for_graph`
        the padding stays: R rows, each of T // R tokens, and `seq_lens` of 0 for those that are padding. With
        `is_mixed` too rows keep their own lengths: R of them, of which some may have no tokens, and T tokens.

        Args:
            query_start_loc, query_start_loc_cpu: [R + 1] i32; equal neighbours are a row of zero tokens.
            seq_lens, seq_lens_cpu: [R] i32, this step's tokens included. None: the first is on the host itself.
            page_table: [R, max_pages] i32, rows of any stride, also 0. What stands behind a row's pages is never read.
            slot_mapping: [T or more] i64, -1 behind the real ones for padding; None: the engine writes keys itself.
            num_tokens: T, rows of `query` and `output`; None: as many as the rows have.
            num_actual_reqs: with `for_graph`, rows that are not padding; None: up to the last one with tokens.
            context_lens_cpu: [R]; None: what `seq_lens_cpu` holds beside the row's own tokens. For cross attention.
            csr: the same pages as CSR, if the engine has it.
            exact: whether host lengths are those of the device; else they are upper bounds.

        Raises:
            TypeError, ValueError: these are no tensors, or shapes, dtypes, counts, lengths or pages do not go together.
        """
        lens_cpu = seq_lens if seq_lens_cpu is None else seq_lens_cpu
        given = BatchTensors(page_size, query_start_loc, query_start_loc_cpu, seq_lens, lens_cpu, page_table,
                             slot_mapping, context_lens_cpu)  # fmt: skip
        fields = given.fields(num_tokens, max_query_len, max_seq_len, num_actual_reqs, exact, for_graph, is_mixed)
        return CommonAttentionMetadata(**fields, csr=csr if fields["num_reqs"] == len(seq_lens) else None)


def _as_array(pages: IntArray | Sequence[int]) -> IntArray:
    """Page ids in the dtype that they have: what is no 32-bit integer is refused and not rounded, by `check_pages` and
    `compile_page_table`. Of an empty list NumPy would make floats."""
    return np.asarray(pages, None if len(pages) else np.int32)


def _no_pages(num_rows: int) -> CompiledPageTable:
    empty = np.zeros(0, np.int32)
    zeros = np.zeros(num_rows, np.int32)
    return CompiledPageTable(
        np.zeros((num_rows, 0), np.int32), np.zeros(num_rows + 1, np.int32), empty, zeros, np.zeros(0, np.int64)
    )


def _pack(
    compiled: CompiledPageTable, query_start_loc: IntArray, seq_lens: IntArray, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All of a step's arrays in one host buffer and one copy to the device; the tensors are views of the two.

    Each array starts on a 16-byte boundary: the i64 slot mapping can be viewed in place, and Triton, which compiles a
    kernel anew for tensors that do not lie so, finds all of them alike.
    """
    arrays = [
        query_start_loc,
        seq_lens,
        compiled.page_table.reshape(-1),
        compiled.paged_kv_indptr,
        compiled.paged_kv_indices,
        compiled.paged_kv_last_page_len,
        compiled.slot_mapping.view(np.int32),
    ]
    *starts, end = np.cumsum([0] + [len(a) + -len(a) % 4 for a in arrays]).tolist()
    spans = [slice(start, start + len(array)) for array, start in zip(arrays, starts, strict=True)]
    packed = np.empty(end, np.int32)
    for array, span in zip(arrays, spans, strict=True):
        packed[span] = array
    host = torch.from_numpy(packed)
    on_device = host.to(device, non_blocking=True)
    return [host[span] for span in spans], [on_device[span] for span in spans]

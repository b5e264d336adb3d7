"""`req_to_token` as page tables of one-slot pages: rows of a step → `CommonAttentionMetadata`.

A row of the page table is a row of `req_to_token`. Nothing is read from the device: lengths come on the host as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attn_backends.adapters.req_to_token.batch import StepRows
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.csr import PagedCsr, csr_of
from attn_backends.batch.page_table import IntArray


@dataclass(frozen=True)
class SharedBuffers:
    """Persistent tensors for the CSR of a step, given by the engine, which may share them between adapters."""

    indptr: torch.Tensor | None = None  # [max rows + 1] i32
    last_page_len: torch.Tensor | None = None  # [max rows] i32
    indices: torch.Tensor | None = None  # [as many as any step has keys] i32

    def csr(self, page_table: torch.Tensor, seq_lens: torch.Tensor, num_indices: int) -> PagedCsr | None:
        """The CSR, in the buffers as far as there are any; None without any: it is then made where it is read.

        Raises:
            ValueError: a buffer is too small.
        """
        if self.indptr is None and self.last_page_len is None and self.indices is None:
            return None
        csr = csr_of(page_table, seq_lens, 1, num_indices)
        return PagedCsr(
            _put("kv_indptr_buf", self.indptr, csr.indptr),
            _put("kv_indices_buf", self.indices, csr.indices),
            _put("kv_last_page_len_buf", self.last_page_len, csr.last_page_len),
        )


def _put(name: str, buffer: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    if buffer is None:
        return tensor
    if len(buffer) < len(tensor):
        raise ValueError(f"{name} has room for {len(buffer)}, and this step needs {len(tensor)}: make it larger")
    return buffer[: len(tensor)].copy_(tensor)


class TokenTable:
    """`req_to_token` as page tables of one-slot pages.

    Args:
        req_to_token: [max_reqs, columns] i32. Beyond a row's length it may hold any slots of the pool.
        max_context_len: most tokens of one row.

    Raises:
        ValueError: the table has another form, or is elsewhere.
    """

    def __init__(self, req_to_token: torch.Tensor, max_context_len: int, device: torch.device) -> None:
        wrong = req_to_token.dim() != 2 or req_to_token.dtype is not torch.int32
        if wrong or req_to_token.shape[1] < max_context_len or req_to_token.device.type != device.type:
            raise ValueError(
                f"req_to_token is {list(req_to_token.shape)} {req_to_token.dtype} on {req_to_token.device}; need "
                f"[max_reqs, {max_context_len} (max_context_len) or more] torch.int32 on {device}"
            )
        self.req_to_token = req_to_token
        self.max_context_len = max_context_len

    def self_attention(self, rows: StepRows, buffers: SharedBuffers) -> CommonAttentionMetadata:
        """The step over decoder tokens, which stand behind the encoder's."""
        pages = self._columns(rows, rows.seq_lens_cpu, rows.encoder_lens)
        csr = buffers.csr(pages, rows.seq_lens, int(rows.seq_lens_cpu.sum(dtype=np.int64)))
        contexts = np.maximum(rows.seq_lens_cpu - rows.query_lens, 0)
        return self._common(rows, pages, rows.seq_lens, rows.seq_lens_cpu, contexts, csr)

    def cross_attention(self, rows: StepRows) -> CommonAttentionMetadata:
        """The step's queries over encoder tokens, which stand at the front of a row.

        Raises:
            ValueError: the step has no encoder.
        """
        if rows.encoder_lens is None or rows.encoder_lens_cpu is None:
            raise ValueError(
                "this model has cross-attention layers, and the step has no encoder_lens: pass encoder_lens and "
                "encoder_lens_cpu, 0 for a row without an encoder"
            )
        pages, contexts = self._columns(rows, rows.encoder_lens_cpu, None), np.zeros_like(rows.query_lens)
        return self._common(rows, pages, rows.encoder_lens, rows.encoder_lens_cpu, contexts, None)

    def _columns(self, rows: StepRows, lens_cpu: IntArray, first: torch.Tensor | None) -> torch.Tensor:
        """[R, longest] i32: columns of the rows, each from its own first one on."""
        longest = int(lens_cpu.max(initial=1))
        before = 0 if rows.encoder_lens_cpu is None or first is None else int(rows.encoder_lens_cpu.max(initial=0))
        if longest > self.max_context_len or longest + before > self.req_to_token.shape[1]:
            raise ValueError(
                f"a row has {longest} tokens, with up to {before} of an encoder in front: at most "
                f"{self.max_context_len} (max_context_len), in {self.req_to_token.shape[1]} columns of req_to_token"
            )
        if first is None:
            return self.req_to_token[:, :longest].index_select(0, rows.req_pool_indices)
        columns = first[:, None] + torch.arange(longest, dtype=torch.int32, device=first.device)
        return self.req_to_token[rows.req_pool_indices.long()[:, None], columns]

    def _common(
        self,
        rows: StepRows,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: IntArray,
        context_lens_cpu: IntArray,
        csr: PagedCsr | None,
    ) -> CommonAttentionMetadata:
        """The pool has written all keys before: none is new, but a graph's tokens keep their slots, which are -1.

        Lengths and slots are copied: an engine writes its next step's into the same tensors.
        """
        num_rows, num_tokens, device = len(rows.query_lens), len(rows.slots), self.req_to_token.device
        starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(rows.query_lens, out=starts[1:])
        starts_cpu = torch.from_numpy(starts)
        slots = rows.slots[: num_tokens if rows.for_graph else 0].to(torch.int64, copy=True)
        return CommonAttentionMetadata(
            page_size=1,
            num_reqs=num_rows,
            num_actual_reqs=num_rows,
            num_tokens=num_tokens,
            num_actual_tokens=num_tokens,
            max_query_len=int(rows.query_lens.max()),
            max_seq_len=int(seq_lens_cpu.max()),
            query_start_loc=starts_cpu.to(device, non_blocking=True),
            query_start_loc_cpu=starts_cpu,
            seq_lens=seq_lens.clone(),
            seq_lens_cpu=torch.from_numpy(seq_lens_cpu.copy()),
            context_lens_cpu=torch.from_numpy(context_lens_cpu),
            page_table=page_table,
            slot_mapping=slots,
            num_new_kv=num_tokens if rows.for_graph else 0,
            new_kv_start_loc_cpu=starts_cpu if rows.for_graph else torch.zeros_like(starts_cpu),
            is_profile_run=False,
            seq_lens_are_upper_bounds=rows.are_upper_bounds,
            for_graph=rows.for_graph,
            csr=csr,
        )

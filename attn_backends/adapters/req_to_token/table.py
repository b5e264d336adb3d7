"""`req_to_token` as page tables: rows of a step → `CommonAttentionMetadata`.

A row of the page table is a row of `req_to_token`, every `page_size`-th column of it. Nothing is read from the device:
lengths come on the host as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from attn_backends.adapters.req_to_token.batch import StepRows
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.csr import PagedCsr, csr_of
from attn_backends.batch.page_table import IntArray, starts_of
from attn_backends.graphs.inputs import HeldTensors
from attn_backends.interface.capabilities import Rejection, Unsupported

Translate = Callable[[torch.Tensor], torch.Tensor]  # slots of one pool to those of another, the same shape


@dataclass(frozen=True)
class SharedBuffers:
    """Persistent tensors for the CSR of a step, given by the engine, which may share them between adapters."""

    indptr: torch.Tensor | None = None  # [max rows + 1] i32
    last_page_len: torch.Tensor | None = None  # [max rows] i32
    indices: torch.Tensor | None = None  # [as many as any step has pages] i32

    def csr(
        self, page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, num_indices: int
    ) -> PagedCsr | None:
        """The CSR, in the buffers as far as there are any; None without any: it is then made where it is read.

        Raises:
            ValueError: a buffer is too small.
        """
        if self.indptr is None and self.last_page_len is None and self.indices is None:
            return None
        csr = csr_of(page_table, seq_lens, page_size, num_indices)
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
    """`req_to_token` as page tables.

    Args:
        req_to_token: [max_reqs, columns] i32. Beyond a row's length it may hold any slots of the pool.
        max_context_len: most tokens of one row.
        page_size: tokens of a page; those of a row's page have slots that follow one another, from a multiple of it on.
        translate: what slots are called in the pool that is read; None: as the table has them.

    Raises:
        ValueError: the table has another form, or is elsewhere.
    """

    def __init__(
        self, req_to_token: torch.Tensor, max_context_len: int, device: torch.device, page_size: int = 1,
        translate: Translate | None = None,
    ) -> None:  # fmt: skip
        wrong = req_to_token.dim() != 2 or req_to_token.dtype is not torch.int32
        if wrong or req_to_token.shape[1] < max_context_len or req_to_token.device.type != device.type:
            raise ValueError(
                f"req_to_token is {list(req_to_token.shape)} {req_to_token.dtype} on {req_to_token.device}; need "
                f"[max_reqs, {max_context_len} (max_context_len) or more] torch.int32 on {device}"
            )
        self.req_to_token = req_to_token
        self.max_context_len = max_context_len
        self.page_size = page_size
        self.translate = translate

    def self_attention(
        self, rows: StepRows, buffers: SharedBuffers | None = None, held: HeldTensors | None = None
    ) -> CommonAttentionMetadata:
        """The step over decoder tokens, which stand behind the encoder's.

        Args:
            buffers: where its CSR goes, if anywhere.
            held: what a graph reads, which is filled with the step.
        """
        pages, lens = self._pages(rows, rows.seq_lens_cpu, rows.encoder_lens), rows.seq_lens
        if held is not None:
            held.page_table[: len(pages), : pages.shape[1]].copy_(pages)
            pages, lens = held.page_table[: len(pages)], held.seq_lens[: len(lens)].copy_(lens)
        csr = None
        if buffers is not None:
            num_pages = (rows.seq_lens_cpu + (self.page_size - 1)) // self.page_size
            csr = buffers.csr(pages, lens, self.page_size, int(num_pages.sum(dtype=np.int64)))
        return self._common(rows, pages, lens, rows.seq_lens_cpu, None, csr, held)

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
        pages = self._pages(rows, rows.encoder_lens_cpu, None)
        contexts = torch.zeros(len(rows.query_lens), dtype=torch.int32, device="cpu")
        # An engine writes its next step's lengths into the same tensor; the others are made for this step.
        lens = rows.encoder_lens.clone()
        return self._common(rows, pages, lens, rows.encoder_lens_cpu, contexts, None, None)

    def _pages(self, rows: StepRows, lens_cpu: IntArray, first: torch.Tensor | None) -> torch.Tensor:
        """[R, pages of the longest row] i32: columns of the rows, each from its own first one on.

        One column is read for each page. Rows that are known to be neighbours are read in place; all others are
        gathered anew at every step, as an engine may have given any of them other slots (a radix cache does, where it
        finds a prompt twice) and does not say so.
        """
        longest = int(lens_cpu.max(initial=1))
        before = 0 if rows.encoder_lens_cpu is None or first is None else int(rows.encoder_lens_cpu.max(initial=0))
        if longest > self.max_context_len or longest + before > self.req_to_token.shape[1]:
            raise ValueError(
                f"a row has {longest} tokens, with up to {before} of an encoder in front: at most "
                f"{self.max_context_len} (max_context_len), in {self.req_to_token.shape[1]} columns of req_to_token"
            )
        if first is not None:  # columns behind an encoder's tokens
            if self.page_size > 1:
                asked = f"an encoder's tokens in front of a decoder's, in pages of {self.page_size}"
                hint = "Make the pool with pages of one token."
                raise Unsupported("req_to_token", [Rejection("encoder_lens", asked, "pages of one token", hint)])
            columns = first[:, None] + torch.arange(longest, dtype=torch.int32, device=first.device)
            return self.req_to_token[rows.req_pool_indices.long()[:, None], columns]
        firsts, run = self.req_to_token[:, : longest : self.page_size], _run(rows)  # the first slot of each page
        slots = firsts.index_select(0, rows.req_pool_indices) if run is None else firsts[run]
        if self.translate is not None:
            slots = self.translate(slots).to(torch.int32)
        if self.page_size > 1:
            is_gathered = run is None and self.translate is None  # ours to write to
            slots = slots.div_(self.page_size, rounding_mode="floor") if is_gathered else slots // self.page_size
        return slots if slots.stride(1) == 1 else slots.contiguous()  # of a table that is a view of another

    def _common(
        self, rows: StepRows, pages: torch.Tensor, lens: torch.Tensor, lens_cpu: IntArray,
        contexts: torch.Tensor | None, csr: PagedCsr | None, held: HeldTensors | None,
    ) -> CommonAttentionMetadata:  # fmt: skip
        """The pool has written all keys before: none is new."""
        starts_cpu = torch.from_numpy(starts_of(rows.query_lens))
        return CommonAttentionMetadata.from_tensors(
            self.page_size,
            starts_cpu.to(self.req_to_token.device, non_blocking=True),
            starts_cpu,
            lens,
            torch.from_numpy(lens_cpu),
            pages,
            None if held is None else held.slot_mapping[: rows.num_tokens],
            context_lens_cpu=contexts,
            csr=csr,
            exact=not rows.are_upper_bounds,
            for_graph=rows.for_graph,
        )


def _run(rows: StepRows) -> slice | None:
    """The rows of the table, if they follow one another and the host knows it."""
    if rows.req_pool_indices_cpu is None:
        return None
    found = np.asarray(rows.req_pool_indices_cpu)
    in_turn = len(found) == len(rows.query_lens) and bool((np.diff(found) == 1).all())
    return slice(int(found[0]), int(found[0]) + len(found)) if in_turn else None

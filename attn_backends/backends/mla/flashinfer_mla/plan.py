"""One `BatchMLAPagedAttentionWrapper` of FlashInfer and its plans.

The public `plan` chooses and loads the kernels, once. From then on lengths alone change, and the C++ scheduler behind
it is called with them directly. All that kernels know of a batch is in the schedule that it copies to the int
workspace, but for the pages: these they read from where the row's begin, so that the page table itself, line after
line, is the list of them.

Kernels lose keys of some causal rows (`tokens_of_a_row`): such rows are planned in parts that none is lost of.

What the workspaces must hold is from `MLAPlan` of FlashInfer's attention/scheduler.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attn_backends.backends.mla.metadata import DecodeRows
from attn_backends.kernels.flashinfer_package import load_flashinfer, missing_kernels
from attn_backends.spec import MLASpec
from attn_backends.step.staging import HostRing

KNOWN = ((0, 5, 0), (0, 7, 0))  # from the first to below the second
TILE_ROWS = 64  # query tokens times heads that one block takes, of two in a cluster where rows have more
MAX_WORKS = 16384  # tiles, each over a part of a row's keys, that a schedule has room for, on any GPU
_ALIGNMENT = 16
_PER_WORK, _PER_SM = 9, 5  # int arrays of a schedule


def int_bytes(num_sms: int) -> int:
    """Bytes of a schedule."""
    return 4 * (_PER_WORK * MAX_WORKS + _PER_SM * num_sms) + (_PER_WORK + _PER_SM) * _ALIGNMENT


def float_bytes(spec: MLASpec, num_sms: int) -> int:
    """Bytes of partial results: two tiles a multiprocessor, in the queries' dtype, and their LSEs."""
    return 2 * num_sms * TILE_ROWS * (2 * spec.kv_lora_rank + 4) + 2 * _ALIGNMENT


def most_works(num_rows: int, query_len: int, num_qo_heads: int, num_sms: int) -> int:
    """Most works of any batch of this size: its tiles, and as many splits as there are multiprocessors."""
    tokens, tile = tokens_of_a_row(query_len, num_qo_heads), _tile(query_len * num_qo_heads)
    return num_rows * -(-query_len // tokens) * -(-tokens * num_qo_heads // tile) + num_sms


def tokens_of_a_row(query_len: int, num_qo_heads: int) -> int:
    """Query tokens of what a plan may take for one row: all, or as many as fit one tile.

    In `mla.cuh` and `mla_hopper.cuh` a causal tile goes over keys up to `kv_len - q_len + (packed_qo_start +
    cluster_tile_q) / num_heads`, rounded up to blocks of keys. The division rounds down, so that it does not count the
    token of which the tile has some heads and the next tile the others: where the sum is a multiple of the block, these
    heads lose the token's own key. A row's last tile goes over all keys. So a part of a row that fits one tile, with no
    keys behind its own, is right; and so is a token alone, as nothing is masked.
    """
    packed = query_len * num_qo_heads
    tile = _tile(packed)
    return query_len if packed <= tile or tile % num_qo_heads == 0 else max(1, tile // num_qo_heads)


def _tile(packed: int) -> int:
    """Query tokens times heads that a cluster takes, of rows with so many."""
    return TILE_ROWS if packed <= TILE_ROWS else 2 * TILE_ROWS


class MLALibrary:
    """The package `flashinfer`, or what stands for it.

    Raises:
        ImportError: a version that is not known.
    """

    def __init__(self, module: Any = None) -> None:
        self.module, _ = load_flashinfer(module, *KNOWN)

    def wrapper(
        self, spec: MLASpec, floats: torch.Tensor, ints: torch.Tensor, kernels: str, graph: DecodeRows | None
    ) -> Any:
        """A wrapper for a plan.

        Args:
            floats: [bytes] u8 on the device; shared by plans that run one after the other.
            ints: [`int_bytes`] u8 on the device, the wrapper's own.
            kernels: auto, fa2 or fa3.
            graph: rows whose tensors a graph reads; None for eager steps.
        """
        buffers = {} if graph is None else _buffers(graph, spec.num_qo_heads)
        made = self.module.mla.BatchMLAPagedAttentionWrapper(
            floats, use_cuda_graph=graph is not None, backend=kernels, **buffers
        )
        made._int_workspace_buffer, made._pin_memory_int_workspace_buffer = ints, None  # it has made its own, of 8 MB
        return made


@dataclass(eq=False)
class MLAPlan:
    """What FlashInfer has planned for the decode rows of one plan group."""

    wrapper: Any  # FlashInfer's, made for this plan alone
    spec: MLASpec
    page_size: int
    ring: HostRing  # pinned buffers of `int_bytes`: nothing in FlashInfer waits for the copy that reads one
    in_graph: bool  # the wrapper has the tensors that a graph reads
    is_planned: bool = field(default=False, init=False)
    number: int = field(default=0, init=False)  # of eager plans so far; a graph's step is of whatever is planned last

    def __call__(self, rows: DecodeRows) -> None:
        """Plan these rows, reading nothing of the device.

        Raises:
            RuntimeError: the kernels are to be compiled and cannot be; says what is missing.
        """
        pages, width = flat_pages(rows.page_table)
        tokens = tokens_of_a_row(rows.query_len, self.spec.num_qo_heads)
        planned = PlannedRows.of(rows, width, tokens)
        self.number += not self.in_graph
        pinned = self.ring.next_host().view(torch.uint8)
        if self.is_planned:
            self._plan_lengths(planned, pinned, pages)
        else:
            spec, wrapper = self.spec, self.wrapper
            wrapper._pin_memory_int_workspace_buffer = pinned
            rank, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
            with missing_kernels(f"MLA of {rank} + {rope}, {spec.dtype} over {spec.cache_dtype}"):
                wrapper.plan(
                    planned.query_starts, planned.page_starts, pages, planned.kv_lens, spec.num_qo_heads, rank, rope,
                    self.page_size, planned.causal, spec.scale, spec.dtype, spec.cache_dtype,
                )  # fmt: skip
            self.is_planned = True
        self.ring.sent()

    def run(
        self, query: torch.Tensor, latent_cache: torch.Tensor, scale: float, output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Attend.

        Args:
            query: [num_tokens, num_qo_heads, latent_dim].
            latent_cache: [num_pages, page_size, latent_dim]. Its two parts go to the kernels as views: they take the
                strides of a page and of a row from each.
            scale: of the logits; the plan has none.
            output: [num_tokens, num_qo_heads, kv_lora_rank], contiguous, written in place.
            lse: [num_tokens, num_qo_heads] f32, base 2, written in place.
        """
        rank = self.spec.kv_lora_rank
        self.wrapper._sm_scale = scale
        self.wrapper.run(
            query[..., :rank], query[..., rank:], latent_cache[..., :rank], latent_cache[..., rank:],
            out=output, lse=lse, return_lse=lse is not None,
        )  # fmt: skip

    def _plan_lengths(self, planned: PlannedRows, pinned: torch.Tensor, pages: torch.Tensor) -> None:
        spec, wrapper = self.spec, self.wrapper
        if not self.in_graph:  # a graph's pages are where they were
            wrapper._kv_indices_buf = pages
        wrapper._causal = planned.causal
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, pinned, planned.query_starts,
            planned.page_starts, planned.kv_lens, spec.num_qo_heads, spec.kv_lora_rank, planned.causal,
        )  # fmt: skip


class PlannedRows(NamedTuple):
    """Rows as the scheduler takes them, on the host: a batch's own, or parts of them that lie one behind the other."""

    query_starts: torch.Tensor  # [num_parts + 1] i32
    page_starts: torch.Tensor  # [num_parts + 1] i32, in the list of pages; parts of a row have the same
    kv_lens: torch.Tensor  # [num_parts] i32: keys that a part's last token sees
    causal: bool

    @staticmethod
    def of(rows: DecodeRows, width: int, tokens: int) -> PlannedRows:
        """The rows in parts of up to so many tokens.

        Args:
            width: how far apart the rows begin in the list of pages.
        """
        counts = torch.arange(rows.num_rows + 1, dtype=torch.int32, device="cpu")
        starts, page_starts = counts * rows.query_len, counts * width
        if tokens >= rows.query_len:
            return PlannedRows(starts, page_starts, rows.seq_lens_cpu, rows.query_len > 1)
        ends = torch.arange(tokens, rows.query_len + tokens, tokens, dtype=torch.int32, device="cpu").clamp_(
            max=rows.query_len
        )
        query_starts = torch.cat([starts[:1], (starts[:-1, None] + ends).flatten()])
        page_starts = torch.cat([page_starts[:-1].repeat_interleave(len(ends)), page_starts[-1:]])
        seen = (rows.seq_lens_cpu[:, None] - rows.query_len + ends).clamp_(min=0)  # 0: of padding
        return PlannedRows(query_starts, page_starts, seen.flatten(), tokens > 1)


def flat_pages(page_table: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A page table as one list of pages, and how far apart in it the rows begin. A view, where rows lie together."""
    table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    num_rows, width = table.shape
    return table.as_strided(((num_rows - 1) * table.stride(0) + width,), (1,)), table.stride(0)


def _buffers(rows: DecodeRows, num_qo_heads: int) -> dict[str, torch.Tensor]:
    """What a wrapper for graphs must be given. Kernels read the pages alone; the first plan fills the others."""
    num_parts = rows.num_rows * -(-rows.query_len // tokens_of_a_row(rows.query_len, num_qo_heads))
    starts = rows.seq_lens.new_empty(3, num_parts + 1)
    pages, _ = flat_pages(rows.page_table)
    return {"qo_indptr": starts[0], "kv_indptr": starts[1], "kv_indices": pages, "kv_len_arr": starts[2, :-1]}

"""Local attention for backends that know nothing of it: every row is cut where its queries cross a chunk's edge.

    chunks of 4    | 0  1  2  3 | 4  5  6  7 | 8
    one row            k  q  q  | q  q  q  q | q     seq_len 9, its last 7 tokens new
    virtual rows    k  k  q  q    q  q  q  q   q     seq_lens 4, 4, 1; query_lens 2, 4, 1

Plain attention over the virtual rows is what a layer with `AttentionSpec.chunk_size` computes over the real ones: a
query sees its own chunk and no other. Tokens and slots stay those of the batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.page_table import IntArray, starts_of, token_positions


def make_local_attention_virtual_batches(common: CommonAttentionMetadata, chunk_size: int) -> CommonAttentionMetadata:
    """The batch as virtual rows, each with the keys and queries of one chunk.

    For layers whose spec has this `chunk_size`, on a backend without `Capabilities.chunks`: build from what this
    returns, with `chunk_size=None` in the spec. Padded rows stay behind, as they are. One copy to the device.

    Args:
        common: self-attention; exact lengths on the host, as the cuts follow from them.
        chunk_size: positions a chunk, a multiple of the page size.

    Returns:
        The same tokens, slots and new keys in more rows. `page_table` is [V, max(1, pages of the longest chunk)]; past
        a row's own pages it holds what the batch's table had there.

    Raises:
        ValueError: a chunk would begin inside a page, lengths are upper bounds, the batch is for a graph, or a row is
            cross attention.
    """
    _check(common, chunk_size)
    rows, first_pages, seq_lens, query_lens = _cut(common, chunk_size)
    arrays = (starts_of(query_lens), seq_lens, rows, first_pages)
    host = torch.from_numpy(np.concatenate(arrays))
    sizes = [len(array) for array in arrays]
    on_device = host.to(common.seq_lens.device, non_blocking=True).split(sizes)
    query_start_loc_cpu, seq_lens_cpu, *_ = host.split(sizes)
    num_padded = common.num_reqs - common.num_actual_reqs
    max_seq_len = int(seq_lens.max())
    context_lens = np.where(seq_lens > 0, seq_lens - query_lens, 0)
    return replace(
        common,
        num_reqs=len(rows),
        num_actual_reqs=len(rows) - num_padded,
        max_query_len=int(query_lens.max()),
        max_seq_len=max_seq_len,
        query_start_loc=on_device[0],
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=on_device[1],
        seq_lens_cpu=seq_lens_cpu,
        context_lens_cpu=torch.from_numpy(context_lens),
        page_table=_pages(common.page_table, on_device[2], on_device[3], -(-max_seq_len // common.page_size)),
        new_kv_start_loc_cpu=query_start_loc_cpu.clamp(max=common.num_new_kv),
        csr=None,
    )


def _cut(common: CommonAttentionMetadata, chunk_size: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """V virtual rows, padding included, in four arrays [V] i32: the row that each is cut from, the column of its page
    list where the chunk begins, its keys, and its queries."""
    actual = common.num_actual_reqs
    query_lens: IntArray = common.query_lens_cpu.numpy()
    seq_lens: IntArray = common.seq_lens_cpu[:actual].numpy()
    context_lens = seq_lens - query_lens[:actual]
    first_chunks = context_lens // chunk_size
    rows, chunks = token_positions(first_chunks, (seq_lens - 1) // chunk_size - first_chunks + 1)
    begins = chunks * chunk_size
    ends = np.minimum(begins + chunk_size, seq_lens[rows])
    first_queries = np.maximum(begins, context_lens[rows])
    padded = np.arange(actual, common.num_reqs)
    none = np.zeros_like(padded)
    return (
        np.concatenate([rows, padded], dtype=np.int32),
        np.concatenate([begins // common.page_size, none], dtype=np.int32, casting="same_kind"),
        np.concatenate([ends - begins, none], dtype=np.int32, casting="same_kind"),
        np.concatenate([ends - first_queries, query_lens[actual:]], dtype=np.int32, casting="same_kind"),
    )


def _pages(page_table: torch.Tensor, rows: torch.Tensor, first_pages: torch.Tensor, width: int) -> torch.Tensor:
    """[V, width] i32, gathered on the device. A row's last chunk may end before `width` pages: the table's edge."""
    if not page_table.shape[1]:  # a profile run
        return page_table.new_zeros(len(rows), 0)
    columns = first_pages[:, None] + torch.arange(max(1, width), dtype=torch.int32, device=rows.device)
    return page_table[rows[:, None], columns.clamp_(max=page_table.shape[1] - 1)]


def _check(common: CommonAttentionMetadata, chunk_size: int) -> None:
    if chunk_size < 1 or chunk_size % common.page_size:
        raise ValueError(
            f"chunk_size is {chunk_size} and the page size {common.page_size}: virtual batches need chunks that begin "
            f"with a page. Set cache.page_size to a divisor of {chunk_size}, or use a backend that honours chunk_size"
        )
    if common.seq_lens_are_upper_bounds or common.for_graph:
        which = "upper bounds (seq_lens_are_upper_bounds)" if common.seq_lens_are_upper_bounds else "a graph's"
        raise ValueError(
            f"the lengths of this batch are {which}, and where rows are cut follows from exact ones: make the virtual "
            "batches from exact lengths, and pad those to the graph's shape (pad_rows)"
        )
    actual = common.num_actual_reqs
    new_kv_lens = common.new_kv_start_loc_cpu.diff()[:actual]
    query_lens, seq_lens = common.query_lens_cpu[:actual], common.seq_lens_cpu[:actual]
    cross = (new_kv_lens != query_lens) | (seq_lens != common.context_lens_cpu[:actual] + query_lens)
    for row in cross.nonzero().flatten().tolist():
        raise ValueError(
            f"row {row} has {query_lens[row]} query tokens after {common.context_lens_cpu[row]}, and {seq_lens[row]} "
            f"keys of which {new_kv_lens[row]} are new: that is cross attention, which has no chunks"
        )

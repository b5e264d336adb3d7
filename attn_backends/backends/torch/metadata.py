"""A batch as work items for TORCH: rows that are gathered together, rows of their own, rows for kernels in C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attn_backends.backends.torch.attend import gives_lse
from attn_backends.backends.torch.native.paged_decode import PagedDecode
from attn_backends.backends.torch.native.paged_prefill import PagedPrefill
from attn_backends.backends.torch.native.paged_rows import PagedRows
from attn_backends.backends.torch.options import TorchOptions
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.order import SwappableRows, leading_decodes, reorder_batch_to_split_decodes_and_prefills
from attn_backends.batch.views import prefix_to_share
from attn_backends.interface import AttentionMetadata, AttentionMetadataBuilder
from attn_backends.spec import AttentionSpec, AttentionType, Limits

# A shared prefix is attended once for all rows if that saves reading this many bytes: see
# benchmarks/rules/torch_cascade.py.
CASCADE_MIN_BYTES = 4 << 20
KERNEL_CASCADE_FACTOR = 8  # as much more of them for the kernel, which reads them without a gather


@dataclass(frozen=True)
class Row:
    """One row that is attended alone."""

    queries: slice  # its tokens in the batch
    new_keys: slice  # its tokens in `key` and `value`: what is attended when there is no cache
    pages: torch.Tensor | None  # [num_pages] i32 to gather; None: attend the new keys
    keys: slice  # of the gathered tokens, those that some query may see
    bias: torch.Tensor | None  # [1, Hkv | 1, G | 1, query_len, num_keys], added to the logits; None: nothing to add
    is_causal: bool  # bias is None because plain causal attention over a square needs none


@dataclass(frozen=True)
class DecodeBatch:
    """Rows that are gathered and attended together: the batch's first `num_rows * query_len` tokens.

    In pieces, each of `num_pieces` takes the place of a row, and holds some keys of the row that `owners` names.
    """

    num_rows: int
    slots: torch.Tensor  # [num_rows * num_keys] i64; a row with fewer keys repeats its last, which the bias hides
    bias: torch.Tensor | None  # [num_rows, Hkv | 1, G | 1, query_len, num_keys]
    owners: torch.Tensor | None = None  # [num_pieces] i64; None: the rows are whole
    query_len: int = 1
    live: torch.Tensor | None = None  # in a graph, [num_rows * query_len] bool: False is padding, whose output is zero


@dataclass(frozen=True)
class TorchMetadata(AttentionMetadata):
    """Work items of one step. Rows come decodes first; queries and keys are the view's own (they start at 0)."""

    has_idle_tokens: bool  # padding, or rows without keys: their output is zero
    prefix_pages: torch.Tensor | None  # [common_prefix_len / page_size] i32: attended once for all decode rows
    paged_rows: PagedRows | None  # all decode rows, for the kernel in C; then there are no other decode items
    paged_prefills: PagedRows | None  # all other rows, for theirs; then there are no other prefill items
    decode_batch: DecodeBatch | None
    decode_rows: tuple[Row, ...]
    prefill_rows: tuple[Row, ...]

    def decode_fields(self) -> dict[str, Any]:
        paged = None if self.paged_rows is None else self.paged_rows.first(self.num_decodes)
        return {"paged_rows": paged, "paged_prefills": None, "prefill_rows": ()}

    def prefill_fields(self) -> dict[str, Any]:
        rows = tuple(
            replace(row, queries=_moved(row.queries, self.num_decode_tokens),
                    new_keys=_moved(row.new_keys, self.num_decode_new_kv))
            for row in self.prefill_rows
        )  # fmt: skip
        paged = self.paged_prefills
        if paged is not None and paged.query_starts is not None:
            paged = replace(paged, query_starts=paged.query_starts - self.num_decode_tokens)
        alone = {"prefix_pages": None, "paged_rows": None, "decode_batch": None, "decode_rows": ()}
        return {**alone, "paged_prefills": paged, "prefill_rows": rows}


# What a graph's step has beside its one `DecodeBatch`.
NOTHING_ELSE = {"has_idle_tokens": False, "prefix_pages": None, "paged_rows": None, "paged_prefills": None,
                "decode_rows": (), "prefill_rows": ()}  # fmt: skip


def _moved(tokens: slice, by: int) -> slice:
    return slice(tokens.start - by, tokens.stop - by)


class TorchMetadataBuilder(AttentionMetadataBuilder[TorchMetadata]):
    """Decode rows are the leading rows of one query token; any other order is served too, row by row."""

    needs_exact_lengths = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = self.options or TorchOptions()
        self._is_native = self.options.native_decode and PagedDecode.serves(self.group.spec, self.device)
        self._has_prefill = self.options.native_prefill and PagedPrefill.serves(self.group.spec, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchMetadata:
        common, spec = common_attn_metadata, self.group.spec
        self.check_batch(common)
        if common.for_graph:
            return self._build_static(common)
        actual = common.num_actual_reqs
        seq_lens = common.seq_lens_cpu[:actual].numpy()
        num_decodes = leading_decodes(common)
        use_cache = not common.is_profile_run and spec.attention_type is not AttentionType.ENCODER

        prefix_len = 0
        if use_cache:
            min_bytes = CASCADE_MIN_BYTES * (KERNEL_CASCADE_FACTOR if self._is_native else 1)
            prefix_len = prefix_to_share(common, common_prefix_len, spec, num_decodes, min_bytes)
        paged = self._paged_rows(common, num_decodes, prefix_len) if use_cache and self._is_native else None
        batch = None
        if use_cache and paged is None:
            batch = self._decode_batch(common, seq_lens[:num_decodes], prefix_len)
        prefills = self._paged_prefills(common, num_decodes) if use_cache and self._has_prefill else None
        done = num_decodes if paged else batch.num_rows if batch else 0
        rows = self._rows(common, range(done, num_decodes if prefills else actual), use_cache, num_decodes, prefix_len)
        num_decode_rows = sum(row.queries.start < num_decodes for row in rows)
        return TorchMetadata.of_batch(
            common,
            self.group.index,
            num_decodes,
            common_prefix_len=prefix_len,
            has_idle_tokens=(paged is None or len(paged.seq_lens) < common.num_tokens)
            and (common.num_tokens > common.num_actual_tokens or bool((seq_lens == 0).any())),
            prefix_pages=common.page_table[0, : prefix_len // common.page_size] if prefix_len else None,
            paged_rows=paged,
            paged_prefills=prefills,
            decode_batch=batch,
            decode_rows=tuple(rows[:num_decode_rows]),
            prefill_rows=tuple(rows[num_decode_rows:]),
            planned_for=spec,
        )

    def reorder_batch(self, batch: SwappableRows, query_lens: Sequence[int]) -> bool:
        """Decodes first: only then are they gathered together."""
        return reorder_batch_to_split_decodes_and_prefills(batch, query_lens)

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Attention over cached keys, of rows of equal query lengths, with none longer than graphs gather."""
        common = common_attn_metadata
        longest = _graph_max_seq_len(self.options, self.limits)
        return self.reads_cached_keys(common) and not common.is_mixed and common.max_seq_len <= longest

    def _build_static(self, common: CommonAttentionMetadata) -> TorchMetadata:
        """Every row in one `DecodeBatch` whose shape depends on nothing but the graph's; lengths stay on the device."""
        spec, num_rows = self.group.spec, common.num_reqs
        if not self.can_run_in_cudagraph(common):
            raise ValueError(
                f"graphs of TORCH serve rows of equal query lengths of up to "
                f"{_graph_max_seq_len(self.options, self.limits)} cached keys, and this batch has {common.max_seq_len}"
                f"{' in rows of any' if common.is_mixed else ''}: run it eager, or raise graph_max_seq_len"
            )
        query_len = common.num_tokens // num_rows
        first_query = common.seq_lens.long()[:, None] - query_len  # [num_rows, 1]
        first = torch.zeros_like(first_query)
        if spec.window_left >= 0:
            first = (first_query - spec.window_left).clamp_(min=0)
        elif spec.chunk_size is not None:
            first = first_query.clamp(min=0) // spec.chunk_size * spec.chunk_size
        num_keys = graph_num_keys(spec, query_len, self.options, self.limits)
        keys = first + torch.arange(num_keys, device=self.device)  # [num_rows, num_keys]
        positions = torch.minimum(keys, common.seq_lens[:, None] - 1).clamp_(min=0)
        slots = _slots(common, torch.arange(num_rows, device=self.device), positions)
        slots = slots.masked_fill(common.seq_lens[:, None] == 0, 0)  # no page of a padded row is anybody's
        queries = first_query + torch.arange(query_len, device=self.device)  # [num_rows, query_len]
        visible = _visible(spec, queries, keys) & (keys < common.seq_lens[:, None])[:, None]
        bias = _bias(spec, queries[:, :, None], keys[:, None], visible)
        live = (common.seq_lens > 0).repeat_interleave(query_len)
        batch = DecodeBatch(num_rows, slots.view(-1), bias, None, query_len, live)
        of_step = self.group.index, common.slot_mapping, num_rows, common.num_tokens
        return TorchMetadata.of_graph(*of_step, decode_batch=batch, planned_for=spec, **NOTHING_ELSE)

    def _first_visible(self, position: int) -> int:
        """Position of the oldest key that a query at `position` sees."""
        spec = self.group.spec
        if spec.window_left >= 0:
            return max(0, position - spec.window_left)
        return position // spec.chunk_size * spec.chunk_size if spec.chunk_size else 0

    def _paged_rows(self, common: CommonAttentionMetadata, num_decodes: int, prefix_len: int) -> PagedRows | None:
        """The decode rows as they stand in the page table, with the padding behind them if there is no more."""
        are_all = num_decodes == common.num_actual_reqs and common.num_tokens == common.num_reqs
        num_rows = common.num_reqs if are_all and not prefix_len else num_decodes
        if not num_decodes:
            return None
        return PagedRows.of(common.page_table[:num_rows], common.seq_lens[:num_rows], prefix_len)

    def _paged_prefills(self, common: CommonAttentionMetadata, num_decodes: int) -> PagedRows | None:
        """The rows behind the decodes, as they stand in the page table."""
        rows = slice(num_decodes, common.num_actual_reqs)
        if rows.start == rows.stop:
            return None
        starts = common.query_start_loc[rows.start : rows.stop + 1]
        return PagedRows.of(common.page_table[rows], common.seq_lens[rows], query_starts=starts)

    def _decode_batch(
        self, common: CommonAttentionMetadata, seq_lens: np.ndarray[tuple[int], np.dtype[np.int32]], prefix_len: int
    ) -> DecodeBatch | None:
        """All decode rows as one gather if that is cheap (few bytes, at most half of them padding), or in pieces."""
        spec, num_rows = self.group.spec, len(seq_lens)
        owners = np.arange(num_rows)
        first = np.array([max(prefix_len, self._first_visible(n - 1)) for n in seq_lens.tolist()], np.int64)
        counts = seq_lens - first
        if not num_rows or counts.min() < 1 or spec.attention_type is AttentionType.CROSS:
            return None
        padded = num_rows * int(counts.max())
        bytes_per_key = spec.num_kv_heads * (spec.head_dim + spec.head_dim_vo) * spec.dtype.itemsize
        fits = padded * bytes_per_key <= self.options.gather_together_bytes
        together = fits and padded <= 2 * int(counts.sum())
        if not together:
            if not gives_lse(self.device, spec):
                return None
            # Every row in pieces of nearly equal lengths, the longest of which all are padded to.
            keys_of_piece = max(1, self.options.piece_bytes // bytes_per_key)
            pieces = -(-counts // keys_of_piece)  # [num_rows]
            owners = owners.repeat(pieces)
            nth, of = np.arange(len(owners)) - (pieces.cumsum() - pieces)[owners], pieces[owners]
            start, stop = (counts[owners] * n // of for n in (nth, nth + 1))
            first, counts = first[owners] + start, stop - start
        if len(owners) < 2:
            return None
        # Without waiting: pageable memory is staged before `to` returns.
        owner, query, first_key, last = (
            torch.from_numpy(array).to(self.device, non_blocking=True)[:, None]  # [num_rows, 1]
            for array in (owners, seq_lens.astype(np.int64)[owners] - 1, first, first + counts - 1)
        )
        wanted = first_key + torch.arange(int(counts.max()), device=self.device)  # [num_rows, num_keys]
        slots = _slots(common, owner[:, 0], torch.minimum(wanted, last))
        bias = None
        if spec.alibi_slopes is not None or counts.min() != counts.max():
            bias = _bias(spec, query[:, :, None], wanted[:, None], wanted[:, None] <= last[:, :, None])
        return DecodeBatch(num_rows, slots.view(-1), bias, None if together else owner[:, 0])

    def _rows(
        self, common: CommonAttentionMetadata, indices: range, use_cache: bool, num_decodes: int, prefix_len: int
    ) -> list[Row]:
        """Rows that are attended alone; those without keys are left out."""
        query_starts, new_kv_starts = common.query_start_loc_cpu.numpy(), common.new_kv_start_loc_cpu.numpy()
        seq_lens, rows = common.seq_lens_cpu.numpy(), []
        for i in indices:
            queries = slice(int(query_starts[i]), int(query_starts[i + 1]))
            new_keys = slice(int(new_kv_starts[i]), int(new_kv_starts[i + 1]))
            if not use_cache:
                rows.append(self._row(None, queries, new_keys, 0, new_keys.stop - new_keys.start))
            elif seq_lens[i]:
                first_key = prefix_len if i < num_decodes else 0
                rows.append(self._row(common.page_table[i], queries, new_keys, first_key, int(seq_lens[i])))
        return rows

    def _row(
        self, page_row: torch.Tensor | None, queries: slice, new_keys: slice, first_key: int, num_keys: int
    ) -> Row:
        """One row over keys `first_key` to `num_keys`, less those in front that no query of it sees."""
        spec, query_len = self.group.spec, queries.stop - queries.start
        # Query i sits at the position of its own key; for cross attention positions mean nothing and all is visible.
        first_query = num_keys - query_len if spec.attention_type is not AttentionType.CROSS else 0
        first_key = max(first_key, self._first_visible(first_query))
        bias, is_causal = None, spec.causal and query_len > 1
        is_square = first_key == first_query and spec.scale > 0  # below, torch's causal kernels scale -inf to +inf
        needs_none = query_len <= 1 or (not spec.is_local and (not spec.causal or is_square))
        if spec.alibi_slopes is not None or not needs_none:
            positions = torch.arange(first_query, first_query + query_len, device=self.device)
            keys = torch.arange(first_key, num_keys, device=self.device)
            visible, is_causal = _visible(spec, positions, keys), False
            bias = _bias(spec, positions[None, :, None], keys[None, None], visible)
        if page_row is None:
            return Row(queries, new_keys, None, slice(first_key, num_keys), bias, is_causal)
        first_page = first_key // self.cache.page_size
        pages = page_row[first_page : -(-num_keys // self.cache.page_size)]
        skipped = first_page * self.cache.page_size
        return Row(queries, new_keys, pages, slice(first_key - skipped, num_keys - skipped), bias, is_causal)


def _slots(common: CommonAttentionMetadata, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Where positions [len(rows), num_keys] i64 of these rows [len(rows)] i64 are cached, of the same shape."""
    pages = common.page_table[rows[:, None], positions // common.page_size].long()
    return pages * common.page_size + positions % common.page_size


def _graph_max_seq_len(options: TorchOptions, limits: Limits) -> int:
    return min(options.graph_max_seq_len, limits.max_model_len)


def graph_num_keys(spec: AttentionSpec, query_len: int, options: TorchOptions, limits: Limits) -> int:
    """Keys that `query_len` neighbouring queries can see together, of a row that graphs serve."""
    longest = _graph_max_seq_len(options, limits)
    if spec.window_left >= 0:
        return min(longest, spec.window_left + query_len)
    return min(longest, spec.chunk_size - 1 + query_len) if spec.chunk_size else longest


def _visible(spec: AttentionSpec, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which key each query sees, by position: [..., query_len, num_keys] bool."""
    query, key = queries[..., :, None], keys[..., None, :]
    visible = key >= query - spec.window_left if spec.window_left >= 0 else torch.ones_like(key >= query)
    if spec.causal:
        visible &= key <= query
    if spec.chunk_size is not None:
        visible &= key // spec.chunk_size == query // spec.chunk_size
    return visible


def bias_dtype(spec: AttentionSpec) -> torch.dtype:
    """The layer's dtype, which holds 0 and -inf; for ALiBi float32 at least, as 16 bits round what lies far away."""
    return spec.dtype if spec.alibi_slopes is None else torch.promote_types(spec.dtype, torch.float32)


def _bias(spec: AttentionSpec, queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """What is added to the logits: 0 or ALiBi's slope · (key - query) where visible, -inf elsewhere.

    `queries` [B, query_len, 1] and `keys` [B, 1, num_keys] are positions, `visible` broadcasts over them.
    Returns [B, Hkv | 1, G | 1, query_len, num_keys] of `bias_dtype`.
    """
    dtype = bias_dtype(spec)
    if spec.alibi_slopes is None:
        added = torch.zeros(visible.shape, dtype=dtype, device=keys.device)[..., None, None, :, :]
    else:
        slopes = torch.tensor(spec.alibi_slopes, dtype=dtype, device="cpu").to(keys.device, non_blocking=True)
        added = slopes.view(spec.num_kv_heads, spec.group_size, 1, 1) * (keys - queries)[:, None, None]
    hidden = ~visible.reshape(-1, 1, 1, *visible.shape[-2:])
    return added.view(-1, *added.shape[-4:]).masked_fill(hidden, float("-inf"))

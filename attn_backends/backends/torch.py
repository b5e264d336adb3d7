"""TORCH: paged attention in plain torch, on any device. The one to read first, and the default on a CPU.

The builder turns a batch into work items: one `DecodeBatch` for decode rows that are cheap to gather together, and a
`Row` for every other row. Each item names the keys to gather and a bias that holds all that depends on positions
(causality, window, chunks, ALiBi, padding), shared by all layers of the group. What is left to the Impl: write the new
keys, gather, attend, write the output.

On a CPU where C can be compiled, decode rows take another road: a kernel (native/paged_decode.py) that reads pages in
place and works positions out itself, so that its item, `PagedRows`, is little more than the page table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field

from attn_backends.batch import CommonAttentionMetadata
from attn_backends.batch_order import (
    SwappableRows,
    leading_decodes,
    reorder_batch_to_split_decodes_and_prefills,
)
from attn_backends.batch_views import prefix_to_share
from attn_backends.call_checks import check_call, check_new_kv
from attn_backends.capabilities import Capabilities, CudaGraphSupport
from attn_backends.capturing_state import CapturingState
from attn_backends.devices import Progress
from attn_backends.interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionStep,
)
from attn_backends.kv_cache import KVCache, dequantise, gather_pages, gather_slots, write_kv, write_slots
from attn_backends.native.paged_decode import PagedDecode, PagedRows
from attn_backends.page_table import PAD_SLOT
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, Limits, PlanGroup
from attn_backends.warm_up import compile_listed, list_cache_writes

# A shared prefix is attended once for all rows if that saves reading this many bytes: see benchmarks/torch_cascade.py.
CASCADE_MIN_BYTES = 4 << 20
KERNEL_CASCADE_FACTOR = 8  # as much more of them for the kernel, which reads them without a gather

_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class TorchOptions(BaseModel):
    """The `backend_options` of TORCH."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    native_decode: bool = True
    """On a CPU, decode rows go to a kernel in C, compiled at first use by `$CC`, `cc` or `gcc` in under a second, and
    kept in the user's cache. With false, and in layers that it does not serve, they go as the next two say."""
    gather_together_bytes: Annotated[int, Field(ge=0)] = 32 << 20
    """Decode rows are gathered together while their keys and values take at most this; more go in pieces on a CPU, and
    one row at a time elsewhere. benchmarks/torch_decode.py shows both sides."""
    piece_bytes: Annotated[int, Field(ge=1)] = 1 << 20
    """Keys and values of a piece: what one core gathers and then attends, while it is still in its own cache."""
    graph_max_seq_len: Annotated[int, Field(ge=1)] = 1024
    """In a CUDA graph every row gathers this many keys, masked (fewer if the model or a window is shorter). A batch
    with a longer row runs eager."""


class TorchBackend(AttentionBackend):
    """Attention by `scaled_dot_product_attention`, or by hand where that cannot say it (soft cap, sinks, LSE)."""

    @staticmethod
    def get_name() -> str:
        return "TORCH"

    @staticmethod
    def get_impl_cls() -> type[TorchImpl]:
        return TorchImpl

    @staticmethod
    def get_metadata_cls() -> type[TorchMetadata]:
        return TorchMetadata

    @staticmethod
    def get_builder_cls() -> type[TorchMetadataBuilder]:
        return TorchMetadataBuilder

    @staticmethod
    def get_state_cls() -> type[TorchState]:
        return TorchState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=_FLOATS,
            cache_dtypes=_FLOATS | frozenset(FP8_DTYPES),
            layouts=frozenset({"NHD", "HND"}),
            attention_types=frozenset(AttentionType),
            window=True,
            soft_cap=True,
            alibi=True,
            sinks=True,
            chunks=True,
            non_causal=True,
            unequal_head_dims=True,
            lse=True,
            cascade=True,
            cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
        )


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

    num_tokens: int  # padding included
    has_idle_tokens: bool  # padding, or rows without keys: their output is zero
    num_new_kv: int
    num_decode_new_kv: int
    prefix_pages: torch.Tensor | None  # [common_prefix_len / page_size] i32: attended once for all decode rows
    paged_rows: PagedRows | None  # all decode rows, for the kernel; then there are no other decode items
    decode_batch: DecodeBatch | None
    decode_rows: tuple[Row, ...]
    prefill_rows: tuple[Row, ...]

    @property
    def is_static(self) -> bool:
        """For a graph: which tokens are padding is known on the device alone."""
        return self.decode_batch is not None and self.decode_batch.live is not None

    @property
    def decode_metadata(self) -> TorchMetadata | None:
        if not self.num_decodes:
            return None
        tokens, new_kv = self.num_decode_tokens, self.num_decode_new_kv
        paged = None if self.paged_rows is None else self.paged_rows.first(self.num_decodes)
        return replace(self, paged_rows=paged, num_prefills=0, num_prefill_tokens=0, num_tokens=tokens,
                       num_new_kv=new_kv, slot_mapping=self.slot_mapping[:new_kv], prefill_rows=())  # fmt: skip

    @property
    def prefill_metadata(self) -> TorchMetadata | None:
        if not self.num_prefills:
            return None
        tokens, new_kv = self.num_prefill_tokens, self.num_new_kv - self.num_decode_new_kv
        rows = tuple(
            replace(row, queries=_moved(row.queries, self.num_decode_tokens),
                    new_keys=_moved(row.new_keys, self.num_decode_new_kv))
            for row in self.prefill_rows
        )  # fmt: skip
        return replace(self, num_decodes=0, num_decode_tokens=0, num_decode_new_kv=0, num_tokens=tokens,
                       num_new_kv=new_kv, prefix_pages=None, paged_rows=None, decode_batch=None,
                       slot_mapping=self.slot_mapping[self.num_decode_new_kv : self.num_new_kv],
                       common_prefix_len=0, decode_rows=(), prefill_rows=rows)  # fmt: skip


def _moved(tokens: slice, by: int) -> slice:
    return slice(tokens.start - by, tokens.stop - by)


class TorchMetadataBuilder(AttentionMetadataBuilder[TorchMetadata]):
    """Decode rows are the leading rows of one query token; any other order is served too, row by row."""

    needs_exact_lengths = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_native = _is_native(self.options) and PagedDecode.serves(self.group.spec, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchMetadata:
        common, spec = common_attn_metadata, self.group.spec
        if common.for_graph:
            return self._build_static(common)
        self.check_lengths(common)
        actual = common.num_actual_reqs
        query_starts = common.query_start_loc_cpu.numpy()
        seq_lens = common.seq_lens_cpu[:actual].numpy()
        new_kv_starts = common.new_kv_start_loc_cpu.numpy()
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
        rows = []
        for i in range(num_decodes if paged else batch.num_rows if batch else 0, actual):
            queries = slice(int(query_starts[i]), int(query_starts[i + 1]))
            new_keys = slice(int(new_kv_starts[i]), int(new_kv_starts[i + 1]))
            if not use_cache:
                rows.append(self._row(None, queries, new_keys, 0, new_keys.stop - new_keys.start))
            elif seq_lens[i]:
                first_key = prefix_len if i < num_decodes else 0
                rows.append(self._row(common.page_table[i], queries, new_keys, first_key, int(seq_lens[i])))
        num_decode_rows = sum(row.queries.start < num_decodes for row in rows)
        return TorchMetadata(
            group_index=self.group.index,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            num_prefills=actual - num_decodes,
            num_prefill_tokens=common.num_actual_tokens - num_decodes,
            slot_mapping=common.slot_mapping,
            common_prefix_len=prefix_len,
            is_profile_run=common.is_profile_run,
            num_tokens=common.num_tokens,
            has_idle_tokens=(paged is None or len(paged.seq_lens) < common.num_tokens)
            and (common.num_tokens > common.num_actual_tokens or bool((seq_lens == 0).any())),
            num_new_kv=common.num_new_kv,
            num_decode_new_kv=int(new_kv_starts[num_decodes]),
            prefix_pages=common.page_table[0, : prefix_len // common.page_size] if prefix_len else None,
            paged_rows=paged,
            decode_batch=batch,
            decode_rows=tuple(rows[:num_decode_rows]),
            prefill_rows=tuple(rows[num_decode_rows:]),
        )

    def reorder_batch(self, batch: SwappableRows, query_lens: Sequence[int]) -> bool:
        """Decodes first: only then are they gathered together."""
        return reorder_batch_to_split_decodes_and_prefills(batch, query_lens)

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Self-attention over the cache, with no row longer than graphs gather."""
        common = common_attn_metadata
        cached = not common.is_profile_run and self.group.spec.attention_type is AttentionType.DECODER
        return cached and common.max_seq_len <= _graph_max_seq_len(self.options, self.limits)

    def _build_static(self, common: CommonAttentionMetadata) -> TorchMetadata:
        """Every row in one `DecodeBatch` whose shape depends on nothing but the graph's; lengths stay on the device."""
        spec, num_rows = self.group.spec, common.num_reqs
        if not self.can_run_in_cudagraph(common):
            raise ValueError(
                f"graphs of TORCH serve cached self-attention of up to {_graph_max_seq_len(self.options, self.limits)} "
                f"keys a row, and this batch has {common.max_seq_len}: run it eager, or raise graph_max_seq_len"
            )
        query_len = common.num_tokens // num_rows
        first_query = common.seq_lens.long()[:, None] - query_len  # [num_rows, 1]
        first = torch.zeros_like(first_query)
        if spec.window_left >= 0:
            first = (first_query - spec.window_left).clamp_(min=0)
        elif spec.chunk_size is not None:
            first = first_query.clamp(min=0) // spec.chunk_size * spec.chunk_size
        num_keys = _graph_num_keys(spec, query_len, self.options, self.limits)
        keys = first + torch.arange(num_keys, device=self.device)  # [num_rows, num_keys]
        positions = torch.minimum(keys, common.seq_lens[:, None] - 1).clamp_(min=0)
        slots = _slots(common, torch.arange(num_rows, device=self.device), positions)
        queries = first_query + torch.arange(query_len, device=self.device)  # [num_rows, query_len]
        visible = _visible(spec, queries, keys) & (keys < common.seq_lens[:, None])[:, None]
        bias = _bias(spec, queries[:, :, None], keys[:, None], visible)
        live = (common.seq_lens > 0).repeat_interleave(query_len)
        return _static_metadata(
            self.group.index, common.slot_mapping, DecodeBatch(num_rows, slots.view(-1), bias, None, query_len, live)
        )

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
        options = self.options or TorchOptions()
        together = padded * bytes_per_key <= options.gather_together_bytes and padded <= 2 * int(counts.sum())
        if not together:
            if not _gives_lse(self.device, spec):
                return None
            # Every row in pieces of nearly equal lengths, the longest of which all are padded to.
            pieces = -(-counts * bytes_per_key // options.piece_bytes)  # [num_rows]
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

    def _row(
        self, page_row: torch.Tensor | None, queries: slice, new_keys: slice, first_key: int, num_keys: int
    ) -> Row:
        """One row over keys `first_key` to `num_keys`, less those in front that no query of it sees."""
        spec, query_len = self.group.spec, queries.stop - queries.start
        # Query i sits at the position of its own key; for cross attention positions mean nothing and all is visible.
        first_query = num_keys - query_len if spec.attention_type is not AttentionType.CROSS else 0
        first_key = max(first_key, self._first_visible(first_query))
        bias, is_causal = None, spec.causal and query_len > 1
        square = first_key == first_query and spec.window_left < 0 and spec.chunk_size is None
        if spec.alibi_slopes is not None or (query_len > 1 and not self._all_visible() and not square):
            positions = torch.arange(first_query, first_query + query_len, device=self.device)
            keys = torch.arange(first_key, num_keys, device=self.device)
            bias, is_causal = (
                _bias(spec, positions[None, :, None], keys[None, None], _visible(spec, positions, keys)),
                False,
            )
        if page_row is None:
            return Row(queries, new_keys, None, slice(first_key, num_keys), bias, is_causal)
        first_page = first_key // self.cache.page_size
        pages = page_row[first_page : -(-num_keys // self.cache.page_size)]
        skipped = first_page * self.cache.page_size
        return Row(queries, new_keys, pages, slice(first_key - skipped, num_keys - skipped), bias, is_causal)

    def _all_visible(self) -> bool:
        spec = self.group.spec
        return not spec.causal and spec.window_left < 0 and spec.chunk_size is None


def _slots(common: CommonAttentionMetadata, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Where positions [len(rows), num_keys] i64 of these rows [len(rows)] i64 are cached, of the same shape."""
    pages = common.page_table[rows[:, None], positions // common.page_size].long()
    return pages * common.page_size + positions % common.page_size


def _is_native(options: TorchOptions | None) -> bool:
    return (options or TorchOptions()).native_decode


def _graph_max_seq_len(options: TorchOptions | None, limits: Limits) -> int:
    return min((options or TorchOptions()).graph_max_seq_len, limits.max_model_len)


def _graph_num_keys(spec: AttentionSpec, query_len: int, options: TorchOptions | None, limits: Limits) -> int:
    """Keys that `query_len` neighbouring queries can see together, of a row that graphs serve."""
    longest = _graph_max_seq_len(options, limits)
    if spec.window_left >= 0:
        return min(longest, spec.window_left + query_len)
    return min(longest, spec.chunk_size - 1 + query_len) if spec.chunk_size else longest


def _static_metadata(group_index: int, slot_mapping: torch.Tensor, batch: DecodeBatch) -> TorchMetadata:
    """One `DecodeBatch` and nothing else. Padded rows count as decodes: which they are is known on the device alone."""
    num_tokens = batch.num_rows * batch.query_len
    return TorchMetadata(
        group_index=group_index,
        num_decodes=batch.num_rows,
        num_decode_tokens=num_tokens,
        num_prefills=0,
        num_prefill_tokens=0,
        slot_mapping=slot_mapping,
        common_prefix_len=0,
        is_profile_run=False,
        num_tokens=num_tokens,
        has_idle_tokens=False,
        num_new_kv=num_tokens,
        num_decode_new_kv=num_tokens,
        prefix_pages=None,
        paged_rows=None,
        decode_batch=batch,
        decode_rows=(),
        prefill_rows=(),
    )


def _visible(spec: AttentionSpec, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which key each query sees, by position: [..., query_len, num_keys] bool."""
    query, key = queries[..., :, None], keys[..., None, :]
    visible = key >= query - spec.window_left if spec.window_left >= 0 else torch.ones_like(key >= query)
    if spec.causal:
        visible &= key <= query
    if spec.chunk_size is not None:
        visible &= key // spec.chunk_size == query // spec.chunk_size
    return visible


def _bias_dtype(spec: AttentionSpec) -> torch.dtype:
    """The layer's dtype, which holds 0 and -inf; for ALiBi float32 at least, as 16 bits round what lies far away."""
    return spec.dtype if spec.alibi_slopes is None else torch.promote_types(spec.dtype, torch.float32)


def _bias(spec: AttentionSpec, queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """What is added to the logits: 0 or ALiBi's slope · (key - query) where visible, -inf elsewhere.

    `queries` [B, query_len, 1] and `keys` [B, 1, num_keys] are positions, `visible` broadcasts over them.
    Returns [B, Hkv | 1, G | 1, query_len, num_keys] of `_bias_dtype`.
    """
    dtype = _bias_dtype(spec)
    if spec.alibi_slopes is None:
        added = torch.zeros(visible.shape, dtype=dtype, device=keys.device)[..., None, None, :, :]
    else:
        slopes = torch.tensor(spec.alibi_slopes, dtype=dtype).to(keys.device, non_blocking=True)
        added = slopes.view(spec.num_kv_heads, spec.group_size, 1, 1) * (keys - queries)[:, None, None]
    hidden = ~visible.reshape(-1, 1, 1, *visible.shape[-2:])
    return added.view(-1, *added.shape[-4:]).masked_fill(hidden, float("-inf"))


@dataclass(frozen=True)
class TorchStep(AttentionStep[TorchMetadata]):
    """A step with the state's scratch for gathered keys and values."""

    scratch: tuple[torch.Tensor, torch.Tensor] | None  # two of [bytes] u8; None: gather into fresh tensors


def _room(
    step: AttentionStep[TorchMetadata], kv_cache: KVCache, num_tokens: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The step's scratch as two tensors [num_tokens, num_kv_heads, dim] like the cache's; None where it has no room."""
    if not isinstance(step, TorchStep) or step.scratch is None:
        return None, None
    rooms: list[torch.Tensor | None] = []
    for scratch, cached in zip(step.scratch, kv_cache, strict=True):
        shape = (num_tokens, *cached.shape[2:])
        num_bytes = math.prod(shape) * cached.itemsize
        fits = num_bytes <= scratch.numel()
        rooms.append(scratch[:num_bytes].view(cached.dtype).view(shape) if fits else None)
    return rooms[0], rooms[1]


class TorchState(CapturingState[TorchMetadata, "TorchGraphState"]):
    """Owns one scratch for gathered keys and one for values: the longest row of any group, or rows taken together.

    On a CPU a fresh allocation of that size goes back to the system after each layer, which costs more than the gather.
    On a GPU torch's caching allocator keeps it, and there is no scratch.
    """

    backend_name = "TORCH"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.device.type == "cpu":
            page_size = self.cache.page_size
            tokens = -(-self.limits.max_model_len // page_size) * page_size
            specs = [group.spec for group in self.groups]
            per_key = max(s.num_kv_heads * s.head_dim * s.cache_dtype.itemsize for s in specs)
            per_value = max(s.num_kv_heads * s.head_dim_vo * s.cache_dtype.itemsize for s in specs)
            options = self.options or TorchOptions()
            at_once = max(options.gather_together_bytes, torch.get_num_threads() * options.piece_bytes)
            self.scratch = (
                torch.empty(max(tokens * per_key, at_once), dtype=torch.uint8),
                torch.empty(max(tokens * per_value, at_once), dtype=torch.uint8),
            )

    def begin_forward(self, metadata: TorchMetadata) -> TorchStep:
        return TorchStep(metadata, self.scratch)

    def warm_up(self, progress: Progress | None = None) -> None:
        specs = [group.spec for group in self.groups]
        compile_listed(self.device, lambda: list_cache_writes(specs, self.cache), progress)

    def make_clone(self, batch_size: int, query_len: int) -> TorchGraphState:
        return TorchGraphState(self, batch_size, query_len)

    def idle_metadata_of(self, clone: TorchGraphState, group_index: int) -> TorchMetadata:
        return clone.steps[group_index].metadata


class TorchGraphState(TorchState):
    """The state of one captured size. Its steps are made once, over buffers that every `begin_forward` fills."""

    def __init__(self, parent: TorchState, batch_size: int, query_len: int) -> None:
        CapturingState.__init__(self, parent.groups, parent.cache, parent.limits, parent.device, options=parent.options)
        self.scratch = parent.scratch
        self.shape = (batch_size, query_len)
        self.steps = {group.index: self._step(group, batch_size, query_len) for group in parent.groups}

    def _step(self, group: PlanGroup[Any], num_rows: int, query_len: int) -> TorchStep:
        spec, device = group.spec, self.device
        num_keys = _graph_num_keys(spec, query_len, self.options, self.limits)
        heads = (spec.num_kv_heads, spec.group_size) if spec.alibi_slopes is not None else (1, 1)
        batch = DecodeBatch(
            num_rows,
            torch.zeros(num_rows * num_keys, dtype=torch.int64, device=device),
            torch.zeros(num_rows, *heads, query_len, num_keys, dtype=_bias_dtype(spec), device=device),
            None,
            query_len,
            torch.zeros(num_rows * query_len, dtype=torch.bool, device=device),
        )
        slot_mapping = torch.full((num_rows * query_len,), PAD_SLOT, dtype=torch.int64, device=device)
        return TorchStep(_static_metadata(group.index, slot_mapping, batch), self.scratch)

    def begin_forward(self, metadata: TorchMetadata) -> TorchStep:
        batch = metadata.decode_batch
        if batch is None or batch.live is None or (batch.num_rows, batch.query_len) != self.shape:
            num_rows, query_len = self.shape
            raise ValueError(
                f"this graph was captured for {num_rows} rows of {query_len} tokens, and the metadata has "
                f"{metadata.num_tokens} tokens of other rows or lengths: pad the batch to the captured size, and build "
                "it with for_graph=True"
            )
        self.prepare_graph_input_buffers(self.get_graph_input_buffers(metadata), metadata)
        return self.steps[metadata.group_index]

    def get_graph_input_buffers(self, metadata: TorchMetadata) -> dict[str, torch.Tensor]:
        return _inputs(self.steps[metadata.group_index].metadata)

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: TorchMetadata) -> None:
        for name, tensor in _inputs(metadata).items():
            buffers[name].copy_(tensor)


def _inputs(metadata: TorchMetadata) -> dict[str, torch.Tensor]:
    """What a graph reads of static metadata."""
    batch = metadata.decode_batch
    if batch is None or batch.bias is None or batch.live is None:
        raise ValueError("this metadata is for eager steps: build it with for_graph=True")
    return {"slot_mapping": metadata.slot_mapping, "slots": batch.slots, "bias": batch.bias, "live": batch.live}


class TorchImpl(AttentionImpl[TorchMetadata]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        constants = (self.spec, self.device, self.sinks, self.k_scale, self.v_scale)
        self.kernel = PagedDecode.of(*constants) if _is_native(self.options) else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: AttentionStep[TorchMetadata],
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
        output_scale: float | None = None,
    ) -> torch.Tensor:
        metadata = self._check(step)
        check_call("TORCH", self.spec, metadata.num_tokens, query, kv_cache, output, lse, output_scale)
        check_new_kv(self.spec, metadata.num_new_kv, key, value)
        if output is None:
            output = query.new_empty(query.shape[0], self.spec.num_qo_heads, self.spec.head_dim_vo)
        if metadata.has_idle_tokens:
            output.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        if kv_cache is not None and metadata.paged_rows is not None:
            self._decode(query, key, value, kv_cache, step, metadata.paged_rows, output, lse)
        elif kv_cache is not None and key is not None and value is not None and metadata.slot_mapping.numel():
            self._write(key, value, kv_cache, metadata)
        for tokens, attended in self._attend_items(query, key, value, kv_cache, step, lse is not None):
            output[tokens] = attended.output
            if lse is not None and attended.lse is not None:
                lse[tokens] = attended.lse
        return output

    def trace_inputs(self, metadata: TorchMetadata) -> tuple[torch.Tensor, ...] | None:
        """For the kernel, slots of new keys and its rows. Otherwise slots, one for each new key; which token's key goes
        there; slots to gather [rows, keys]; what hides them.

        For steps that decode, all rows together. A padded row does as the first one does: it writes the same once more.
        """
        if self.kernel is not None:
            paged, num_tokens = metadata.paged_rows, metadata.num_tokens
            if paged is None or metadata.prefix_pages is not None or not 2 <= num_tokens == len(paged.seq_lens):
                return None
            return metadata.slot_mapping, paged.pages, paged.first_pages, paged.seq_lens
        batch = self._whole_batch(metadata)
        if batch is None or metadata.num_tokens < 2 or len(batch.slots) < 2 * batch.num_rows:
            return None
        slots, bias = batch.slots.view(batch.num_rows, -1), batch.bias
        if bias is None:
            bias = torch.zeros(batch.num_rows, 1, 1, 1, slots.shape[1], dtype=self.spec.dtype)
        rows = torch.arange(metadata.num_tokens)
        if metadata.num_tokens == batch.num_rows:
            return metadata.slot_mapping, rows, slots, bias
        rows[batch.num_rows :] = 0
        return metadata.slot_mapping[rows], rows, slots[rows], bias[rows]

    def _whole_batch(self, metadata: TorchMetadata) -> DecodeBatch | None:
        """A step of decode rows, all with keys, on a CPU, as one batch; None for any other step."""
        num_rows, batch, rows = metadata.num_decodes, metadata.decode_batch, metadata.decode_rows
        plain = not (metadata.is_static or metadata.num_prefills or metadata.common_prefix_len)
        plain = plain and self.spec.cache_dtype not in FP8_DTYPES
        if not plain or metadata.num_new_kv != num_rows or self.device.type != "cpu":
            return None
        if batch is not None and (rows or batch.owners is None):
            return None if rows else batch
        if batch is not None:  # the pieces of one row, side by side
            bias = None if batch.bias is None else batch.bias.permute(1, 2, 3, 0, 4).flatten(3)[None]
            return DecodeBatch(1, batch.slots, bias) if num_rows == 1 else None
        if num_rows != 1 or not rows or rows[0].pages is None:
            return None
        page_size = self.cache.page_size
        slots = (rows[0].pages.long()[:, None] * page_size + torch.arange(page_size)).view(-1)[rows[0].keys]
        return DecodeBatch(1, slots, rows[0].bias)

    def trace(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        inputs: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        if self.kernel is not None:
            return self.kernel.trace(query, key, value, kv_cache, *inputs)
        slot_mapping, rows, slots, bias = inputs
        write_slots(key[rows], value[rows], kv_cache, slot_mapping, self.k_scale, self.v_scale)
        keys, values = (
            dequantise(gather_slots(cached, slots.view(-1)), query.dtype, scale).unflatten(0, slots.shape)
            for cached, scale in ((kv_cache.key, self.k_scale), (kv_cache.value, self.v_scale))
        )
        return self._attend(query[:, None], keys, values, bias, False, False).output[:, 0]

    def _write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, metadata: TorchMetadata) -> None:
        slots, num_new = metadata.slot_mapping, metadata.num_new_kv
        if metadata.is_static:
            write_kv(key, value, kv_cache, slots, self.k_scale, self.v_scale)
        else:
            write_slots(key[:num_new], value[:num_new], kv_cache, slots[:num_new], self.k_scale, self.v_scale)

    def _check(self, step: AttentionStep[TorchMetadata]) -> TorchMetadata:
        metadata = step.metadata
        if not isinstance(metadata, TorchMetadata):
            raise TypeError(f"TORCH got {type(metadata).__name__}; build the step with TorchMetadataBuilder")
        return metadata

    def _decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache,
        step: AttentionStep[TorchMetadata],
        rows: PagedRows,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """By the kernel, which writes all new keys of the step first; into `output` itself if that is possible."""
        if self.kernel is None:
            raise ValueError(
                "this step was built with native_decode, and the layer has it off: give both one set of options"
            )
        slots, tokens = step.metadata.slot_mapping[: step.metadata.num_new_kv], slice(0, len(rows.seq_lens))
        if step.metadata.prefix_pages is None and output.is_contiguous() and (lse is None or lse.is_contiguous()):
            self.kernel.attend(query, key, value, kv_cache, slots, rows, output, lse)
            return
        out = output.new_empty(len(rows.seq_lens), *output.shape[1:])
        own_lse = torch.empty(out.shape[:2])
        self.kernel.attend(query, key, value, kv_cache, slots, rows, out, own_lse)
        attended = _merge(Attended(out, own_lse), self._attend_prefix(query, kv_cache, step), tokens)
        output[tokens] = attended.output
        if lse is not None and attended.lse is not None:
            lse[tokens] = attended.lse

    def _attend_prefix(
        self, query: torch.Tensor, kv_cache: KVCache | None, step: AttentionStep[TorchMetadata]
    ) -> Attended | None:
        """All decode rows over the prefix that they share, without sinks; None if they share none."""
        metadata = step.metadata
        if metadata.prefix_pages is None or kv_cache is None:
            return None
        keys, values = self._gather(kv_cache, metadata.prefix_pages, slice(0, metadata.common_prefix_len), step)
        # Queries of all rows in one row: without causality their order means nothing.
        decodes = query[None, : metadata.num_decode_tokens]
        return self._attend(decodes, keys, values, None, False, True, with_sinks=False)

    def _attend_items(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: AttentionStep[TorchMetadata],
        want_lse: bool,
    ) -> Iterator[tuple[slice, Attended]]:
        """Every item's tokens and result but the kernel's: decode rows together, then row by row."""
        metadata = step.metadata
        shared = None if metadata.paged_rows is not None else self._attend_prefix(query, kv_cache, step)
        batch = metadata.decode_batch
        if batch is not None and batch.owners is not None and kv_cache is not None:
            tokens = slice(0, batch.num_rows)
            attended = self._attend_pieces(query[tokens], kv_cache, batch, batch.owners, step)
            yield tokens, _merge(attended, shared, tokens)
        elif batch is not None and kv_cache is not None:
            key_room, value_room = _room(step, kv_cache, len(batch.slots))
            keys = dequantise(gather_slots(kv_cache.key, batch.slots, key_room), query.dtype, self.k_scale)
            values = dequantise(gather_slots(kv_cache.value, batch.slots, value_room), query.dtype, self.v_scale)
            keys, values = (tensor.view(batch.num_rows, -1, *tensor.shape[1:]) for tensor in (keys, values))
            tokens = slice(0, batch.num_rows * batch.query_len)
            queries = query[tokens].unflatten(0, (batch.num_rows, batch.query_len))
            attended = self._attend(queries, keys, values, batch.bias, False, want_lse or shared is not None).flat()
            yield tokens, _merge(attended.of(batch.live), shared, tokens)
        for row in metadata.decode_rows + metadata.prefill_rows:
            if row.pages is not None and kv_cache is not None:
                keys, values = self._gather(kv_cache, row.pages, row.keys, step)
            elif key is not None and value is not None:
                keys, values = key[None, row.new_keys], value[None, row.new_keys]
            else:
                raise ValueError("this step reads a cache or fresh keys, and neither was given: pass kv_cache or key")
            with_shared = shared if row.queries.stop <= metadata.num_decode_tokens else None
            attended = self._attend(
                query[None, row.queries], keys, values, row.bias, row.is_causal, want_lse or with_shared is not None
            )
            yield row.queries, _merge(attended.flat(), with_shared, row.queries)

    def _attend_pieces(
        self,
        query: torch.Tensor,  # [num_rows, num_qo_heads, head_dim]
        kv_cache: KVCache,
        batch: DecodeBatch,
        owners: torch.Tensor,
        step: AttentionStep[TorchMetadata],
    ) -> Attended:
        """One piece a core, gathered and attended before the next; at the end each row's are joined."""
        spec, num_pieces, at_once = self.spec, len(owners), torch.get_num_threads()
        num_keys = len(batch.slots) // num_pieces
        heads = query.unflatten(1, (spec.num_kv_heads, -1))  # [num_rows, Hkv, G, D]
        outs = heads.index_select(0, owners)  # queries, each of which makes place for its output
        lses = torch.empty(outs.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        masks = repeat(None) if batch.bias is None else batch.bias[:, :, :, 0].split(at_once)
        key_room, value_room = _room(step, kv_cache, min(at_once, num_pieces) * num_keys)
        shape = (-1, num_keys, spec.num_kv_heads, spec.head_dim)
        parts = (batch.slots.split(at_once * num_keys), outs.split(at_once), lses.split(at_once))
        for slots, out, lse, mask in zip(*parts, masks, strict=False):
            keys = dequantise(gather_slots(kv_cache.key, slots, key_room), spec.dtype, self.k_scale).view(shape)
            values = dequantise(gather_slots(kv_cache.value, slots, value_room), spec.dtype, self.v_scale).view(shape)
            attended = _flash(out, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=spec.scale)
            out.copy_(attended[0])
            lse.copy_(attended[1])
        # Each output weighs exp(its LSE).
        top = lses.new_full(heads.shape[:3], float("-inf"))
        top.scatter_reduce_(0, owners[:, None, None].expand_as(lses), lses, "amax")
        weights = lses.sub_(top.index_select(0, owners)).exp_()
        total = torch.zeros_like(top).index_add_(0, owners, weights)
        out = total.new_zeros(heads.shape).index_add_(0, owners, outs.to(lses.dtype).mul_(weights[..., None]))
        out = (out / total[..., None]).to(query.dtype)
        return _with_sinks(Attended(out.flatten(1, 2), (top + total.log()).flatten(1, 2)), self.sinks)

    def _gather(
        self, kv_cache: KVCache, pages: torch.Tensor, tokens: slice, step: AttentionStep[TorchMetadata]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some pages as [1, num_keys, num_kv_heads, dim] in the query's dtype."""
        key_room, value_room = _room(step, kv_cache, len(pages) * self.cache.page_size)
        keys = gather_pages(kv_cache.key, pages, key_room)[None, tokens]
        values = gather_pages(kv_cache.value, pages, value_room)[None, tokens]
        dtype = self.spec.dtype
        return dequantise(keys, dtype, self.k_scale), dequantise(values, dtype, self.v_scale)

    def _attend(
        self,
        query: torch.Tensor,  # [B, query_len, num_qo_heads, head_dim]
        key: torch.Tensor,  # [B, num_keys, num_kv_heads, head_dim]
        value: torch.Tensor,  # [B, num_keys, num_kv_heads, head_dim_vo]
        bias: torch.Tensor | None,  # [1 | B, Hkv | 1, G | 1, query_len, num_keys]
        is_causal: bool,
        want_lse: bool,
        with_sinks: bool = True,
    ) -> Attended:
        if bias is not None and not _can_add(bias, query):
            wide = bias.dtype
            attended = self._attend(query.to(wide), key.to(wide), value.to(wide), bias, is_causal, want_lse, with_sinks)
            return Attended(attended.output.to(query.dtype), attended.lse)
        spec = self.spec
        sinks = self.sinks if with_sinks else None
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        alone = query.shape[1] == 1
        # Queries that differ in nothing but their vectors can be one KV head's: no key is read twice.
        together = alone or (bias is None and not is_causal)
        wants_sum = want_lse or sinks is not None
        if spec.logits_soft_cap is not None or (wants_sum and not (together and _gives_lse(query.device, spec))):
            heads = query.reshape(*query.shape[:2], spec.num_kv_heads, spec.group_size, -1).permute(0, 2, 3, 1, 4)
            return _attend_by_hand(heads, key, value, bias, is_causal, spec, sinks)
        if together:
            heads = query.unflatten(2, (spec.num_kv_heads, -1)).transpose(1, 2).flatten(2, 3)  # [B, Hkv, len · G, D]
            mask = None if bias is None else bias[:, :, :, 0]
            if not wants_sum:
                return _unfolded(F.scaled_dot_product_attention(heads, key, value, mask, scale=spec.scale), None, query)
            out, lse = _flash(heads, key, value, attn_mask=mask, scale=spec.scale)
            return _with_sinks(_unfolded(out, lse, query), sinks)
        mask = None if bias is None else bias.flatten(1, 2)  # [B, Hq | 1, query_len, num_keys]
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, mask, is_causal=is_causal, scale=spec.scale,
            enable_gqa=spec.group_size > 1,
        )  # fmt: skip
        return Attended(out.transpose(1, 2), None)


@dataclass(frozen=True)
class Attended:
    """An attention result, by [B, query_len] or flat over tokens."""

    output: torch.Tensor  # [..., num_qo_heads, head_dim_vo]
    lse: torch.Tensor | None  # [..., num_qo_heads] f32 or f64

    def flat(self) -> Attended:
        return Attended(self.output.flatten(0, 1), None if self.lse is None else self.lse.flatten(0, 1))

    def of(self, live: torch.Tensor | None) -> Attended:
        """With nothing in the flat tokens that are not live: they saw no key, and hold NaN. None: all are."""
        if live is None:
            return self
        lse = None if self.lse is None else self.lse.masked_fill(~live[:, None], float("-inf"))
        return Attended(self.output.masked_fill(~live[:, None, None], 0), lse)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # what SDPA runs on a CPU, with its LSE


def _gives_lse(device: torch.device, spec: AttentionSpec) -> bool:
    """Whether a fused kernel returns the LSE too."""
    return device.type == "cpu" and spec.head_dim == spec.head_dim_vo and spec.logits_soft_cap is None


def _can_add(bias: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether fused kernels add such a bias to logits of such queries: a GPU's want both to have one dtype."""
    return bias.dtype == query.dtype or query.device.type == "cpu"


def _unfolded(out: torch.Tensor, lse: torch.Tensor | None, query: torch.Tensor) -> Attended:
    """[B, Hkv, query_len · G, Dv] and [B, Hkv, query_len · G], by query token and head."""
    batch, query_len, num_heads = query.shape[:3]
    out = out.unflatten(2, (query_len, -1)).transpose(1, 2).reshape(batch, query_len, num_heads, -1)
    if lse is not None:
        lse = lse.unflatten(2, (query_len, -1)).transpose(1, 2).reshape(batch, query_len, num_heads)
    return Attended(out, lse)


def _with_sinks(attended: Attended, sinks: torch.Tensor | None) -> Attended:
    """A sink takes its share of the softmax and gives nothing: outputs shrink by exp(LSE without it - LSE with it)."""
    if sinks is None or attended.lse is None:
        return attended
    lse = torch.logaddexp(attended.lse, sinks.to(attended.lse.dtype))
    return Attended(attended.output * (attended.lse - lse).exp()[..., None].to(attended.output.dtype), lse)


def _attend_by_hand(
    query: torch.Tensor,  # [B, Hkv, G, query_len, D]
    key: torch.Tensor,  # [B, Hkv, num_keys, D]
    value: torch.Tensor,  # [B, Hkv, num_keys, Dv]
    bias: torch.Tensor | None,
    is_causal: bool,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,  # [Hq]
) -> Attended:
    """Attention as in "Attention Is All You Need", eq. 1, with soft cap, bias, sinks and LSE; in float32 or wider."""
    work = torch.promote_types(query.dtype, torch.float32)
    logits = torch.matmul(query.to(work), key.to(work).mT[:, :, None]) * spec.scale  # [B, Hkv, G, query_len, num_keys]
    if spec.logits_soft_cap is not None:
        logits = torch.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
    if bias is not None:
        logits = logits + bias
    if is_causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    lse = logits.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(work).view(spec.num_kv_heads, spec.group_size, 1))
    out = torch.matmul((logits - lse[..., None]).exp(), value.to(work)[:, :, None])
    return Attended(out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype), lse.permute(0, 3, 1, 2).flatten(2, 3))


def _merge(attended: Attended, shared: Attended | None, tokens: slice) -> Attended:
    """Join attention over two disjoint sets of keys: each output weighs exp(its LSE)."""
    if shared is None or shared.lse is None or attended.lse is None:
        return attended
    shared_out, shared_lse = shared.output[0, tokens], shared.lse[0, tokens]
    lse = torch.logaddexp(attended.lse, shared_lse)
    own, other = (attended.lse - lse).exp()[..., None], (shared_lse - lse).exp()[..., None]
    return Attended((attended.output * own + shared_out * other).to(attended.output.dtype), lse)

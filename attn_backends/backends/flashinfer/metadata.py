"""A batch as FlashInfer's kernels take it: rows by kind, as CSR on the device and as lengths on the host.

Rows of one query token at the front are decoded; all others are prefilled, whatever their lengths (chunks of prompts,
verified drafts). A plan needs lengths on the host: metadata has both. Captured kernels read the slots, and
the CSRs of the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attn_backends.backends.flashinfer.library import WrapperTensors
from attn_backends.backends.flashinfer.options import FlashInferOptions
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.csr import PagedCsr, csr_of
from attn_backends.batch.order import SwappableRows, leading_decodes, reorder_batch_to_split_decodes_and_prefills
from attn_backends.batch.page_table import IntArray, starts_of
from attn_backends.batch.views import prefix_to_share
from attn_backends.graphs.inputs import GraphInputs
from attn_backends.interface import AttentionMetadata, AttentionMetadataBuilder
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, PlanGroup
from attn_backends.step.buffers import StepBuffers

# A shared prefix is attended once for all rows if that saves reading this many bytes: see benchmarks/rules/cascade.py.
CASCADE_MIN_BYTES = 192 << 20


@dataclass(frozen=True)
class Rows:
    """Rows that one kernel attends: `num_tokens` query tokens over pages, or over keys of this step."""

    num_tokens: int
    qo_indptr: torch.Tensor  # [R + 1] i32: which query tokens are whose, from 0 on
    qo_indptr_cpu: torch.Tensor  # [R + 1] i32
    csr: PagedCsr | None  # the pages; None: keys are this step's own, by kv_indptr
    kv_indptr: torch.Tensor  # [R + 1] i32, of pages, or of this step's keys
    kv_indptr_cpu: torch.Tensor  # [R + 1] i32
    kv_lens_cpu: torch.Tensor  # [R] i32, keys of each row in those pages
    max_kv_len: int  # an upper bound of these
    num_rows: int  # R
    some_may_lack_keys: bool = False  # padding, and rows of cross attention

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr_cpu.numpy()[-1])


@dataclass(frozen=True)
class FlashInferMetadata(AttentionMetadata):
    """Rows of one step, decodes first."""

    decode: Rows | None  # one query token each
    prefill: Rows | None
    prefix: Rows | None  # the shared prefix as one row, its queries the tokens of all decode rows

    def decode_fields(self) -> dict[str, Any]:
        return {"prefill": None}

    def prefill_fields(self) -> dict[str, Any]:
        return {"decode": None, "prefix": None}


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Plans need exact lengths on the host."""

    needs_exact_lengths = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = self.options or FlashInferOptions()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:
        common = common_attn_metadata
        self.check_batch(common)
        if common.for_graph:
            # All rows are decodes, padding included: a padded row has no keys.
            if not self.can_run_in_cudagraph(common):
                raise ValueError("graphs of FLASHINFER serve attention over cached keys, of rows of equal query "
                                 "lengths, without fixed_split_size: run this batch eager")  # fmt: skip
            rows = _rows(common, _Pages(common, self.group.spec.window_left), 0, common.num_reqs, True)
            is_decode = common.num_tokens == common.num_reqs
            return graph_metadata(self.group.index, common.slot_mapping, rows, is_decode)
        actual = common.num_actual_reqs
        use_cache = not common.is_profile_run and self.group.spec.attention_type is not AttentionType.ENCODER
        num_decodes = leading_decodes(common) if use_cache else 0
        pages = _Pages(common, self.group.spec.window_left) if use_cache else None
        prefix_len = prefix_to_share(common, common_prefix_len, self.group.spec, num_decodes, CASCADE_MIN_BYTES)
        decode = prefill = None
        lacking = self.group.spec.attention_type is AttentionType.CROSS
        if pages is not None and num_decodes:
            own = pages if not prefix_len else pages.without(prefix_len // common.page_size)
            decode = _rows(common, own, 0, num_decodes, lacking)
        if num_decodes < actual:
            fresh = pages is None or self._is_fresh(common, num_decodes)
            prefill = _rows(common, None if fresh else pages, num_decodes, actual, lacking)
        prefix = _prefix_row(common, prefix_len, num_decodes) if prefix_len else None
        kinds: dict[str, Any] = {"decode": decode, "prefill": prefill, "prefix": prefix}
        return FlashInferMetadata.of_batch(common, self.group.index, num_decodes, common_prefix_len=prefix_len, **kinds)

    def reorder_batch(self, batch: SwappableRows, query_lens: Sequence[int]) -> bool:
        """Decodes first: decode kernels read keys once for one query token, and split them."""
        return reorder_batch_to_split_decodes_and_prefills(batch, query_lens)

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Attention over cached keys, of rows of equal query lengths, with splits that FlashInfer may balance."""
        common = common_attn_metadata
        return self.reads_cached_keys(common) and not common.is_mixed and self.options.fixed_split_size is None

    def _is_fresh(self, common: CommonAttentionMetadata, num_decodes: int) -> bool:
        """Whether prefill rows see nothing but what this step brings: read as it came, it need not be gathered."""
        spec, actual = self.group.spec, common.num_actual_reqs
        as_it_came = spec.attention_type is AttentionType.DECODER and spec.cache_dtype is spec.dtype
        brought = common.num_new_kv == common.num_actual_tokens
        return as_it_came and brought and not common.context_lens_cpu.numpy()[num_decodes:actual].any()


def graph_metadata(group_index: int, slot_mapping: torch.Tensor, rows: Rows, is_decode: bool) -> FlashInferMetadata:
    """Metadata whose rows all count as decodes, of one query token or of several."""
    own = {"decode": rows if is_decode else None, "prefill": None if is_decode else rows, "prefix": None}
    return FlashInferMetadata.of_graph(group_index, slot_mapping, rows.num_rows, rows.num_tokens, **own)


class _Pages:
    """A batch's pages as CSR, without those that no query sees; lengths count from each row's first page."""

    def __init__(self, common: CommonAttentionMetadata, window_left: int) -> None:
        self.common = common
        self.csr = common.paged_kv
        self.indptr_cpu = common.paged_kv_indptr_cpu
        self.kv_lens_cpu = common.seq_lens_cpu
        if window_left >= 0:
            visible = common.seq_lens_cpu.numpy() - common.query_lens_cpu.numpy() - window_left
            on_device = (common.seq_lens - common.query_start_loc.diff()).sub_(window_left).clamp_(min=0)
            self._leave_out(np.maximum(visible, 0) // common.page_size, on_device // common.page_size)

    def without(self, num_pages: int) -> _Pages:
        """Without the first pages of every row; those rows have them all."""
        pages = _Pages(self.common, -1)
        used = self.kv_lens_cpu.numpy() > 0
        pages._leave_out(np.where(used, num_pages, 0).astype(np.int32),
                         torch.full_like(self.common.seq_lens, num_pages))  # fmt: skip
        return pages

    def _leave_out(self, first_pages: IntArray, on_device: torch.Tensor) -> None:
        common, page_size = self.common, self.common.page_size
        lens = common.seq_lens_cpu.numpy() - first_pages * page_size
        indptr = starts_of(np.maximum(-(-lens // page_size), 0))
        self.kv_lens_cpu, self.indptr_cpu = torch.from_numpy(lens), torch.from_numpy(indptr)
        table = (common.page_table, common.seq_lens, page_size, int(indptr[-1]), on_device)
        if common.seq_lens.is_cuda:
            from attn_backends.backends.flashinfer.csr_kernel import csr_of as csr_in_one_launch

            self.csr = csr_in_one_launch(*table)
        else:
            self.csr = csr_of(*table)


def _rows(common: CommonAttentionMetadata, pages: _Pages | None, first: int, stop: int, lacking: bool) -> Rows:
    """Rows `first` to `stop` over pages; None: over the keys that the step brings. `lacking`: some may have no keys."""
    starts, starts_cpu = common.query_start_loc, common.query_start_loc_cpu
    csr = None if pages is None else pages.csr
    longest = common.max_seq_len
    if first == 0 and stop == common.num_reqs and pages is not None and csr is not None:  # views take microseconds
        lens, num_tokens = pages.kv_lens_cpu, int(starts_cpu[-1])  # without those that belong to no row
        return Rows(num_tokens, starts, starts_cpu, csr, csr.indptr, pages.indptr_cpu, lens, longest, stop, lacking)
    starts, starts_cpu = starts[first : stop + 1], starts_cpu[first : stop + 1]
    before = int(starts_cpu[0])
    if before:
        starts, starts_cpu = starts - before, starts_cpu - before
    num_tokens, num_rows = int(starts_cpu[-1]), stop - first
    if pages is None or csr is None:
        return Rows(num_tokens, starts, starts_cpu, None, starts, starts_cpu, starts_cpu.diff(), longest, num_rows)
    indptr, indptr_cpu = csr.indptr[first : stop + 1], pages.indptr_cpu[first : stop + 1]
    own = PagedCsr(indptr, csr.indices, csr.last_page_len[first:stop])
    lens = pages.kv_lens_cpu[first:stop]
    return Rows(num_tokens, starts, starts_cpu, own, indptr, indptr_cpu, lens, longest, num_rows, lacking)


def _prefix_row(common: CommonAttentionMetadata, prefix_len: int, num_tokens: int) -> Rows:
    """The shared prefix as one row of all decode rows' tokens. Full pages: what is last in the CSR is the page size."""
    num_pages, device = prefix_len // common.page_size, common.page_table.device
    pair, pages = (torch.tensor([0, end], dtype=torch.int32, device="cpu") for end in (num_tokens, num_pages))
    last = torch.full((1,), common.page_size, dtype=torch.int32, device=device)
    on_device = torch.stack([pair, pages]).to(device, non_blocking=True)
    csr = PagedCsr(on_device[1], common.page_table[0, :num_pages].contiguous(), last)
    lens = torch.tensor([prefix_len], dtype=torch.int32, device="cpu")
    return Rows(num_tokens, on_device[0], pair, csr, on_device[1], pages, lens, prefix_len, 1)


def list_prefix_pages(max_num_requests: int, page_size: int) -> None:
    """The launches that leave pages out of a batch's CSR (see `csr_kernel`)."""
    from attn_backends.backends.flashinfer.csr_kernel import csr_of as csr_in_one_launch
    from attn_backends.kernels.examples import empty, powers_of_two

    for num_rows in powers_of_two(max_num_requests):
        table, lens = empty(num_rows, 2, dtype=torch.int32), empty(num_rows, dtype=torch.int32)
        csr_in_one_launch(table, lens, page_size, 0, lens)


class FlashInferGraphInputs(GraphInputs):
    """What captured kernels read of a batch, and the CSRs that they read its pages by.

    Groups without a window have one CSR, which a step table may have too; those with one have a shorter one each.
    """

    def __init__(self, groups: Sequence[PlanGroup[Any]], cache: KVCacheSpec, limits: Limits, *given: Any) -> None:
        super().__init__(cache, limits, *given)
        device, page_size, shared = self.slot_mapping.device, cache.page_size, self.shared
        self._csrs: dict[int | AttentionType, PagedCsr] = {}  # by `_csr_of`
        if isinstance(shared, StepBuffers) and len(shared.paged_kv_indices):
            self._csrs[-1] = PagedCsr(shared.paged_kv_indptr, shared.paged_kv_indices, shared.paged_kv_last_page_len)
        all_pages = -(-limits.max_model_len // page_size)
        for group in groups:
            window, csr = group.spec.window_left, _csr_of(group.spec)
            # A window begins anywhere in a page: one page more than its keys fill.
            pages = all_pages if window < 0 else min(all_pages, (window + limits.max_num_tokens - 1) // page_size + 2)
            if csr not in self._csrs:
                self._csrs[csr] = PagedCsr(
                    torch.zeros(self.num_rows + 1, dtype=torch.int32, device=device),
                    torch.zeros(self.num_rows * pages, dtype=torch.int32, device=device),
                    torch.zeros(self.num_rows, dtype=torch.int32, device=device),
                )

    def of_group(self, group: PlanGroup[Any], num_rows: int, starts: torch.Tensor) -> WrapperTensors:
        """What graphs of one size read, which has query starts of its own: they never change."""
        csr = self._csrs[_csr_of(group.spec)]
        return WrapperTensors(starts, PagedCsr(csr.indptr[: num_rows + 1], csr.indices, csr.last_page_len[:num_rows]))


def _csr_of(spec: AttentionSpec) -> int | AttentionType:
    """Groups of one name have one CSR: those of one window, and those that read an encoder's pages."""
    return spec.attention_type if spec.attention_type is AttentionType.CROSS else spec.window_left

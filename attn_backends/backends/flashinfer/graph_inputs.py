"""What captured kernels read of a batch: slots, and the CSRs of its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_backends.backends.flashinfer.library import WrapperTensors
from attn_backends.batch.csr import PagedCsr
from attn_backends.graphs.inputs import GraphInputs
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, PlanGroup
from attn_backends.step.buffers import StepBuffers


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
        return WrapperTensors(starts, csr.indptr[: num_rows + 1], csr.indices, csr.last_page_len[:num_rows])


def _csr_of(spec: AttentionSpec) -> int | AttentionType:
    """Groups of one name have one CSR: those of one window, and those that read an encoder's pages."""
    return spec.attention_type if spec.attention_type is AttentionType.CROSS else spec.window_left

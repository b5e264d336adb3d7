"""What captured graphs read of a batch: tensors that every step is copied into, or a step table's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from attn_backends.batch.page_table import PAD_SLOT
from attn_backends.spec import KVCacheSpec, Limits
from attn_backends.step.buffers import StepBuffers


class GraphInputs:
    """Slots, lengths and pages of a batch. All captured sizes share them, as one of them is replayed at a time.

    Own lengths and page tables are allocated when a state asks for them: kernels may read the pages otherwise.

    Args:
        num_rows: rows of the largest graph.
        shared: a step table's tensors, which are read where they are. None: tensors of our own.

    Raises:
        ValueError: the table is elsewhere, or smaller than the graphs.
    """

    def __init__(
        self, cache: KVCacheSpec, limits: Limits, device: torch.device, num_rows: int, shared: StepBuffers | None
    ) -> None:
        self.num_rows = num_rows
        self.shared = shared
        self._num_pages = -(-limits.max_model_len // cache.page_size)
        if shared is None:
            self.slot_mapping = torch.full((limits.max_num_tokens,), PAD_SLOT, dtype=torch.int64, device=device)
            return
        on, rows, tokens = shared.page_table.device, len(shared.seq_lens), len(shared.slot_mapping)
        if on.type != device.type or rows < num_rows or tokens < limits.max_num_tokens:
            raise ValueError(
                f"the step table has {rows} rows and {tokens} tokens on {on}; these graphs need {num_rows} and "
                f"{limits.max_num_tokens} on {device}: make it with the same limits and device"
            )
        self.slot_mapping = shared.slot_mapping

    @cached_property
    def seq_lens(self) -> torch.Tensor:  # [num_rows or more] i32
        if self.shared is not None:
            return self.shared.seq_lens
        return torch.zeros(self.num_rows, dtype=torch.int32, device=self.slot_mapping.device)

    @cached_property
    def page_table(self) -> torch.Tensor:  # [num_rows or more, max_pages] i32
        if self.shared is not None:
            return self.shared.page_table
        return torch.zeros(self.num_rows, self._num_pages, dtype=torch.int32, device=self.slot_mapping.device)

    def serves(self, num_rows: int, shared: StepBuffers | None) -> bool:
        """Whether graphs of so many rows can read these."""
        return num_rows <= self.num_rows and shared is self.shared

    def holds(self, slot_mapping: torch.Tensor) -> bool:
        """Whether a batch with these slots is there already.

        Raises:
            ValueError: graphs read a step table, and the batch is not of it.
        """
        if self.shared is None:
            return False
        if slot_mapping.data_ptr() != self.slot_mapping.data_ptr():
            raise ValueError(
                "these graphs read the tensors of the step table that graph_capture was given, and the batch is not of "
                "that table: make it by the table's step or advance, or leave the table's tensors out of graph_capture"
            )
        return True


def fill_together(buffers: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Copy i32 tensors, and the slots in i64, into equal shapes, in one launch."""
    pairs = zip(buffers, given, strict=True)
    both = [tuple(t.view(torch.int32) if t.dtype is torch.int64 else t for t in pair) for pair in pairs]
    torch._foreach_copy_([to for to, _ in both], [of for _, of in both])

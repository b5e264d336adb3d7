"""What a step table asks of its device, and the CPU's answer: the host's own memory."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from attn_backends.derive import PagedCsr, StepBuffers, StepShape, advance_step, fill_step
from attn_backends.page_rows import PageRows
from attn_backends.page_table import IntArray


class HostStep(NamedTuple):
    """What the host knows of a step. All of it was checked."""

    shape: StepShape
    seq_lens: IntArray  # [R] i32
    query_lens: IntArray  # [R] i32
    token_ids: NDArray[np.int64] | None  # [num_actual_tokens]; None: they are on the device already
    context_lens_on_device: torch.Tensor | None  # [num_actual_reqs] i32: exact, where the host has upper bounds


class DeviceSide(Protocol):
    """Fills `buffers`, in place, with what follows from a step's lengths."""

    buffers: StepBuffers

    def step(self, rows: PageRows, step: HostStep) -> PagedCsr | None:
        """A new step, with all pages that the rows have. Returns views of its CSR, or None: nobody needed it yet."""

    def advance(
        self, rows: PageRows, shape: StepShape, seq_lens: torch.Tensor, num_advanced: int, are_upper_bounds: bool
    ) -> PagedCsr | None:
        """The last step, one token further in every row but padding, with all pages that the rows have now.

        Args:
            seq_lens: [R] i32 on the host, what it now takes for the lengths; exact unless `are_upper_bounds`.
            num_advanced: how often the step was advanced, this time included.
        """


class SharedMemory:
    """On a CPU: the page table is the host's, no page is copied, and the CSR is left to who asks for it."""

    def __init__(self, rows: PageRows) -> None:
        self.buffers = StepBuffers(rows.limits, rows.cache, torch.from_numpy(rows.page_table), with_indices=False)
        self._token_ids: NDArray[np.int64] = self.buffers.token_ids.numpy()
        self._ones = torch.ones(rows.limits.max_num_requests, dtype=torch.int32)

    def step(self, rows: PageRows, step: HostStep) -> None:
        rows.mark_sent()
        seq_lens, query_lens = torch.from_numpy(step.seq_lens), torch.from_numpy(step.query_lens)
        if step.context_lens_on_device is not None:
            actual = step.shape.num_actual_reqs
            seq_lens = torch.nn.functional.pad(
                step.context_lens_on_device + query_lens[:actual], (0, len(seq_lens) - actual)
            )
        if step.token_ids is not None:
            self._token_ids[: len(step.token_ids)] = step.token_ids
            self._token_ids[len(step.token_ids) : step.shape.num_tokens] = 0
        fill_step(self.buffers, step.shape, seq_lens, query_lens)

    def advance(
        self, rows: PageRows, shape: StepShape, seq_lens: torch.Tensor, num_advanced: int, are_upper_bounds: bool
    ) -> None:
        rows.mark_sent()
        advance_step(self.buffers, shape, self._ones)

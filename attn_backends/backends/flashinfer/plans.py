"""One wrapper of FlashInfer and its plans.

A wrapper's public `plan` chooses and loads the kernels, and sets what never changes: scale, soft cap, window, dtypes.
It is called once. From then on lengths alone change, and the C++ scheduler behind it is called with them directly:
what else the public method does in Python takes up to ten times as long as the scheduler itself. Its pinned buffers
come from a ring, as nothing in FlashInfer waits for the copy that reads them. In a CUDA graph of short rows the
schedule is our own (graph_schedule.py), and where it splits no row it is written once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from attn_backends.backends.flashinfer.graph_schedule import GraphSchedule
from attn_backends.backends.flashinfer.library import Library, missing_module
from attn_backends.backends.flashinfer.metadata import Rows
from attn_backends.backends.flashinfer.workspace import Kernels, Need, most_parts, plan_need, tiles_at_once
from attn_backends.batch.page_table import IntArray
from attn_backends.spec import AttentionSpec
from attn_backends.step.staging import HostRing

KeysAndValues = tuple[torch.Tensor, torch.Tensor]

UNEVEN = 2  # the longest row is this many times the mean
MIN_SPLIT = 128  # keys of a part


@dataclass(eq=False)
class Plan:
    """What FlashInfer has planned for the layers of one plan group."""

    library: Library
    wrapper: Any  # FlashInfer's, made for this plan alone
    spec: AttentionSpec  # of those layers. All of it is in the plan but the lengths
    page_size: int  # of the cache; 1 for keys that lie together
    ring: HostRing  # pinned buffers as large as the wrapper's int workspace
    split_size: int | None  # see `FlashInferOptions.fixed_split_size`; in pages of this `page_size`
    in_graph: bool  # the wrapper is for a graph: its tensors stay where they are
    is_planned: bool = field(default=False, init=False)
    number: int = field(default=0, init=False)  # of eager plans so far; a graph's step is of whatever is planned last

    @cached_property
    def _shape(self) -> tuple[int, int, int, bool]:
        return self.spec.num_qo_heads, self.spec.num_kv_heads, self.page_size, self.in_graph

    def __call__(self, rows: Rows) -> None:
        """Plan these rows, reading nothing of the device, unless the last plan serves them too.

        Raises:
            RuntimeError: the kernels are to be compiled and cannot be, which says what is missing; or the step is
                larger than the limits that the workspaces were sized from.
        """
        if self._serves(rows):
            return
        num_splits = None
        if self.split_size is not None:
            num_splits = -(-max(1, rows.max_kv_len) // (self.split_size * self.page_size))
        held, need = self._held(), plan_need(
            self._kernels(), self.spec, rows.num_rows, rows.num_tokens, self.library.num_sms,
            in_graph=self.in_graph, num_splits=num_splits,
        )  # fmt: skip
        if not need.fits(held):
            raise RuntimeError(
                f"a plan of {rows.num_rows} rows and {rows.num_tokens} tokens takes up to {need.float_bytes} and "
                f"{need.int_bytes} bytes, and its workspaces have {held.float_bytes} and {held.int_bytes}: raise "
                "max_num_requests and max_num_tokens of the limits"
            )
        self.number += not self.in_graph
        pinned = self.ring.next_host()
        if self.is_planned:
            self._plan_lengths(rows, pinned)
        else:
            self.wrapper._pin_memory_int_workspace_buffer = pinned.view(torch.uint8)
            with missing_module(self.spec):
                self._plan_all(rows)
            self.is_planned = True
        self.ring.sent()

    def _serves(self, rows: Rows) -> bool:
        """Whether what is planned is what these rows would be planned as."""
        return False

    def _held(self) -> Need:
        """Bytes of the workspaces, of which that for integers is there on the host as well."""
        wrapper = self.wrapper
        ints = wrapper._int_workspace_buffer.numel() * wrapper._int_workspace_buffer.itemsize
        floats = wrapper._float_workspace_buffer.numel() * wrapper._float_workspace_buffer.itemsize
        return Need(floats, min(ints, self.ring.hosts_cpu[0].numel() * 4))

    def _kernels(self) -> Kernels:
        return "fa3" if self.wrapper._backend == "fa3" else "fa2"

    def run(
        self,
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
        keys_and_values: KeysAndValues,
        output: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim_vo], contiguous
        lse: torch.Tensor | None,  # [num_tokens, num_qo_heads] f32, base 2
        scales: dict[str, float],  # k_scale, v_scale where they are not 1
    ) -> None:
        self.wrapper.run(query, keys_and_values, out=output, lse=lse, return_lse=lse is not None, **scales)

    def _plan_all(self, rows: Rows) -> None:
        raise NotImplementedError

    def _plan_lengths(self, rows: Rows, pinned: torch.Tensor) -> None:
        raise NotImplementedError

    def _constants(self) -> dict[str, Any]:
        """What every public `plan` takes, by keyword."""
        spec = self.spec
        split = {} if self.split_size is None else {"fixed_split_size": self.split_size}
        encoding: dict[str, Any] = {}
        if spec.alibi_slopes is not None:
            encoding = {"pos_encoding_mode": "ALIBI"}
        elif spec.pos_encoding_mode != "NONE":
            encoding = {"pos_encoding_mode": spec.pos_encoding_mode, "rope_scale": spec.rope_scale,
                        "rope_theta": spec.rope_theta}  # fmt: skip
        return encoding | {
            "window_left": spec.window_left, "logits_soft_cap": spec.logits_soft_cap, "sm_scale": spec.scale,
            "q_data_type": spec.dtype, "kv_data_type": spec.cache_dtype, **split,
        }  # fmt: skip

    def _schedule(self, *arguments: Any) -> None:
        """Call the scheduler behind the wrapper; the workspaces come first."""
        wrapper = self.wrapper
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, *arguments
        )

    def _schedule_tiles(self, rows: Rows, pinned: torch.Tensor, causal: bool, split_size: int | None = None) -> None:
        """The scheduler of fa2 and fa3."""
        spec = self.spec
        split_size = self.split_size or split_size
        splits = self.library.split_arguments(split_size) if self.wrapper._backend == "fa2" else ()
        self._schedule(
            pinned, rows.qo_indptr_cpu, rows.kv_indptr_cpu, rows.kv_lens_cpu, rows.num_tokens, rows.num_rows,
            *self._shape, spec.head_dim, spec.head_dim_vo, causal, spec.window_left, *splits,
        )  # fmt: skip

    def _point_at(self, rows: Rows) -> None:
        """Without a graph, kernels read the step's own tensors; with one, the state has filled its persistent ones."""
        wrapper, csr = self.wrapper, rows.csr
        if self.in_graph or csr is None:
            return
        wrapper._qo_indptr_buf = rows.qo_indptr
        wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = csr.indptr, csr.indices
        wrapper._paged_kv_last_page_len_buf = csr.last_page_len

    def _pages(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pages as the public `plan` takes them: what it would read of them on the host is there."""
        lens = rows.kv_lens_cpu
        last_page_len = torch.where(lens > 0, (lens - 1) % self.page_size + 1, 0).to(torch.int32)
        assert rows.csr is not None
        return rows.kv_indptr_cpu, rows.csr.indices[: rows.num_pages], last_page_len


class DecodePlan(Plan):
    """Rows of one query token."""

    def _kernels(self) -> Kernels:
        return super()._kernels() if self.wrapper.use_tensor_cores else "cuda_cores"

    def _plan_all(self, rows: Rows) -> None:
        spec = self.spec
        self.wrapper.plan(
            *self._pages(rows), spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, self.page_size,
            **self._constants(),
        )  # fmt: skip
        self._point_at(rows)

    def _plan_lengths(self, rows: Rows, pinned: torch.Tensor) -> None:
        self._point_at(rows)
        if self.wrapper.use_tensor_cores:
            self._schedule_tiles(rows, pinned, causal=False, split_size=self._split_of_uneven(rows))
            return
        spec = self.spec
        self._schedule(
            pinned, rows.kv_indptr_cpu, rows.num_rows, *self._shape, spec.window_left, spec.logits_soft_cap or 0.0,
            spec.head_dim, spec.head_dim_vo,
            *(torch.empty(0, dtype=dtype, device="cpu") for dtype in (spec.dtype, spec.cache_dtype)),
        )  # fmt: skip

    def _split_of_uneven(self, rows: Rows) -> int | None:
        """Pages of a part, where a few rows are much longer than most and FlashInfer would split none.

        It splits rows while they do not fill the GPU, and otherwise leaves each to one block, however long. Its grid
        has room for some more: the smallest parts that fit it, and the workspace, are taken. None: as FlashInfer finds
        best.
        """
        spec, num_rows = self.spec, rows.num_rows
        if num_rows <= tiles_at_once(spec, self.library.num_sms) or spec.window_left >= 0:
            return None
        if -(-rows.max_kv_len // self.page_size) * num_rows < UNEVEN * rows.num_pages:  # as most batches are
            return None
        pages = np.diff(rows.kv_indptr_cpu.numpy())
        most = most_parts(spec, num_rows, self.library.num_sms, self._held().float_bytes)
        longest, room = int(pages.max()), most - num_rows
        if longest * num_rows < UNEVEN * int(pages.sum()) or room < 1:
            return None
        low, high = -(-MIN_SPLIT // self.page_size), longest
        while low < high:
            middle = (low + high) // 2
            num_splits = int(np.maximum((pages + (middle - 1)) // middle - 1, 0).sum())  # more than one a row
            low, high = (middle + 1, high) if num_splits > room else (low, middle)
        return low if low < longest else None


@dataclass(eq=False)
class PrefillPlan(Plan):
    """Rows of any number of query tokens over pages."""

    causal: bool  # not for a shared prefix, which all tokens see
    graph_schedule: GraphSchedule | None = field(default=None, init=False)  # of smaller tiles than FlashInfer's
    _planned_starts: IntArray | None = field(default=None, init=False)  # [R + 1] of queries; None: lengths matter too

    def _serves(self, rows: Rows) -> bool:
        return self._planned_starts is not None and np.array_equal(self._planned_starts, rows.qo_indptr_cpu.numpy())

    def _plan_all(self, rows: Rows) -> None:
        spec = self.spec
        self.wrapper.plan(
            rows.qo_indptr_cpu, *self._pages(rows), spec.num_qo_heads, spec.num_kv_heads, spec.head_dim,
            self.page_size, head_dim_vo=spec.head_dim_vo, causal=self.causal, **self._constants(),
        )  # fmt: skip
        self._point_at(rows)
        if self.in_graph:
            replacing = (self.wrapper._plan_info, rows, spec, self.page_size, self.library.num_sms)
            self.graph_schedule = GraphSchedule.replacing(*replacing)
        if self.graph_schedule is not None:
            self.wrapper._plan_info = list(self.graph_schedule.layout)
            self.ring.sent()  # what FlashInfer has planned; the copy of the next buffer comes behind it
            self._plan_lengths(rows, self.ring.next_host())

    def _plan_lengths(self, rows: Rows, pinned: torch.Tensor) -> None:
        self._point_at(rows)
        self.wrapper._qo_indptr_last, self.wrapper._batch_size = rows.num_tokens, rows.num_rows
        if self.graph_schedule is None:
            self._schedule_tiles(rows, pinned, self.causal)
        else:
            self.graph_schedule.fill(pinned.numpy(), rows)
            self._arrays.copy_(pinned.view(torch.uint8)[self.graph_schedule.layout.arrays], non_blocking=True)
            if not self.graph_schedule.splits:
                self._planned_starts = rows.qo_indptr_cpu.numpy().copy()

    @cached_property
    def _arrays(self) -> torch.Tensor:
        """The schedule's own part of the int workspace, of which a graph has one for good. [bytes] u8"""
        assert self.graph_schedule is not None
        ints: torch.Tensor = self.wrapper._int_workspace_buffer
        return ints.view(torch.uint8)[self.graph_schedule.layout.arrays]


class RaggedPlan(Plan):
    """Rows over keys of this step, which are as the model made them: no cache, no scales."""

    def _plan_all(self, rows: Rows) -> None:
        spec = self.spec
        self.wrapper.plan(
            rows.qo_indptr_cpu, rows.kv_indptr_cpu, spec.num_qo_heads, spec.num_kv_heads, spec.head_dim,
            head_dim_vo=spec.head_dim_vo, causal=spec.causal, **(self._constants() | {"kv_data_type": spec.dtype}),
        )  # fmt: skip

    def _plan_lengths(self, rows: Rows, pinned: torch.Tensor) -> None:
        wrapper = self.wrapper
        wrapper._qo_indptr_buf = wrapper._o_indptr_buf = rows.qo_indptr
        wrapper._kv_indptr_buf = wrapper._v_indptr_buf = rows.kv_indptr
        wrapper._qo_indptr_last = rows.num_tokens
        self._schedule_tiles(rows, pinned, self.spec.causal)

    def run(
        self, query: torch.Tensor, keys_and_values: KeysAndValues, output: torch.Tensor, lse: torch.Tensor | None,
        scales: dict[str, float],
    ) -> None:  # fmt: skip
        self.wrapper.run(query, *keys_and_values, out=output, lse=lse, return_lse=lse is not None)

"""A batch whose tensors an engine has already: checked, and the rest worked out on the host. The device is not read.

Engines pad. Rows of zero tokens leave the batch here, wherever they stand, so that no builder meets them; tokens that
belong to no row stay, behind the others. Every device tensor is a view, but for the rows' where one of zero tokens
stands between others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from attn_backends.batch.page_table import PAD_SLOT, IntArray


@dataclass(frozen=True, eq=False)
class BatchTensors:
    """What an engine hands over: `CommonAttentionMetadata.from_tensors` has each by name.

    Raises:
        ValueError: a tensor has another shape or dtype, or host and device disagree in the number of rows.
    """

    page_size: int
    query_start_loc: torch.Tensor  # [R + 1] i32
    query_start_loc_cpu: torch.Tensor  # [R + 1]
    seq_lens: torch.Tensor  # [R] i32
    seq_lens_cpu: torch.Tensor  # [R]
    page_table: torch.Tensor  # [R, max_pages] i32
    slot_mapping: torch.Tensor | None  # [T or more] i64
    context_lens_cpu: torch.Tensor | None  # [R]

    def __post_init__(self) -> None:
        rows = len(self.seq_lens)
        for name, tensor, shape, dtype in (
            ("query_start_loc", self.query_start_loc, (rows + 1,), torch.int32),
            ("query_start_loc_cpu", self.query_start_loc_cpu, (rows + 1,), None),
            ("seq_lens", self.seq_lens, (rows,), torch.int32),
            ("seq_lens_cpu", self.seq_lens_cpu, (rows,), None),
            ("page_table", self.page_table, (rows, *self.page_table.shape[1:2]), torch.int32),
        ):
            if tensor.shape != shape or dtype not in (None, tensor.dtype):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} in {tensor.dtype}; a batch of {rows} rows needs {shape}"
                    f"{'' if dtype is None else f' in {dtype}'}"
                )
        if self.page_table.shape[1] > 1 and self.page_table.stride(1) != 1:
            raise ValueError(
                f"page_table has strides {self.page_table.stride()}; a row's pages must lie together (a last stride of "
                "1): pass page_table.contiguous()"
            )
        for name in ("query_start_loc_cpu", "seq_lens_cpu", "context_lens_cpu"):
            if (given := getattr(self, name)) is not None and given.device.type != "cpu":
                raise ValueError(f"{name} is on {given.device}; it is read on the host: pass a tensor that lies there")
        if self.slot_mapping is not None and self.slot_mapping.dtype is not torch.int64:
            raise ValueError(f"slot_mapping is in {self.slot_mapping.dtype}; it must be torch.int64")

    def fields(
        self, num_tokens: int | None, max_query_len: int | None, max_seq_len: int | None, num_actual_reqs: int | None,
        exact: bool, for_graph: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """What `CommonAttentionMetadata` is made of.

        Raises:
            ValueError: no row has tokens, counts do not go together, or a row is longer than its pages.
        """
        # Copies: an engine writes its next step's there.
        starts: IntArray = self.query_start_loc_cpu.numpy().astype(np.int32)
        seq_lens: IntArray = self.seq_lens_cpu.numpy().astype(np.int32)
        query_lens = np.diff(starts)
        live = np.flatnonzero(query_lens).astype(np.int32)
        if query_lens.min(initial=0) < 0 or starts[0] or not len(live) or seq_lens.min(initial=0) < 0:
            raise ValueError(
                f"query_start_loc_cpu is {starts[:8].tolist()}… and seq_lens_cpu {seq_lens[:8].tolist()}…: starts "
                "begin at 0 and never fall, some row has tokens, and no length is negative"
            )
        tokens = int(starts[-1]) if num_tokens is None else num_tokens
        actual = int(live[-1]) + 1 if num_actual_reqs is None else num_actual_reqs
        self._check_counts(starts, query_lens, seq_lens, tokens, actual)
        contexts = self._contexts(query_lens, seq_lens)
        longest = int(query_lens.max()) if max_query_len is None else max_query_len
        shared = {
            "page_size": self.page_size,
            "num_tokens": tokens,
            "num_actual_tokens": int(starts[-1]),
            "max_seq_len": int(seq_lens.max()) if max_seq_len is None else max_seq_len,
            "is_profile_run": False,
            "seq_lens_are_upper_bounds": not exact,
            "for_graph": for_graph,
        }
        if for_graph:
            return {**shared, **self._padded(starts, seq_lens, contexts, tokens, actual)}
        return {**shared, "max_query_len": longest, **self._live(live, starts, seq_lens, contexts)}

    def _check_counts(
        self, starts: IntArray, query_lens: IntArray, seq_lens: IntArray, tokens: int, actual: int
    ) -> None:
        rows = len(seq_lens)
        if tokens < starts[-1] or not 0 < actual <= rows or query_lens[actual:].any():
            raise ValueError(
                f"{tokens} tokens and {actual} actual rows for {rows} rows of {starts[-1]} tokens: there are as many "
                "tokens as the rows have, or more, and rows behind the actual ones have none"
            )
        capacity = self.page_table.shape[1] * self.page_size
        for row in np.flatnonzero((seq_lens > capacity) & (query_lens > 0)).tolist():
            raise ValueError(
                f"row {row} has {seq_lens[row]} keys, and page_table holds {self.page_table.shape[1]} pages of "
                f"{self.page_size} slots a row: pass a table that is wide enough"
            )
        if self.slot_mapping is not None and len(self.slot_mapping) < starts[-1]:
            raise ValueError(f"slot_mapping has {len(self.slot_mapping)} slots for {starts[-1]} tokens")

    def _contexts(self, query_lens: IntArray, seq_lens: IntArray) -> IntArray:
        if self.context_lens_cpu is not None:
            return self.context_lens_cpu.numpy().astype(np.int32)
        for row in np.flatnonzero((seq_lens < query_lens) & (query_lens > 0)).tolist():
            raise ValueError(
                f"row {row} has {query_lens[row]} query tokens and {seq_lens[row]} keys: seq_lens counts this step's "
                "tokens too. For cross attention pass context_lens_cpu"
            )
        contexts: IntArray = np.maximum(seq_lens - query_lens, 0)
        return contexts

    def _live(self, live: IntArray, starts: IntArray, seq_lens: IntArray, contexts: IntArray) -> dict[str, Any]:
        """The rows that have tokens."""
        num_rows, last = len(live), int(live[-1]) + 1
        query_start_loc, lens, table = self.query_start_loc[: last + 1], self.seq_lens[:last], self.page_table[:last]
        if num_rows < last:  # rows between others
            starts, seq_lens, contexts = starts[[*live, last]], seq_lens[live], contexts[live]
            chosen = torch.from_numpy(live).to(table.device, non_blocking=True)
            lens, table = lens[chosen], table[chosen]
            query_start_loc = torch.cat([query_start_loc[chosen], query_start_loc[-1:]])
        starts = starts[: num_rows + 1]
        return {
            "num_reqs": num_rows,
            "num_actual_reqs": num_rows,
            "query_start_loc": query_start_loc,
            "seq_lens": lens,
            "page_table": table,
            **self._on_host(starts, seq_lens[:num_rows], contexts[:num_rows]),
            **self._new_kv(starts, int(starts[-1]), int(starts[-1])),
        }

    def _padded(
        self, starts: IntArray, seq_lens: IntArray, contexts: IntArray, tokens: int, actual: int
    ) -> dict[str, Any]:
        """All rows, each of T // R tokens, those of padding too."""
        num_rows = len(seq_lens)
        query_len = tokens // num_rows
        if query_len * num_rows != tokens or (np.diff(starts)[:actual] != query_len).any():
            raise ValueError(
                f"a graph's batch has rows of equal lengths, and this one has {tokens} tokens for {num_rows} rows of "
                f"{np.diff(starts)[:8].tolist()}…: pad it to the captured size, or leave for_graph out"
            )
        own = np.arange(num_rows + 1, dtype=np.int32) * query_len
        return {
            "num_reqs": num_rows,
            "num_actual_reqs": actual,
            "max_query_len": query_len,
            "query_start_loc": _equal_starts(num_rows, query_len, self.seq_lens.device),
            "seq_lens": self.seq_lens,
            "page_table": self.page_table,
            **self._on_host(own, seq_lens, contexts),
            **self._new_kv(np.minimum(own, starts[-1]), int(starts[-1]), tokens, tokens),
        }

    @staticmethod
    def _on_host(starts: IntArray, seq_lens: IntArray, contexts: IntArray) -> dict[str, torch.Tensor]:
        arrays = {"query_start_loc_cpu": starts, "seq_lens_cpu": seq_lens, "context_lens_cpu": contexts}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _new_kv(self, starts: IntArray, num_new: int, num_slots: int, padding: int = 0) -> dict[str, Any]:
        """What the step brings to the cache: nothing where the engine writes. Slots of no row's tokens are left out,
        but a graph's tokens have theirs."""
        if self.slot_mapping is None:
            return {
                "slot_mapping": _no_slots(padding, self.seq_lens.device),
                "num_new_kv": 0,
                "new_kv_start_loc_cpu": torch.zeros(len(starts), dtype=torch.int32),
            }
        return {
            "slot_mapping": self.slot_mapping[:num_slots],
            "num_new_kv": num_new,
            "new_kv_start_loc_cpu": torch.from_numpy(starts),
        }


@lru_cache(maxsize=256)
def _equal_starts(num_rows: int, query_len: int, device: torch.device) -> torch.Tensor:
    """[num_rows + 1] i32, a constant that steps share."""
    return torch.arange(num_rows + 1, dtype=torch.int32, device=device) * query_len


@lru_cache(maxsize=256)
def _no_slots(num_tokens: int, device: torch.device) -> torch.Tensor:
    """[num_tokens] i64 of padding, a constant that steps share."""
    return torch.full((num_tokens,), PAD_SLOT, dtype=torch.int64, device=device)

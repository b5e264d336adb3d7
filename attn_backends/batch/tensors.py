"""A batch whose tensors an engine has already: checked, and the rest worked out on the host. The device is not read.

Engines pad. Rows of zero tokens leave the batch here, wherever they stand, so that no builder meets them; tokens that
belong to no row stay, behind the others. Every device tensor is a view, but for the rows' where one of zero tokens
stands between others.

It runs in every step, before anything is launched, so that numpy is called no more often than a right batch needs; what
is wrong with another is found out by `refuse`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from attn_backends.batch.page_table import PAD_SLOT, IntArray


class LensOnHost(NamedTuple):
    """What a batch's host tensors hold, copied: an engine writes its next step's there."""

    starts: IntArray  # [R + 1]
    seq_lens: IntArray  # [R]
    query_lens: IntArray  # [R]
    context_lens: IntArray  # [R]


@dataclass(frozen=True, eq=False)
class BatchTensors:
    """What an engine hands over: `CommonAttentionMetadata.from_tensors` has each by name."""

    page_size: int
    query_start_loc: torch.Tensor  # [R + 1] i32
    query_start_loc_cpu: torch.Tensor  # [R + 1]
    seq_lens: torch.Tensor  # [R] i32
    seq_lens_cpu: torch.Tensor  # [R]
    page_table: torch.Tensor  # [R, max_pages] i32
    slot_mapping: torch.Tensor | None  # [T or more] i64
    context_lens_cpu: torch.Tensor | None  # [R]

    def fields(
        self, num_tokens: int | None, max_query_len: int | None, max_seq_len: int | None, num_actual_reqs: int | None,
        exact: bool, for_graph: bool, is_mixed: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """What `CommonAttentionMetadata` is made of.

        Raises:
            TypeError: what must be a tensor is none.
            ValueError: a tensor has another shape or dtype, no row has tokens, counts do not go together, or a row is
                longer than its pages.
        """
        num_rows = self._num_rows()
        lens = self._on_host()
        longest, shortest = (int(each) for each in (lens.query_lens.max(), lens.query_lens.min()))
        live: IntArray | None = None if shortest > 0 else np.flatnonzero(lens.query_lens).astype(np.int32)
        last = num_rows if live is None or not len(live) else int(live[-1]) + 1
        num_new = int(lens.starts[-1])
        tokens = num_new if num_tokens is None else num_tokens
        actual = last if num_actual_reqs is None else num_actual_reqs
        most_keys = int((lens.seq_lens if live is None or not len(live) else lens.seq_lens[live]).max())
        table_keys = self.page_table.shape[1] * self.page_size
        if (
            shortest < 0 or longest < 1 or lens.starts[0] or int(lens.context_lens.min()) < 0 or most_keys > table_keys
            or not num_new <= tokens or not last <= actual <= num_rows
            or (self.slot_mapping is not None and len(self.slot_mapping) < num_new)
        ):  # fmt: skip
            self._refuse_counts(lens, tokens, actual)
            lens = lens._replace(context_lens=np.maximum(lens.context_lens, 0))
        _check_bounds(max_query_len, longest, max_seq_len, most_keys)
        shared = {
            "page_size": self.page_size,
            "num_tokens": tokens,
            "num_actual_tokens": num_new,
            "max_seq_len": most_keys if max_seq_len is None else max_seq_len,
            "is_profile_run": False,
            "seq_lens_are_upper_bounds": not exact,
            "for_graph": for_graph,
            "is_mixed": for_graph and is_mixed,
        }
        if for_graph:
            padded = {**shared, "max_query_len": longest, **self._all_rows(lens, tokens, actual)}
            return padded if is_mixed else {**padded, **self._equal_rows(lens, tokens, actual)}
        longest = longest if max_query_len is None else max_query_len
        return {**shared, "max_query_len": longest, **self._live(lens, live, last)}

    def _num_rows(self) -> int:
        """R, once all are tensors of the right shapes and dtypes, in the right place."""
        try:
            num_rows = len(self.seq_lens)
            if self._have_right_forms(num_rows):
                return num_rows
        except (AttributeError, TypeError):  # some is no tensor, or one without dimensions
            num_rows = 0
        self._refuse_forms(num_rows)

    def _on_host(self) -> LensOnHost:
        starts: IntArray = self.query_start_loc_cpu.numpy().astype(np.int32)
        seq_lens: IntArray = self.seq_lens_cpu.numpy().astype(np.int32)
        query_lens: IntArray = starts[1:] - starts[:-1]
        given = self.context_lens_cpu
        contexts = seq_lens - query_lens if given is None else given.numpy().astype(np.int32)
        return LensOnHost(starts, seq_lens, query_lens, contexts)

    def _live(self, lens: LensOnHost, live: IntArray | None, last: int) -> dict[str, Any]:
        """The rows that have tokens: all (`live` is None), or these, up to row `last`."""
        starts, seq_lens, contexts = lens.starts, lens.seq_lens, lens.context_lens
        query_start_loc, on_device, table = self.query_start_loc, self.seq_lens, self.page_table
        num_rows = last if live is None else len(live)
        if last < len(seq_lens):
            query_start_loc, on_device, table = query_start_loc[: last + 1], on_device[:last], table[:last]
        if live is not None and num_rows < last:  # rows between others
            starts, seq_lens, contexts = starts[[*live, last]], seq_lens[live], contexts[live]
            chosen = torch.from_numpy(live).to(table.device, non_blocking=True)
            on_device, table = on_device[chosen], table[chosen]
            query_start_loc = torch.cat([query_start_loc[chosen], query_start_loc[-1:]])
        starts_cpu = torch.from_numpy(starts[: num_rows + 1])
        return {
            "num_reqs": num_rows,
            "num_actual_reqs": num_rows,
            "query_start_loc": query_start_loc,
            "query_start_loc_cpu": starts_cpu,
            "seq_lens": on_device,
            "seq_lens_cpu": torch.from_numpy(seq_lens[:num_rows]),
            "context_lens_cpu": torch.from_numpy(contexts[:num_rows]),
            "page_table": table,
            **self._new_kv(starts_cpu, int(starts[-1]), int(starts[-1]), 0),
        }

    def _all_rows(self, lens: LensOnHost, tokens: int, actual: int) -> dict[str, Any]:
        """All rows as they are, those without tokens too."""
        starts_cpu = torch.from_numpy(lens.starts)
        return {
            "num_reqs": len(lens.seq_lens),
            "num_actual_reqs": actual,
            "query_start_loc": self.query_start_loc,
            "query_start_loc_cpu": starts_cpu,
            "seq_lens": self.seq_lens,
            "seq_lens_cpu": torch.from_numpy(lens.seq_lens),
            "context_lens_cpu": torch.from_numpy(lens.context_lens),
            "page_table": self.page_table,
            **self._new_kv(starts_cpu, int(lens.starts[-1]), tokens, tokens),
        }

    def _equal_rows(self, lens: LensOnHost, tokens: int, actual: int) -> dict[str, Any]:
        """Where rows begin if all have T // R tokens, those of padding too."""
        num_rows = len(lens.seq_lens)
        query_len = tokens // num_rows
        own, own_cpu = _equal_starts(num_rows, query_len, self.seq_lens.device)
        num_new = actual * query_len
        is_uniform = not (lens.query_lens[:actual] != query_len).any()
        if query_len * num_rows != tokens or lens.starts[-1] != num_new or not is_uniform:
            raise ValueError(
                f"a graph's batch has rows of equal lengths, and this one has {tokens} tokens for {num_rows} rows of "
                f"{lens.query_lens[:8].tolist()}…: pad it to the captured size, or leave for_graph out"
            )
        return {"max_query_len": query_len, "query_start_loc": own, "query_start_loc_cpu": own_cpu}

    def _new_kv(self, starts: torch.Tensor, num_new: int, num_slots: int, padding: int) -> dict[str, Any]:
        """What the step brings to the cache: nothing where the engine writes. Slots of no row's tokens are left out,
        but a graph's tokens have theirs."""
        if self.slot_mapping is None:
            none = _no_slots(padding, self.seq_lens.device)
            return {"slot_mapping": none, "num_new_kv": 0, "new_kv_start_loc_cpu": torch.zeros_like(starts)}
        slots = self.slot_mapping if len(self.slot_mapping) == num_slots else self.slot_mapping[:num_slots]
        return {"slot_mapping": slots, "num_new_kv": num_new, "new_kv_start_loc_cpu": starts}

    def _have_right_forms(self, num_rows: int) -> bool:
        table, contexts, slots = self.page_table, self.context_lens_cpu, self.slot_mapping
        return (
            self.query_start_loc.dtype is self.seq_lens.dtype is table.dtype is torch.int32
            and self.query_start_loc.shape == self.query_start_loc_cpu.shape == (num_rows + 1,)
            and self.seq_lens.shape == self.seq_lens_cpu.shape == (num_rows,)
            and table.dim() == 2 and len(table) == num_rows and (table.stride(1) == 1 or table.shape[1] < 2)
            and self.query_start_loc_cpu.is_cpu and self.seq_lens_cpu.is_cpu
            and (contexts is None or (contexts.is_cpu and contexts.shape == (num_rows,)))
            and (slots is None or (slots.dtype is torch.int64 and slots.is_contiguous() and slots.dim() == 1))
            and self.query_start_loc.is_contiguous() and self.seq_lens.is_contiguous()
            and num_rows > 0 and self.page_size > 0
        )  # fmt: skip

    def _refuse_forms(self, rows: int) -> NoReturn:
        """Raise for the first tensor of another shape, dtype or place, or what is no tensor."""
        self._refuse_others()
        for name, shape, dtype in (
            ("query_start_loc", (rows + 1,), torch.int32),
            ("query_start_loc_cpu", (rows + 1,), None),
            ("seq_lens", (rows,), torch.int32),
            ("seq_lens_cpu", (rows,), None),
            ("context_lens_cpu", (rows,), None),
            ("page_table", (rows, self.page_table.shape[1]), torch.int32),
        ):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != shape or dtype not in (None, tensor.dtype):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} in {tensor.dtype}; a batch of {rows} rows needs {shape}"
                    f"{'' if dtype is None else f' in {dtype}'}"
                )
            if name.endswith("_cpu") and not tensor.is_cpu:
                raise ValueError(f"{name} is on {tensor.device}; it is read on the host: pass a tensor that lies there")
        slots = self.slot_mapping
        if slots is not None and (slots.dtype is not torch.int64 or slots.dim() != 1):
            raise ValueError(f"slot_mapping is {[*slots.shape]} in {slots.dtype}; it must be [tokens] of torch.int64")
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(
                    f"{name} has strides {tensor.stride()}; kernels read it as one piece: pass {name}.contiguous()"
                )
        if not rows:
            raise ValueError("the batch is empty: a step needs at least one row, and some row has tokens")
        raise ValueError(
            f"page_table has strides {self.page_table.stride()}; a row's pages must lie together (a last stride of "
            "1): pass page_table.contiguous()"
        )

    def _refuse_others(self) -> None:
        """Raise for what is no tensor, a table of other dimensions, and pages without slots."""
        needed = "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "page_table"
        for name in (*needed, "slot_mapping", "context_lens_cpu"):
            given = getattr(self, name)
            if not isinstance(given, torch.Tensor) and (given is not None or name in needed):
                what = "None" if given is None else f"a {type(given).__module__}.{type(given).__qualname__}"
                raise TypeError(
                    f"{name} is {what.replace('builtins.', '')}; it must be a torch.Tensor: pass one, as "
                    f"torch.as_tensor({name}) makes of a list or a NumPy array"
                )
        for name, dims, text in (("seq_lens", 1, "[rows]"), ("page_table", 2, "[rows, pages a row]")):
            if (tensor := getattr(self, name)).dim() != dims:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimension{'s' * (dims > 1)}, {text}"
                )
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; it must be at least 1, as the pool's is")

    def _refuse_counts(self, lens: LensOnHost, tokens: int, actual: int) -> None:
        """Raise for counts and lengths that do not go together. Rows without tokens may be anything."""
        starts, seq_lens, query_lens, contexts = lens
        if query_lens.min() < 0 or starts[0] or not query_lens.any() or seq_lens[query_lens > 0].min() < 0:
            raise ValueError(
                f"query_start_loc_cpu is {starts[:8].tolist()}… and seq_lens_cpu {seq_lens[:8].tolist()}…: starts "
                "begin at 0 and never fall, some row has tokens, and no length is negative"
            )
        rows, width = len(seq_lens), self.page_table.shape[1]
        if tokens < starts[-1] or not 0 < actual <= rows or query_lens[actual:].any():
            raise ValueError(
                f"{tokens} tokens and {actual} actual rows for {rows} rows of {starts[-1]} tokens: there are as many "
                "tokens as the rows have, or more, and rows behind the actual ones have none"
            )
        for row in np.flatnonzero((seq_lens > width * self.page_size) & (query_lens > 0)).tolist():
            raise ValueError(
                f"row {row} has {seq_lens[row]} keys, and page_table holds {width} pages of {self.page_size} slots a "
                "row: pass a table that is wide enough"
            )
        if self.slot_mapping is not None and len(self.slot_mapping) < starts[-1]:
            raise ValueError(f"slot_mapping has {len(self.slot_mapping)} slots for {starts[-1]} tokens")
        for row in np.flatnonzero((contexts < 0) & (query_lens > 0)).tolist():
            raise ValueError(
                f"row {row} has {query_lens[row]} query tokens and {seq_lens[row]} keys: seq_lens counts this step's "
                "tokens too. For cross attention pass context_lens_cpu"
            )


def _check_bounds(max_query_len: int | None, longest: int, max_seq_len: int | None, most_keys: int) -> None:
    """Bounds that an engine gives are not below what its rows have.

    Raises:
        ValueError: one is.
    """
    for name, bound, most in (("max_query_len", max_query_len, longest), ("max_seq_len", max_seq_len, most_keys)):
        if bound is not None and bound < most:
            raise ValueError(f"{name} is {bound}, and a row has {most}: raise it, or leave it out")


@lru_cache(maxsize=256)
def _equal_starts(num_rows: int, query_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_rows + 1] i32 on the device and on the host, constants that steps share."""
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device="cpu") * query_len
    return starts.to(device), starts


@lru_cache(maxsize=256)
def _no_slots(num_tokens: int, device: torch.device) -> torch.Tensor:
    """[num_tokens] i64 of padding, a constant that steps share."""
    return torch.full((num_tokens,), PAD_SLOT, dtype=torch.int64, device=device)

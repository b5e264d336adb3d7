"""What captured graphs read of a batch: tensors that every step is copied into, or a step table's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from attn_backends.batch.page_table import PAD_SLOT
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits


class GraphTensors(Protocol):
    """A batch's tensors that stay where they are: a step table's, or those of an engine that fills them by itself.

    Query starts are not among them, as all rows of a graph have the same number of tokens. Graphs of mixed batches read
    them where they are too if there is a `query_start_loc` [rows + 1] i32, which never falls; else they have copies.
    """

    @property
    def page_table(self) -> torch.Tensor: ...  # [rows, max_pages] i32

    @property
    def seq_lens(self) -> torch.Tensor: ...  # [rows] i32; 0 for padding

    @property
    def slot_mapping(self) -> torch.Tensor: ...  # [tokens] i64; -1 for padding


@dataclass(frozen=True)
class HeldTensors:
    """`GraphTensors` of an engine, which writes every batch into them."""

    page_table: torch.Tensor  # [rows, max_pages] i32
    seq_lens: torch.Tensor  # [rows] i32
    slot_mapping: torch.Tensor  # [tokens] i64
    query_start_loc: torch.Tensor  # [rows + 1] i32, for graphs of mixed batches

    @staticmethod
    def make(rows: int, tokens: int, max_pages: int, device: torch.device) -> HeldTensors:
        """New ones, all padding."""
        return HeldTensors(
            torch.zeros(rows, max_pages, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.full((tokens,), PAD_SLOT, dtype=torch.int64, device=device),
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
        )


class GraphInputs:
    """Slots, lengths and pages of a batch. All captured sizes share them, as one of them is replayed at a time.

    Own lengths and page tables are allocated when a state asks for them: kernels may read the pages otherwise.

    Args:
        num_rows: rows of the largest graph.
        shared: tensors that are read where they are. None: tensors of our own.

    Raises:
        ValueError: they are elsewhere, or smaller than the graphs.
    """

    def __init__(
        self, cache: KVCacheSpec, limits: Limits, device: torch.device, num_rows: int, shared: GraphTensors | None
    ) -> None:
        self.num_rows = num_rows
        self.shared = shared
        self._made_with = cache, limits, device, num_rows
        self._num_pages = -(-limits.max_model_len // cache.page_size)
        if shared is None:
            self.slot_mapping = torch.full((limits.max_num_tokens,), PAD_SLOT, dtype=torch.int64, device=device)
            return
        on, rows = shared.page_table.device, min(len(shared.seq_lens), len(shared.page_table))
        if on.type != device.type or rows < num_rows:  # `slots` asks for tokens: rows of mixed batches may have none
            raise ValueError(
                f"the tensors that graphs are to read have {rows} rows on {on}; these graphs need {num_rows} on "
                f"{device}: make them with the same limits and device"
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

    @cached_property
    def query_start_loc(self) -> torch.Tensor:  # [num_rows + 1 or more] i32
        """Query starts, which graphs of mixed batches alone read.

        Raises:
            ValueError: the tensor that was given has fewer.
        """
        if self.shared_starts is not None:
            if len(self.shared_starts) <= self.num_rows:
                raise ValueError(
                    f"the query_start_loc that graphs are to read has {len(self.shared_starts)} numbers, and graphs of "
                    f"{self.num_rows} rows need one more than these: pass a longer one"
                )
            return self.shared_starts
        return torch.zeros(self.num_rows + 1, dtype=torch.int32, device=self.slot_mapping.device)

    @property
    def shared_starts(self) -> torch.Tensor | None:
        """The query starts among the tensors that were given."""
        return getattr(self.shared, "query_start_loc", None)

    def of_layers(self, spec: AttentionSpec) -> GraphInputs:
        """What graphs read for such layers. Cross attention has lengths and pages of an encoder, in tensors of its own:
        a step of a model fills both."""
        return self._cross if spec.attention_type is AttentionType.CROSS else self

    @cached_property
    def _cross(self) -> GraphInputs:
        return GraphInputs(*self._made_with, None)

    def slots(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens] i64: the slots of the tokens of a graph.

        Raises:
            ValueError: the tensors that were given have fewer.
        """
        if len(self.slot_mapping) < num_tokens:
            raise ValueError(
                f"the slot_mapping that graphs are to read has {len(self.slot_mapping)} tokens, and this size has "
                f"{num_tokens}: pass one of as many as the largest graph has"
            )
        return self.slot_mapping[:num_tokens]

    def of(self, num_rows: int, num_tokens: int, *, is_mixed: bool = False) -> dict[str, torch.Tensor]:
        """What graphs of one size read of these, by name; those of mixed batches query starts too."""
        return {
            "slot_mapping": self.slots(num_tokens),
            "seq_lens": self.seq_lens[:num_rows],
            "page_table": self.page_table[:num_rows],
            **({"query_start_loc": self.query_start_loc[: num_rows + 1]} if is_mixed else {}),
        }

    def fill(
        self, buffers: dict[str, torch.Tensor], slots: torch.Tensor, lens: torch.Tensor, table: torch.Tensor
    ) -> None:
        """Copy a batch to the tensors of `of`, if it is not there already, in one launch.

        Columns of the page table beyond the batch's own keep ids of earlier batches: lengths say what is valid.
        """
        if self.holds(slots):
            _check_same(("seq_lens", lens, buffers["seq_lens"]), ("page_table", table, buffers["page_table"]))
            return
        held = buffers["page_table"]
        if table.shape[1] != held.shape[1]:
            held = held[:, : table.shape[1]]
            table = table[:, : held.shape[1]]
        fill_together([buffers["slot_mapping"], buffers["seq_lens"], held], [slots, lens, table])

    def fill_starts(self, held: torch.Tensor, starts: torch.Tensor) -> None:
        """Copy query starts [num_rows + 1] to those of `query_start_loc`, if they are not there already."""
        if self.shared_starts is not None:
            _check_same(("query_start_loc", starts, held))
        else:
            held.copy_(starts)

    def lend_pages(self, buffers: dict[str, torch.Tensor]) -> None:
        """Give rows without keys page 0, for kernels that read a page all the same: what a table of our own has there
        may be anything, and a step table's is a page."""
        if self.shared is None:
            buffers["page_table"][:, :1].masked_fill_((buffers["seq_lens"] == 0)[:, None], 0)

    def serves(self, num_rows: int, shared: GraphTensors | None) -> bool:
        """Whether graphs of so many rows can read these."""
        return num_rows <= self.num_rows and shared is self.shared

    def holds(self, slot_mapping: torch.Tensor) -> bool:
        """Whether a batch with these slots is there already.

        Raises:
            ValueError: graphs read tensors that were given, and the batch is not of those.
        """
        if self.shared is None:
            return False
        if slot_mapping.data_ptr() != self.slot_mapping.data_ptr():
            raise ValueError(
                "these graphs read the tensors that graph_capture was given, and the batch is not of that table: make "
                "it by the step table's step or advance, or of views of these very tensors, or give graph_capture "
                "none. An engine that writes keys itself passes these slots too"
            )
        return True


def _check_same(*pairs: tuple[str, torch.Tensor, torch.Tensor]) -> None:
    """A batch whose slots are where graphs read them has the rest there too."""
    for name, given, read in pairs:
        if given.data_ptr() != read.data_ptr():
            raise ValueError(
                f"the batch's slot_mapping is what these graphs read, and its {name} is another tensor: make the batch "
                "of views of all the tensors that graph_capture was given"
            )


def fill_together(buffers: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Copy i32 tensors, and the slots in i64, into equal shapes, in one launch."""
    pairs = zip(buffers, given, strict=True)
    both = [tuple(t.view(torch.int32) if t.dtype is torch.int64 else t for t in pair) for pair in pairs]
    torch._foreach_copy_([to for to, _ in both], [of for _, of in both])

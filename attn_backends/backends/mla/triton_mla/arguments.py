"""The arguments of TRITON_MLA's kernels by name: groups of fields that lie in a kernel's signature in this order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

COMBINE_WARPS = 1
_COMBINED = 64 * 32 * COMBINE_WARPS  # numbers, 64 of a thread
_COLUMNS = 512, 128, 32


class Scales(NamedTuple):
    """What a layer scales."""

    scale: float  # of logits in base 2
    value_scale: float  # of cached values


class TableRow(NamedTuple):
    table_row: int  # elements from row to row of the page table


class DecodeTensors(NamedTuple):
    query: torch.Tensor
    latent_cache: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    page_table: torch.Tensor
    work_items: torch.Tensor
    more_items: torch.Tensor
    partial_acc: torch.Tensor
    partial_ml: torch.Tensor


class Descriptors(NamedTuple):
    """Descriptors of the tensor memory accelerator, or None where rows are loaded by pointers."""

    latent_rows: Any
    rope_rows: Any


class DecodeConstants(NamedTuple):
    WANT_LSE: int
    PAGE_SIZE: int
    QUERY_LEN: int
    HEADS: int
    TILES: int
    BLOCK_M: int
    BLOCK_N: int
    RANK: int
    ROPE: int
    BLOCK_RANK: int
    BLOCK_ROPE: int
    STAGES: int
    EXACT: int
    USE_PDL: bool


class HopperDescriptors(NamedTuple):
    """Descriptors of the tensor memory accelerator. Of 8 bits there is none, and None in place of the first two."""

    queries: Any
    last_rows: Any
    cached: Any


class HopperTensors(NamedTuple):
    query: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    page_table: torch.Tensor
    work_items: torch.Tensor
    more_items: torch.Tensor
    partial_acc: torch.Tensor
    partial_ml: torch.Tensor


class HopperUpcastTensors(NamedTuple):
    """The tensors over a cache of 8 bits, which no descriptor loads."""

    cached: torch.Tensor
    query: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    page_table: torch.Tensor
    work_items: torch.Tensor
    more_items: torch.Tensor
    partial_acc: torch.Tensor
    partial_ml: torch.Tensor


class SlotStep(NamedTuple):
    slot_step: int  # i32 words from slot to slot of a cache of 8 bits


class HopperConstants(NamedTuple):
    WANT_LSE: int
    PAGE_SIZE: int
    TMA_ROWS: int
    QUERY_LEN: int
    HEADS: int
    TILES: int
    UPCAST: bool
    E5M2: bool
    USE_PDL: bool


class CombineTensors(NamedTuple):
    output: torch.Tensor
    lse: torch.Tensor
    work_items: torch.Tensor
    more_items: torch.Tensor
    partial_acc: torch.Tensor
    partial_ml: torch.Tensor


class Spread(NamedTuple):
    spread: int  # programs of a cut


class CombineConstants(NamedTuple):
    value_scale: float
    WANT_LSE: int
    QUERIES: int
    SLOT_QUERIES: int
    RANK: int
    BLOCK_RANK: int
    USE_PDL: bool


class CombineColumns(NamedTuple):
    """What a program that combines splits has of them at a time."""

    NUMBERS: int  # of all that it combines
    WIDEST: int  # columns of a query, of the fewest splits
    WIDE: int  # the same of more splits
    NARROW: int  # the same of many splits

    @staticmethod
    def of(block_rank: int) -> CombineColumns:
        return CombineColumns(_COMBINED, *(min(columns, block_rank) for columns in _COLUMNS))

    def columns(self, num_splits: int) -> int:
        """Columns of a query that are combined at a time, of so many splits."""
        return next((each for each in self[1:] if num_splits * each <= self.NUMBERS), self.NARROW)

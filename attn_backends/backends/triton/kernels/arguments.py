"""The arguments of TRITON's own kernels by name: groups of fields that lie in a kernel's signature in this order.

The groups that decode shares with prefill are in `attn_backends.kernels.prefill.arguments`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class DecodeVarying(NamedTuple):
    table_row: int  # elements from row to row of the page table
    most_short: int  # keys of a row that is attended for at once, at most


class DecodeTensors(NamedTuple):
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    page_table: torch.Tensor
    work_items: torch.Tensor
    more_items: torch.Tensor
    item_pages: torch.Tensor
    partial_acc: torch.Tensor
    partial_ml: torch.Tensor
    counters: torch.Tensor
    slopes: torch.Tensor
    sinks: torch.Tensor


class DecodeConstants(NamedTuple):
    SOFT_CAP: int
    ALIBI: int
    SCALE_FIRST: int
    ALIKE: int
    PAIRS: int
    PAGE_SIZE: int
    LISTED: int
    KV_HEADS: int
    GROUP: int
    TILES: int
    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    DIM_VO: int
    BLOCK_DIM: int
    BLOCK_DIM_VO: int
    LOCAL: int
    MASKED: int
    STAGES: int
    MASKED_STAGES: int
    EXACT: int
    USED_M: int
    JOINED: int
    BLOCK_SPLITS: int
    JOIN_SIZE: int
    WIDE: int
    NARROW: int
    THREADS: int
    SHORT: int
    LONGER: int
    PART: int
    PDL: int


class UpcastFrom(NamedTuple):
    """What is made 16 bits, from these on."""

    first_row: int
    first_head: int


class UpcastTensors(NamedTuple):
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor


class UpcastVarying(NamedTuple):
    first_row: int
    num_rows: int
    table_row: int
    first_head: int


class CacheStrides(NamedTuple):
    key_page: int
    key_slot: int
    key_head: int
    value_page: int
    value_slot: int
    value_head: int


class UpcastConstants(NamedTuple):
    MAX_ROWS: int
    PAGE_SIZE: int
    HEADS: int
    BLOCK_N: int
    DIM: int
    DIM_VO: int
    BLOCK_DIM: int
    BLOCK_DIM_VO: int

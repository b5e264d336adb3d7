"""The arguments of the prefill kernels by name: groups of fields that lie in a kernel's signature in this order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attn_backends.kernels.prefill.tiles import HopperTile


class VisibleRange(NamedTuple):
    """Which keys a query sees, by position."""

    window_right: int  # positions after its own
    window_left: int  # positions before its own
    chunk: int  # positions in a chunk; a query sees its own chunk alone


class Window(NamedTuple):
    """Which keys a query sees, where the chunk is a constant."""

    window_right: int
    window_left: int


class Scales(NamedTuple):
    """What a layer scales."""

    scale: float  # of logits, in base 2 unless a soft cap comes between
    value_scale: float  # of cached values
    soft_cap: float


class UncappedScales(NamedTuple):
    """What a layer without a soft cap scales."""

    scale: float  # of logits in base 2
    value_scale: float


class Flags(NamedTuple):
    has_sinks: int
    want_lse: int


class Strides(NamedTuple):
    """Elements from token to token, head to head, page to page and slot to slot."""

    query_token: int
    query_head: int
    key_page: int
    key_slot: int
    key_head: int
    value_page: int
    value_slot: int
    value_head: int
    out_token: int
    out_head: int
    lse_token: int


class Descriptors(NamedTuple):
    """Descriptors of the tensor memory accelerator, or None where blocks are loaded by pointers."""

    key_desc: Any
    value_desc: Any


class PrefillTensors(NamedTuple):
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    key_start_loc: torch.Tensor
    slopes: torch.Tensor
    sinks: torch.Tensor
    work_items: torch.Tensor
    partial_acc: torch.Tensor
    partial_ml: torch.Tensor


class PrefillRows(NamedTuple):
    """Rows of a prefill, and their tiles."""

    first_row: int  # rows before it are left alone
    num_rows: int  # rows from there on
    num_tiles: int  # of these rows, for one KV head
    section: int  # KV heads whose keys and values fit the L2 cache


class PrefillVarying(NamedTuple):
    first_row: int
    num_rows: int
    num_tiles: int
    section: int
    table_row: int
    table_width: int


class PrefillConstants(NamedTuple):
    SOFT_CAP: int
    ALIBI: int
    SCALE_FIRST: int
    ALIKE: int
    PAGE_SIZE: int
    KV_HEADS: int
    GROUP: int
    BLOCK_M: int
    BLOCK_N: int
    DIM: int
    DIM_VO: int
    BLOCK_DIM: int
    BLOCK_DIM_VO: int
    STAGES: int
    LOCAL: int
    EXACT: int
    SPLIT: int
    ONE_BLOCK: int
    USE_PDL: int


class HopperTensors(NamedTuple):
    query: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    key_start_loc: torch.Tensor
    sinks: torch.Tensor
    counters: torch.Tensor
    work_items: torch.Tensor
    partial_acc: torch.Tensor
    partial_ml: torch.Tensor


class HopperVarying(NamedTuple):
    first_row: int
    num_rows: int
    section: int
    table_row: int
    max_items: int


class HopperSteps(NamedTuple):
    """Where keys and values lie in their descriptors."""

    page_rows: int  # rows from page to page
    head_rows: int  # rows from head to head
    num_batches: int  # of a block's TMA tiles
    key_head: int  # columns from head to head, or heads where the descriptor has them
    value_head: int


class HopperStrides(NamedTuple):
    query_token: int
    query_head: int
    out_token: int
    out_head: int
    lse_token: int


class HopperShape(NamedTuple):
    """What the launch of the kernel for Hopper is told of a layer and its tiles."""

    tile: HopperTile
    page_size: int  # 0: keys lie as they came
    num_kv_heads: int
    group_size: int
    head_dim: int
    head_dim_vo: int
    use_pdl: int
    launch_dependents: int


class HopperConstants(NamedTuple):
    CHUNK: int
    LOCAL: int
    PAGE_SIZE: int
    TMA_ROWS: int
    KV_HEADS: int
    GROUP: int
    BLOCK_N: int
    DIM: int
    DIM_VO: int
    GROUPS: int
    IN_TURNS: int
    K_STAGES: int
    V_STAGES: int
    Q_STAGES: int
    USE_PDL: int
    LAUNCH_DEPENDENTS: int
    SPLIT: int
    RAW_STAGES: int
    E5M2: int


class BlockDims(NamedTuple):
    """Head dims of keys and of values, and the same padded."""

    DIM: int
    DIM_VO: int
    BLOCK_DIM: int
    BLOCK_DIM_VO: int


class ListTensors(NamedTuple):
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    work_items: torch.Tensor
    counters: torch.Tensor


class ListNumbers(NamedTuple):
    """What a list of tiles is made of, beside lengths."""

    first_row: int  # rows before it are left alone
    num_rows: int  # rows from there on
    max_items: int
    num_whole: int  # tiles of the longest rows that are whole, of one KV head
    target: int  # splits of all other tiles and KV heads at most; at least 1
    num_kv_heads: int
    window_right: int
    window_left: int
    chunk: int
    others_tokens: int  # of rows of no more query tokens, which another launch serves
    num_tokens: int
    num_counters: int
    tile_tokens: int  # that a tile has queries of, at most
    tile_queries: int
    group_size: int
    block_keys: int
    min_blocks: int  # of a split at least
    split_keys: int  # of a split at most, times the query heads of a KV head, where tiles are by their own lengths


class ListConstants(NamedTuple):
    BLOCK_ROWS: int
    OWN_ROWS: int
    BLOCK_ITEMS: int
    MIXED: int
    BY_LENGTH: int


class JoinTensors(NamedTuple):
    output: torch.Tensor
    lse: torch.Tensor
    sinks: torch.Tensor
    work_items: torch.Tensor
    partial_acc: torch.Tensor
    partial_ml: torch.Tensor


class JoinSpread(NamedTuple):
    spread: int


class JoinScale(NamedTuple):
    value_scale: float


class JoinStrides(NamedTuple):
    out_token: int
    out_head: int
    lse_token: int


class JoinConstants(NamedTuple):
    KV_HEADS: int
    GROUP: int
    BLOCK_M: int
    DIM_VO: int
    BLOCK_DIM_VO: int
    QUERIES: int
    BLOCK_SPLITS: int
    COLUMNS: int
    PDL: int

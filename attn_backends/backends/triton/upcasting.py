"""When TRITON's prefills have a cache's keys of 8 bits made 16 bits first, and of which rows together.

The kernel for Hopper reads 16 bits sooner than 8: of the latter it makes 16 for each of its tiles. Where pages are no
multiples of 16 slots the portable kernel does, which takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from attn_backends.backends.triton.rules import prefill_splits, split_tile
from attn_backends.backends.triton.tuning import upcast_heads
from attn_backends.batch.page_table import IntArray
from attn_backends.kernels.launch import num_multiprocessors
from attn_backends.kernels.prefill.launch import Rows, num_hopper_tiles, num_visible_keys
from attn_backends.kernels.prefill.split_launch import TileList
from attn_backends.kernels.prefill.split_tiles import SplitTile
from attn_backends.kernels.prefill.splits import PrefillSplits
from attn_backends.spec import AttentionSpec, KVCacheSpec

# In times in which a multiprocessor's tile reads a key by the kernel for Hopper: from what benchmarks/rules/widening.py
# has measured.
_PORTABLE_READ = 1.3  # by the portable kernel from 8 bits, of fewer queries
_READ_OF_8_BITS = {128: 1.5, 64: 1.1}  # by that for Hopper from 8 bits, by the queries of its tiles
_UPCASTING = 2.5  # a key of one head is made 16 bits, by one multiprocessor
_STARTING = 300.0  # to make any 16 bits


class UpcastRows(NamedTuple):
    """A section: rows whose keys are made 16 bits together, up to the first of the next section's."""

    first_row: int
    num_tokens: int
    num_keys: int  # that they see, or an upper bound of it
    splits: PrefillSplits | None  # of these; None: their tiles are whole


def is_faster_upcast(
    spec: AttentionSpec, cache: KVCacheSpec, query_lens: IntArray, seq_lens: IntArray, sections: Sequence[slice],
    device: torch.device,
) -> bool:  # fmt: skip
    """Whether these rows take less time so: by all that tiles read, as splits leave no multiprocessor idle.

    Args:
        query_lens, seq_lens: of the rows, or upper bounds of the latter.
        sections: which rows together, as `upcast_sections` has them; none: there is no room.
    """
    if not sections:
        return False
    heads = spec.num_kv_heads / num_multiprocessors(device)  # of a multiprocessor
    keys, num_keys = num_visible_keys(spec, seq_lens).astype(np.int64), int(seq_lens.sum(dtype=np.int64))
    in_all = float(num_hopper_tiles(spec, query_lens) @ keys)
    taken = len(sections) * _STARTING + (in_all + _UPCASTING * num_keys) * heads
    tile = split_tile(spec, cache, None, device, is_paged=True, is_upcast=False)
    read = _READ_OF_8_BITS[tile.rows] if tile.beside else _PORTABLE_READ
    return taken < read * float(tile.num_tiles(query_lens) @ keys) * heads


def upcast_sections(spec: AttentionSpec, seq_lens: IntArray, num_bytes: int) -> list[slice]:
    """Rows whose keys are made 16 bits together: all, if one KV head's have room; else as many in a row as all KV heads
    have room for, or one. None where one row's do not fit.

    Args:
        seq_lens: [rows], or upper bounds.
        num_bytes: room for keys and values of 16 bits.
    """
    if upcast_heads(spec, int(seq_lens.sum(dtype=np.int64)), num_bytes):
        return [slice(0, len(seq_lens))]
    if not upcast_heads(spec, int(seq_lens.max(initial=0)), num_bytes):
        return []
    starts, num_keys = [0], 0
    for row, seq_len in enumerate(seq_lens.tolist()):
        if num_keys and upcast_heads(spec, num_keys + seq_len, num_bytes) < spec.num_kv_heads:
            starts.append(row)
            num_keys = 0
        num_keys += seq_len  # none of a row of cross attention that has no keys
    return [slice(*bounds) for bounds in pairwise([*starts, len(seq_lens)])]


def upcast_splits(
    spec: AttentionSpec, tile: SplitTile, query_lens: IntArray, seq_lens: IntArray, num_decodes: int, num_bytes: int,
    device: torch.device,
) -> PrefillSplits | None:  # fmt: skip
    """How keys that are made 16 bits are split, as `prefill_splits` says for the KV heads that a launch has.

    Args:
        num_bytes: room for keys and values of 16 bits.
    """
    at_once = upcast_heads(spec, int(seq_lens[num_decodes:].sum(dtype=np.int64)), num_bytes)
    if not at_once:  # they are read as they are, whole
        return None
    of_launch = replace(spec, num_qo_heads=at_once * spec.group_size, num_kv_heads=at_once)
    splits = prefill_splits(of_launch, tile, query_lens, seq_lens, num_decodes, device)
    return splits and splits._replace(num_kv_heads=at_once)


def rows_in_turn(
    spec: AttentionSpec, tile: SplitTile, query_lens: IntArray, seq_lens: IntArray, sections: Sequence[slice],
    first_row: int, num_bytes: int, device: torch.device,
) -> tuple[UpcastRows, ...]:  # fmt: skip
    """The sections, if they are several, of rows from `first_row` on.

    Args:
        tile: of the kernel that reads keys of 16 bits.
        num_bytes: room for keys and values of 16 bits.
    """
    if len(sections) < 2:
        return ()
    lens = [(query_lens[section], seq_lens[section]) for section in sections]
    return tuple(
        UpcastRows(first_row + section.start, int(queries.sum()), int(keys.sum()),
                   upcast_splits(spec, tile, queries, keys, 0, num_bytes, device))
        for section, (queries, keys) in zip(sections, lens, strict=True)
    )  # fmt: skip


class Span(NamedTuple):
    """What a launch has of a step's rows."""

    first_row: int
    stop: int
    num_tokens: int  # query tokens


def section_spans(sections: Sequence[UpcastRows], num_rows: int, num_tokens: int) -> list[Span]:
    """The sections' rows; the last one has what comes behind it too, padding and its tokens.

    Args:
        num_rows: of the step.
        num_tokens: of all rows from the first section's on.
    """
    stops = [*(section.first_row for section in sections[1:]), num_rows]
    tokens = [section.num_tokens for section in sections[:-1]]
    tokens.append(num_tokens - sum(tokens))
    return [Span(section.first_row, *rest) for section, *rest in zip(sections, stops, tokens, strict=True)]


def in_turn(rows: Rows, sections: Sequence[UpcastRows], lists: Sequence[TileList | None]) -> Iterator[Rows]:
    """The rows of each section, with its list of tiles; or all rows, if there are none."""
    if not sections:
        yield rows
        return
    of_sections = section_spans(sections, len(rows.seq_lens), rows.num_tokens)
    for section, (first_row, stop, num_tokens), splits in zip(sections, of_sections, lists, strict=True):
        yield rows._replace(
            page_table=None if rows.page_table is None else rows.page_table[:stop], seq_lens=rows.seq_lens[:stop],
            query_start_loc=rows.query_start_loc[: stop + 1], first_row=first_row, num_tokens=num_tokens,
            num_upcast=section.num_keys, splits=splits,
        )  # fmt: skip

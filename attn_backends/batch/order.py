"""Decodes in front, prefills behind: where a batch splits, and how rows are brought into that order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.page_table import IntArray


class SwappableRows(Protocol):
    """A batch under construction whose rows can still change places, as `reorder_batch` needs it."""

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows, with all that belongs to them."""


class BatchSplit(NamedTuple):
    """The place where a batch splits. Decodes are its first rows and tokens, prefills those behind."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(common: CommonAttentionMetadata, decode_threshold: int = 1) -> BatchSplit:
    """Find the edge between the decodes, rows of at most `decode_threshold` query tokens, and the prefills.

    Padded rows count as decodes if the whole batch, padding included, holds nothing longer: a graph of decodes then has
    the same counts at every replay, however many rows are live. In any other batch they stand behind prefills and
    count as neither.

    Raises:
        ValueError: a decode stands behind a prefill, or `decode_threshold` is below 1.
    """
    _check_threshold(decode_threshold)
    if common.max_query_len <= decode_threshold:
        return BatchSplit(common.num_reqs, 0, common.num_tokens, 0)
    actual = common.num_actual_reqs
    query_lens: IntArray = common.query_lens_cpu[:actual].numpy()
    is_prefill = query_lens > decode_threshold
    num_decodes = int(is_prefill.argmax()) if is_prefill.any() else actual
    for row in num_decodes + np.flatnonzero(~is_prefill[num_decodes:]):
        raise ValueError(
            f"row {row} is a decode ({query_lens[row]} query tokens, decode_threshold {decode_threshold}) behind row "
            f"{num_decodes}, a prefill of {query_lens[num_decodes]}: order the rows before they are compiled, with "
            "reorder_batch_to_split_decodes_and_prefills"
        )
    num_decode_tokens = int(common.query_start_loc_cpu[num_decodes])
    return BatchSplit(
        num_decodes, actual - num_decodes, num_decode_tokens, common.num_actual_tokens - num_decode_tokens
    )


def leading_decodes(common: CommonAttentionMetadata, decode_threshold: int = 1) -> int:
    """How many rows of at most `decode_threshold` query tokens stand at the front, padding left out; behind them any
    order is allowed."""
    if common.max_query_len <= decode_threshold:
        return common.num_actual_reqs
    query_lens = np.diff(common.query_start_loc_cpu.numpy()[: common.num_actual_reqs + 1])
    longer = np.flatnonzero(query_lens > decode_threshold)
    return int(longer[0]) if len(longer) else common.num_actual_reqs


def leading_new_kv(common: CommonAttentionMetadata, num_rows: int) -> int:
    """How many new keys the first rows bring."""
    if num_rows == common.num_actual_reqs:
        return common.num_new_kv
    return int(common.new_kv_start_loc_cpu[num_rows])


def reorder_batch_to_split_decodes_and_prefills(
    batch: SwappableRows, query_lens: Sequence[int] | IntArray, decode_threshold: int = 1
) -> bool:
    """Bring every row of at most `decode_threshold` query tokens to the front, with as few swaps as there can be.

    A row that is on its side of the edge stays where it is. Of those that cross it, decodes keep their order among
    themselves, and so do prefills. A full stable sort would move more rows, and with them pages and sampling state.

    Args:
        query_lens: [num_rows] new tokens of each row, before any swap. Read once, so it may be the batch's own array.

    Returns:
        Whether rows changed places.

    Raises:
        ValueError: a row has no query tokens, or `decode_threshold` is below 1.
    """
    _check_threshold(decode_threshold)
    lens = np.asarray(query_lens, np.int32)
    for row in np.flatnonzero(lens < 1):
        raise ValueError(f"row {row} has {lens[row]} query tokens; a row of a step has at least 1: leave it out")
    is_decode = lens <= decode_threshold
    num_decodes = int(is_decode.sum())
    prefills_in_front = np.flatnonzero(~is_decode[:num_decodes])
    decodes_behind = num_decodes + np.flatnonzero(is_decode[num_decodes:])
    for prefill, decode in zip(prefills_in_front.tolist(), decodes_behind.tolist(), strict=True):
        batch.swap_rows(prefill, decode)
    return len(decodes_behind) > 0


def _check_threshold(decode_threshold: int) -> None:
    if decode_threshold < 1:
        raise ValueError(f"decode_threshold is {decode_threshold}; it must be at least 1, the tokens of a plain decode")

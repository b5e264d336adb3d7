"""Parts of a batch, and batches padded: pure transforms of `CommonAttentionMetadata`, with no read of the device.

Each gives what compiling the same rows anew would give, but for three things: `page_table` keeps its width, the CSR is
worked out from it at first use, and placeholders count embeddings as in the whole batch. `for_graph` and
`seq_lens_are_upper_bounds` restrict what a builder may read of a batch, and hold for its parts as well.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.page_table import PAD_SLOT
from attn_backends.batch.placeholders import cut_maps
from attn_backends.spec import AttentionSpec, AttentionType


def slice_rows(common: CommonAttentionMetadata, start: int, stop: int) -> CommonAttentionMetadata:
    """Rows `start` to `stop` as a batch of their own. Its device tensors are views, but for `query_start_loc`.

    Its tokens are tokens `query_start_loc_cpu[start]` to `[stop]` of the whole, its new keys `new_kv_start_loc_cpu`'s.
    Padded rows may be among them.

    Raises:
        ValueError: there are no such rows, or none at all.
    """
    if not 0 <= start < stop <= common.num_reqs:
        raise ValueError(
            f"rows {start} to {stop} of a batch of {common.num_reqs}: need 0 <= start < stop <= {common.num_reqs}"
        )
    actual = min(max(common.num_actual_reqs, start), stop)
    first, first_padded, end = (int(common.query_start_loc_cpu[row]) for row in (start, actual, stop))
    first_kv, end_kv = (int(common.new_kv_start_loc_cpu[row]) for row in (start, stop))
    # Slots are one a new key, then one a padded token.
    slots = (at_kv + max(0, at - common.num_actual_tokens) for at_kv, at in ((first_kv, first), (end_kv, end)))
    starts = common.query_start_loc[start : stop + 1]
    starts_cpu = common.query_start_loc_cpu[start : stop + 1] - first
    return replace(
        common,
        num_reqs=stop - start,
        num_actual_reqs=actual - start,
        num_tokens=end - first,
        num_actual_tokens=first_padded - first,
        max_query_len=int(starts_cpu.diff().max()),
        max_seq_len=int(common.seq_lens_cpu[start:stop].max()),
        query_start_loc=starts - first if first else starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=common.seq_lens[start:stop],
        seq_lens_cpu=common.seq_lens_cpu[start:stop],
        context_lens_cpu=common.context_lens_cpu[start:stop],
        page_table=common.page_table[start:stop],
        slot_mapping=common.slot_mapping[slice(*slots)],
        num_new_kv=end_kv - first_kv,
        new_kv_start_loc_cpu=common.new_kv_start_loc_cpu[start : stop + 1] - first_kv,
        csr=None,
        multi_modal_placeholder_index_maps=cut_maps(common.multi_modal_placeholder_index_maps, first, end),
    )


def pad_rows(common: CommonAttentionMetadata, num_reqs: int, query_len: int = 1) -> CommonAttentionMetadata:
    """The batch with padded rows of `query_len` tokens behind it, `num_reqs` rows in all.

    A padded row has no keys, no pages and slots of -1. With nothing to add, the batch itself comes back.

    Raises:
        ValueError: the batch has more than `num_reqs` rows, or `query_len` is below 1.
    """
    more = num_reqs - common.num_reqs
    if more < 0 or query_len < 1:
        raise ValueError(
            f"pad to {num_reqs} rows with rows of {query_len} tokens: the batch has {common.num_reqs} rows already, "
            "and a row has at least 1 token"
        )
    if not more:
        return common
    more_tokens = more * query_len
    ends = torch.arange(1, more + 1, dtype=torch.int32, device="cpu") * query_len + common.num_tokens
    ends_on_device = torch.arange(1, more + 1, dtype=torch.int32, device=common.seq_lens.device) * query_len
    return replace(
        common,
        num_reqs=num_reqs,
        num_tokens=common.num_tokens + more_tokens,
        max_query_len=max(common.max_query_len, query_len),
        query_start_loc=torch.cat([common.query_start_loc, ends_on_device + common.num_tokens]),
        query_start_loc_cpu=torch.cat([common.query_start_loc_cpu, ends]),
        seq_lens=_with(common.seq_lens, more, 0),
        seq_lens_cpu=_with(common.seq_lens_cpu, more, 0),
        context_lens_cpu=_with(common.context_lens_cpu, more, 0),
        page_table=_with(common.page_table, more, 0),
        slot_mapping=_with(common.slot_mapping, 0 if common.is_profile_run else more_tokens, PAD_SLOT),
        new_kv_start_loc_cpu=_with(common.new_kv_start_loc_cpu, more, common.num_new_kv),
        csr=None,
    )


def unpad_rows(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch without its padding, rows and tokens: the inverse of `pad_rows`. Without any, it comes back itself."""
    if common.num_actual_reqs == common.num_reqs and common.num_actual_tokens == common.num_tokens:
        return common
    return slice_rows(common, 0, common.num_actual_reqs)


def _with(tensor: torch.Tensor, more: int, value: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_full((more, *tensor.shape[1:]), value)])


def without_new_keys(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch of an engine that has written its keys itself: all that queries see is in the cache."""
    none = torch.zeros_like(common.new_kv_start_loc_cpu)
    return replace(common, num_new_kv=0, slot_mapping=common.slot_mapping[:0], new_kv_start_loc_cpu=none)


def prefix_to_share(
    common: CommonAttentionMetadata, asked: int, spec: AttentionSpec, num_decodes: int, min_bytes: int
) -> int:
    """How much of a shared prefix to attend once for all decode rows: all of it, or nothing if that does not pay.

    Args:
        asked: `common_prefix_len` as the builder was given it.
        min_bytes: bytes of keys and values a layer that are read once in place of many times: with more, it pays.

    Raises:
        ValueError: `asked` is not whole pages of every row's context.
    """
    shortest = int(common.context_lens_cpu[: common.num_actual_reqs].min())
    if asked % common.page_size or not 0 <= asked <= shortest:
        raise ValueError(
            f"common_prefix_len is {asked}; it must be a multiple of the page size ({common.page_size}) and at "
            f"most the shortest context ({shortest})"
        )
    positional = spec.is_local or spec.encodes_positions
    bytes_per_key = spec.num_kv_heads * (spec.head_dim + spec.head_dim_vo) * spec.cache_dtype.itemsize
    pays = num_decodes > 1 and asked * (num_decodes - 1) * bytes_per_key >= min_bytes
    return asked if pays and not positional and spec.attention_type is AttentionType.DECODER else 0

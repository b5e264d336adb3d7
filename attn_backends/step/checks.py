"""What the lengths of a step may be: refused in words, with the request's name, before anything has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from attn_backends.batch.page_table import IntArray
from attn_backends.step.buffers import StepShape
from attn_backends.step.rows import PageRows


def check_step(
    rows: PageRows, context_lens: IntArray, query_lens: IntArray, num_padded_reqs: int, padded_query_len: int
) -> StepShape:
    """The step's shape, once all of it is found to be within limits and pages."""
    count = len(context_lens)
    if not 1 <= count <= rows.num_rows or len(query_lens) != count:
        raise ValueError(
            f"{count} context lengths and {len(query_lens)} query lengths for {rows.num_rows} rows: pass one of "
            "each for one or more of the first rows"
        )
    room = room_of(rows, len(context_lens))
    is_decode = not np.count_nonzero(query_lens - 1)
    if is_decode:  # read as unsigned, a negative length is a large one
        wrong = context_lens.view(np.uint32) >= room.view(np.uint32)
    else:  # in this order nothing overflows
        wrong = (context_lens < 0) | (query_lens < 1) | (context_lens > room - query_lens)
    if np.count_nonzero(wrong):
        row = int(wrong.argmax())
        refuse(rows, row, int(rows.num_pages[row]), int(context_lens[row]), int(query_lens[row]))
    num_tokens = count if is_decode else int(query_lens.sum())
    shape = StepShape(count + num_padded_reqs, count, num_tokens + num_padded_reqs * padded_query_len, num_tokens)
    limits = rows.limits
    if num_padded_reqs < 0 or (num_padded_reqs and padded_query_len < 1):
        raise ValueError(f"num_padded_reqs is {num_padded_reqs} and padded_query_len {padded_query_len}")
    if shape.num_reqs > limits.max_num_requests or shape.num_tokens > limits.max_num_tokens:
        raise ValueError(
            f"the step has {shape.num_reqs} requests and {shape.num_tokens} tokens, {num_padded_reqs} padded "
            f"requests included (the first is {rows.request_ids[0]!r}); the limits are max_num_requests "
            f"{limits.max_num_requests} and max_num_tokens {limits.max_num_tokens}"
        )
    return shape


def room_of(rows: PageRows, num_rows: int) -> IntArray:
    """[num_rows] i32, how many tokens each of the first rows has pages for."""
    return np.minimum(rows.num_pages[:num_rows] * rows.cache.page_size, rows.limits.max_model_len)


def refuse(rows: PageRows, row: int, num_pages: int, context_len: int, query_len: int) -> NoReturn:
    name = f"request {rows.request_ids[row]!r} (row {row})"
    if query_len < 1 or context_len < 0:
        raise ValueError(
            f"{name} has context length {context_len} and query length {query_len}: need context_len >= 0 and "
            "query_len >= 1"
        )
    seq_len, slots = context_len + query_len, num_pages * rows.cache.page_size
    if seq_len > rows.limits.max_model_len:
        raise ValueError(f"{name} would have {seq_len} tokens; max_model_len is {rows.limits.max_model_len}")
    raise ValueError(
        f"{name} has {num_pages} pages of {rows.cache.page_size} slots, which hold {slots} keys, but its length "
        f"is {seq_len}: extend or append before the step"
    )


def as_token_ids(token_ids: NDArray[np.int64] | Sequence[int], num_tokens: int) -> NDArray[np.int64]:
    """[num_tokens] i64."""
    ids = np.asarray(token_ids, np.int64)
    if ids.shape != (num_tokens,):
        raise ValueError(f"token_ids has shape {list(ids.shape)}; the step has {num_tokens} tokens")
    return ids


def check_on_device(context_lens: torch.Tensor | None, count: int, device: torch.device) -> None:
    if context_lens is None:
        return
    on_device = context_lens.device.type == device.type
    if context_lens.dtype != torch.int32 or context_lens.shape != (count,) or not on_device:
        raise ValueError(
            f"context_lens_on_device is {context_lens.dtype} {list(context_lens.shape)} on {context_lens.device}; "
            f"it must be torch.int32 [{count}] on {device}"
        )

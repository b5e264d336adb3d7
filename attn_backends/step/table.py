"""The page table that lives on: rows owned by running requests, on the host and on the device, one copy a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.page_table import IntArray, starts_of
from attn_backends.machine import HAS_TRITON
from attn_backends.spec import KVCacheSpec, Limits
from attn_backends.step.buffers import StepShape, TokenViews
from attn_backends.step.checks import as_token_ids, check_on_device, check_step, refuse, room_of
from attn_backends.step.device import DeviceCopy, DeviceSide, HostStep, SharedMemory
from attn_backends.step.rows import PageRows, as_int32

_MOST_AHEAD = 16


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One step, for builders and the model. Its tensors on the device are the table's: valid until its next step."""

    common: CommonAttentionMetadata
    token_ids: torch.Tensor  # [T] i64 on the device; 0 for padding of `step`. What is not given was there before
    positions: torch.Tensor  # [T] i64 on the device; 0 for padding
    num_advanced: int = 0  # how often `advance` has been called since `StepTable.step`


class _Shaped(NamedTuple):
    """What steps of one shape have in common. A view takes about as long as a small kernel's launch."""

    shape: StepShape
    fields: dict[str, Any]  # of their `CommonAttentionMetadata`
    tokens: TokenViews
    increments: IntArray  # [R] i32: 1, and 0 for padding


class StepTable(PageRows):
    """`CommonAttentionMetadata` without building anew: a step costs its rows and tokens, however long the contexts.

    Requests own rows (`enter`, `extend`, `append`, `leave`, `swap_rows`, `arrange`); `step` takes the first n rows.
    It equals `CommonAttentionMetadata.from_sequence_groups` of the same rows, but for `page_table`, which is all
    `capacity` columns wide with valid ids behind a row's pages. All work on the device is queued on the current stream.

    On a CPU the device's page table is the host's: edit rows when the last step has been used.

    Args:
        limits: all buffers are sized from these, once. Padding counts as requests and tokens too.
        device: where metadata is wanted.
        make_side: makes the device's side; chosen by `device` if None.
    """

    def __init__(
        self,
        limits: Limits,
        cache: KVCacheSpec,
        device: torch.device | str = "cpu",
        *,
        make_side: Callable[[PageRows], DeviceSide] | None = None,
    ) -> None:
        super().__init__(limits, cache)
        self.device = torch.device(device)
        self.side = make_side(self) if make_side else _side(self, self.device)
        self._latest: Callable[[], StepBatch | None] = lambda: None  # a weak reference: its batch is the caller's
        self._moves_at_latest = 0
        self._coming: list[dict[str, Any]] = []  # fields of steps that `advance` may take without a look at pages
        self._decode = lru_cache(maxsize=limits.max_num_requests)(self._make_decode)

    def step(
        self,
        context_lens: IntArray | Sequence[int],
        query_lens: IntArray | Sequence[int],
        token_ids: NDArray[np.int64] | Sequence[int] | None = None,
        *,
        num_padded_reqs: int = 0,
        padded_query_len: int = 1,
        context_lens_on_device: torch.Tensor | None = None,
        for_graph: bool = False,
    ) -> StepBatch:
        """The next step of rows 0 to n - 1.

        Args:
            context_lens, query_lens: [n] tokens in the cache, and new ones.
            token_ids: the new ones, row after row; None leaves what is in `StepBatch.token_ids` on the device.
            num_padded_reqs: rows added behind the batch for a CUDA graph, each of `padded_query_len` tokens.
            context_lens_on_device: [n] i32 on the device, where only it knows (asynchronous scheduling, speculative
                decoding). `context_lens` are then upper bounds, and the batch is marked `seq_lens_are_upper_bounds`.
            for_graph: as in the batch.

        Raises:
            ValueError: a length without meaning, without pages or over a limit; nothing has changed then.
        """
        context = as_int32(context_lens, lambda row: f"request {self.request_ids[row]!r}: context length")
        query = as_int32(query_lens, lambda row: f"request {self.request_ids[row]!r}: query length")
        shape = check_step(self, context, query, num_padded_reqs, padded_query_len)
        ids = None if token_ids is None else as_token_ids(token_ids, shape.num_actual_tokens)
        check_on_device(context_lens_on_device, len(context), self.device)
        seq_lens, context, query = _padded(context, query, num_padded_reqs, padded_query_len)
        csr = self.side.step(self, HostStep(shape, seq_lens, query, ids, context_lens_on_device))
        self._coming = []
        if shape.num_tokens == shape.num_reqs:
            shaped = self._decode(shape.num_reqs, shape.num_actual_reqs)
        else:
            shaped = self._shaped(shape, torch.from_numpy(starts_of(query)), int(query.max()))
        lens = {
            "seq_lens_cpu": torch.from_numpy(seq_lens),
            "context_lens_cpu": torch.from_numpy(context),
            "max_seq_len": int(seq_lens.max()),
            "csr": csr,
            "seq_lens_are_upper_bounds": context_lens_on_device is not None,
            "for_graph": for_graph,
        }
        return self._made(shaped, lens, 0)

    def advance(self, step: StepBatch, token_ids: torch.Tensor | None = None) -> StepBatch:
        """The next decode step of the same rows, without the host's lists: every row has one token more, its new one.

        Lengths, positions, slots and CSR move on in place on the device, and the host's with them: exact ones stay
        exact, upper bounds stay bounds. Padded rows stay idle.

        Args:
            step: the last one that `step` or `advance` returned; its tensors become the new one's.
            token_ids: [n] i64 on the device, what was sampled; None if it was written into `step.token_ids`.

        Raises:
            ValueError: rows have moved since, or a row has no page for its token. Pages that were added since the
                last step travel along.
        """
        common = step.common
        if step is not self._latest() or self._moves_at_latest != self.num_moves:
            raise ValueError("only the last step can be advanced, and not once rows have moved: call step")
        decode, context_lens = self._decode(common.num_reqs, common.num_actual_reqs), common.seq_lens_cpu
        if self.has_unsent or not self._coming:
            self._coming = self._look_ahead(decode, context_lens.numpy())
        coming = self._coming.pop()
        are_bounds, num_advanced = common.seq_lens_are_upper_bounds, step.num_advanced + 1
        csr = self.side.advance(self, decode.shape, coming["seq_lens_cpu"], num_advanced, are_bounds)
        if token_ids is not None:
            self.side.buffers.tokens(common.num_actual_reqs).token_ids.copy_(token_ids, non_blocking=True)
        lens = {
            **coming,
            "context_lens_cpu": context_lens,
            "max_seq_len": common.max_seq_len + 1,
            "csr": csr,
            "seq_lens_are_upper_bounds": are_bounds,
            "for_graph": common.for_graph,
        }
        return self._made(decode, lens, num_advanced)

    def _look_ahead(self, decode: _Shaped, seq_lens: IntArray) -> list[dict[str, Any]]:
        """Lengths of the next steps, and where rows begin in the CSR if there is one, as far as all rows have pages;
        the next step last. At once, they cost little."""
        room = room_of(self, len(seq_lens))
        num_steps = int((room - seq_lens)[: decode.shape.num_actual_reqs].min())
        if num_steps < 1:
            row = int((seq_lens >= room).argmax())
            refuse(self, row, int(self.num_pages[row]), int(seq_lens[row]), 1)
        further = np.arange(min(num_steps, _MOST_AHEAD), 0, -1, dtype=np.int32)
        coming = seq_lens + further[:, None] * decode.increments
        lens = torch.from_numpy(coming).unbind()
        if not len(self.side.buffers.paged_kv_indices):
            return [{"seq_lens_cpu": each} for each in lens]
        indptr = np.zeros((len(coming), len(seq_lens) + 1), np.int32)
        page_size = self.cache.page_size
        np.cumsum((coming + (page_size - 1)) // page_size, axis=1, out=indptr[:, 1:])
        starts = torch.from_numpy(indptr).unbind()
        # The second is what `CommonAttentionMetadata` would work out, and keeps under the same name.
        return [{"seq_lens_cpu": one, "paged_kv_indptr_cpu": at} for one, at in zip(lens, starts, strict=True)]

    def _made(self, shaped: _Shaped, lens: dict[str, Any], num_advanced: int) -> StepBatch:
        # Not by its __init__, which for a frozen class of that many fields takes a tenth of a step's time.
        common = object.__new__(CommonAttentionMetadata)
        common.__dict__.update(shaped.fields)
        common.__dict__.update(lens)
        step = StepBatch(common, shaped.tokens.token_ids, shaped.tokens.positions, num_advanced)
        self._latest = weakref.ref(step)
        self._moves_at_latest = self.num_moves
        return step

    def _make_decode(self, num_reqs: int, num_actual_reqs: int) -> _Shaped:
        shape = StepShape(num_reqs, num_actual_reqs, num_reqs, num_actual_reqs)
        return self._shaped(shape, torch.arange(num_reqs + 1, dtype=torch.int32, device="cpu"), 1)

    def _shaped(self, shape: StepShape, starts: torch.Tensor, max_query_len: int) -> _Shaped:
        num_reqs, actual_reqs, num_tokens, actual_tokens = shape
        rows, tokens = self.side.buffers.rows(num_reqs), self.side.buffers.tokens(num_tokens)
        increments = np.zeros(num_reqs, np.int32)
        increments[:actual_reqs] = 1
        fields = {
            "page_size": self.cache.page_size,
            "num_reqs": num_reqs,
            "num_actual_reqs": actual_reqs,
            "num_tokens": num_tokens,
            "num_actual_tokens": actual_tokens,
            "max_query_len": max_query_len,
            "query_start_loc": rows.query_start_loc,
            "query_start_loc_cpu": starts,
            "seq_lens": rows.seq_lens,
            "page_table": rows.page_table,
            "slot_mapping": tokens.slot_mapping,
            "num_new_kv": actual_tokens,
            "new_kv_start_loc_cpu": starts if num_tokens == actual_tokens else starts.clamp(max=actual_tokens),
            "is_profile_run": False,
        }
        return _Shaped(shape, fields, tokens, increments)


def _padded(
    context_lens: IntArray, query_lens: IntArray, num_rows: int, query_len: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Lengths of sequences, contexts and queries, arrays of the step's own, with rows of padding behind them."""
    if not num_rows:
        return context_lens + query_lens, context_lens.copy(), query_lens
    context = np.concatenate([context_lens, np.zeros(num_rows, np.int32)])
    query = np.concatenate([query_lens, np.full(num_rows, query_len, np.int32)])
    seq_lens = context + query
    seq_lens[len(context_lens) :] = 0
    return seq_lens, context, query


def _side(rows: PageRows, device: torch.device) -> DeviceSide:
    if device.type == "cpu":
        return SharedMemory(rows)
    if device.type != "cuda" or not HAS_TRITON:
        return DeviceCopy(rows, device)
    from attn_backends.step.kernel import TritonDerive

    return DeviceCopy(rows, device, TritonDerive)

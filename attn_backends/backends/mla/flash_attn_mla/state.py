"""What outlives a step of FLASH_ATTN_MLA: its kernels, and the library's schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attn_backends.backends.mla.flash_attn_mla.library import DecodeCall, Kernels, PrefillCall, load
from attn_backends.backends.mla.flash_attn_mla.options import FlashAttnMLAOptions
from attn_backends.backends.mla.metadata import DecodeRows, RaggedRows
from attn_backends.backends.mla.state import MLAState
from attn_backends.spec import MLASpec

if TYPE_CHECKING:
    from attn_backends.backends.mla.prefill import VarlenPrefill

_MOST_SPLITS = 128
_KEYS_OF_SPLIT = 256  # at least: what can be cut finer takes a slower kernel to join


def partial_bytes(spec: MLASpec, num_tokens: int) -> int:
    """Bytes that the library allocates for one part of every query: an output and an LSE a head, in float32."""
    return num_tokens * spec.num_qo_heads * (spec.kv_lora_rank + 1) * 4


def most_splits(spec: MLASpec, num_tokens: int, longest: int, split_bytes: int) -> int:
    """Into how many parts the library may cut the keys of a row of up to `longest`, so that all fit `split_bytes`."""
    held = split_bytes // partial_bytes(spec, num_tokens)
    return max(1, min(_MOST_SPLITS, held, longest // _KEYS_OF_SPLIT))


def prefills(spec: MLASpec) -> bool:
    """Whether the library's kernels serve a layer's expanded keys and values: of unequal head dims they have these
    alone, and the others take the family's own road."""
    return 128 < spec.head_dim <= 192 and 96 < spec.head_dim_vo <= 128


class FlashAttnMLAState(MLAState):
    backend_name = "FLASH_ATTN_MLA"
    load_kernels: ClassVar[Any] = staticmethod(load)  # others in tests

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kernels: Kernels = self.load_kernels()

    def make_prefill(self, spec: MLASpec) -> VarlenPrefill | None:
        return None if prefills(spec) else super().make_prefill(spec)

    def plan_prefill(self, spec: MLASpec, rows: RaggedRows) -> PrefillCall | Any:
        return PrefillCall(self.kernels, spec.scale, rows) if prefills(spec) else super().plan_prefill(spec, rows)

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: DecodeCall | None) -> DecodeCall:
        """The library's schedule, made on the device."""
        call = held or self._new_call(spec, rows)
        made = self.kernels.schedule(call, spec, self.cache)
        if held is None:
            return replace(call, schedule=made)
        if made.shape != held.schedule.shape:
            raise RuntimeError(
                f"a schedule of {tuple(held.schedule.shape)} numbers was captured, and the library makes one of "
                f"{tuple(made.shape)} for the same rows: its version changed what a schedule's size follows from"
            )
        held.schedule.copy_(made)
        return held

    def _new_call(self, spec: MLASpec, rows: DecodeRows) -> DecodeCall:
        """A graph keeps its own for all replays."""
        longest = rows.page_table.shape[1] * self.cache.page_size
        if rows.idle is None:  # not in a graph
            longest = min(longest, int(rows.seq_lens_cpu.max()))
        split_bytes = (self.options or FlashAttnMLAOptions()).split_bytes
        starts = torch.arange(rows.num_rows + 1, dtype=torch.int32, device=self.device) * rows.query_len
        return DecodeCall(
            kernels=self.kernels,
            query_starts=starts,
            query_len=rows.query_len,
            page_table=rows.page_table,
            seq_lens=rows.seq_lens,
            max_seq_len=longest,
            num_splits=most_splits(spec, rows.num_tokens, longest, split_bytes),
            schedule=starts,  # until there is one
        )

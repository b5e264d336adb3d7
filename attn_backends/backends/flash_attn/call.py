"""What every provider is called with: rows of a batch, and the constants of a layer.

Kernels of all providers index the cache with 64 bits: they multiply page ids (i32) by the tensors' strides, which are
int64 in all (`index_t` of FlashAttention 2, the layouts of 3 and 4). Caches of more than 2^31 elements need nothing
special.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from attn_backends.spec import FP8_DTYPES, AttentionSpec


class HostLens(NamedTuple):
    """Lengths of rows as the host knows them."""

    query_start_loc: torch.Tensor  # [R + 1] i32; differences count, so that it may begin anywhere
    seq_lens: torch.Tensor  # [R] i32
    are_exact: bool  # else `seq_lens` are upper bounds

    def part(self, first: int, stop: int) -> HostLens:
        return HostLens(self.query_start_loc[first : stop + 1], self.seq_lens[first:stop], self.are_exact)


class Rows(NamedTuple):  # made in every step: quicker than a dataclass
    """Rows that one call attends. Lengths and pages are on the device; what is on the host follows from shapes alone,
    but for `max_seq_len`, of which the longest row may fall short, and `on_host`."""

    num_rows: int  # R
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # [R + 1] i32, from 0 on
    seq_lens: torch.Tensor  # [R] i32; a row of 0 gets zeros
    page_table: torch.Tensor | None  # [R, max_pages] i32; None: keys are this step's own, by query_start_loc
    some_may_lack_keys: bool = False  # of the rows with tokens of their own
    on_host: HostLens | None = None  # None in graphs, whose rows have other lengths at every replay

    @property
    def query_len(self) -> int | None:
        """Query tokens of every row; None if they differ."""
        return self.max_query_len if self.num_tokens == self.num_rows * self.max_query_len else None

    def part(self, first: int, stop: int, tokens: slice, max_query_len: int) -> Rows:
        """Rows `first` to `stop`, which have these of the tokens."""
        if (stop - first, tokens.stop - tokens.start) == (self.num_rows, self.num_tokens):
            return self
        starts = self.query_start_loc[first : stop + 1]
        return self._replace(
            num_rows=stop - first,
            num_tokens=tokens.stop - tokens.start,
            max_query_len=max_query_len,
            query_start_loc=starts - tokens.start if tokens.start else starts,
            seq_lens=self.seq_lens[first:stop],
            page_table=None if self.page_table is None else self.page_table[first:stop],
            on_host=None if self.on_host is None else self.on_host.part(first, stop),
        )

    def after_prefix(self, num_keys: int, page_size: int) -> Rows:
        """The same rows over what comes after their first keys, whole pages that every row has."""
        if not num_keys or self.page_table is None:
            return self
        return self._replace(
            max_seq_len=self.max_seq_len - num_keys,
            seq_lens=self.seq_lens - num_keys,
            page_table=self.page_table[:, num_keys // page_size :],
            on_host=None,
        )

    def narrowed(self, page_size: int) -> Rows:
        """The same rows with a page table as wide as the longest row wants it."""
        if self.page_table is None:
            return self
        return self._replace(page_table=self.page_table[:, : max(1, -(-self.max_seq_len // page_size))])


@dataclass(frozen=True)
class LayerConstants:
    """What a layer asks for in every call, as kernels take it."""

    scale: float
    causal: bool
    window: tuple[int, int]  # keys to the left and right of a query's own; -1 is no limit
    soft_cap: float  # 0: none
    alibi_slopes: torch.Tensor | None  # [num_qo_heads] f32
    sinks: torch.Tensor | None  # [num_qo_heads] bf16, for kernels that take them
    k_scale: torch.Tensor  # [1, 1] f32; a value of an fp8 cache times it is the real one
    v_scale: torch.Tensor  # [1, 1] f32

    @staticmethod
    def of(
        spec: AttentionSpec, sinks: torch.Tensor | None, k_scale: float, v_scale: float, device: torch.device
    ) -> LayerConstants:
        """Over the cache. Where that is not fp8, kernels do not take `k_scale`: the scale of the softmax holds it."""
        slopes = None
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=device)
        return LayerConstants(
            scale=spec.scale * (1.0 if spec.cache_dtype in FP8_DTYPES else k_scale),
            causal=spec.causal,
            window=window_of(spec, spec.causal),
            soft_cap=spec.logits_soft_cap or 0.0,
            alibi_slopes=slopes,
            sinks=sinks,
            k_scale=torch.full((1, 1), k_scale, dtype=torch.float32, device=device),
            v_scale=torch.full((1, 1), v_scale, dtype=torch.float32, device=device),
        )

    def without_sinks(self) -> LayerConstants:
        return replace(self, sinks=None)

    def over_prefix(self) -> LayerConstants:
        """The constants for keys that all queries see. Sinks join the softmax once, with the other keys."""
        return replace(self, causal=False, window=(-1, -1), sinks=None)


class Tensors(NamedTuple):
    """What one call reads, and where it writes."""

    query: torch.Tensor  # [num_tokens, num_qo_heads, head_dim]
    keys: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim]; without a page table [num_keys, …]
    values: torch.Tensor
    output: torch.Tensor  # [num_tokens, num_qo_heads, head_dim], written in place


class Call(NamedTuple):
    """One launch of a step: rows, which of its tokens they are, and their schedule."""

    rows: Rows
    tokens: slice
    schedule: torch.Tensor | None  # i32, on the device; None: the kernel makes its own
    split_keys: bool
    tot_seq_lens: torch.Tensor | None = None  # [R] i32, as `Provider.tot_seq_lens` gives them


def window_of(spec: AttentionSpec, causal: bool) -> tuple[int, int]:
    """A layer's window as kernels take it: keys to the left and right."""
    return (-1, -1) if spec.window_left < 0 else (spec.window_left, 0 if causal else -1)

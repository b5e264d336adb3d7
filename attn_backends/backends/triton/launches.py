"""Which rows of a step the decode kernel serves, and how prefill's serves the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from attn_backends.backends.triton.rules import mixed_splits
from attn_backends.backends.triton.tuning import TritonOptions
from attn_backends.backends.triton.workspace import mixed_decode_tokens
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.page_table import IntArray
from attn_backends.spec import AttentionSpec, KVCacheSpec


class Lens(NamedTuple):
    """A step's rows without padding, as the host knows them."""

    query_lens: IntArray
    seq_lens: IntArray  # or upper bounds

    @staticmethod
    def of(common: CommonAttentionMetadata) -> Lens:
        count = common.num_actual_reqs
        return Lens(common.query_lens_cpu.numpy()[:count], common.seq_lens_cpu.numpy()[:count])

    def rows_from(self, first: int) -> Lens:
        """Rows from `first` on."""
        return Lens(self.query_lens[first:], self.seq_lens[first:])

    def longest(self, max_model_len: int) -> Lens:
        """The longest that can be, for a graph, whose launches do not depend on lengths."""
        return self._replace(seq_lens=np.full_like(self.seq_lens, max_model_len))


class Launches(NamedTuple):
    """Which rows the decode kernel serves, and how prefill's serves the others."""

    num_decodes: int  # rows that count as such, whatever serves them
    num_decode_rows: int
    max_decode_len: int
    prefill: dict[str, Any]  # fields of TritonMetadata


NO_PREFILL: dict[str, Any] = {
    "num_upcast_keys": 0, "upcast_rows": (), "prefill_share": None, "decode_sms": None, "prefill_splits": None,
    "short_tile": None, "hopper_tile": None, "prefills_are_prompts": False,
}  # fmt: skip


def mixed_launches(
    spec: AttentionSpec, cache: KVCacheSpec, options: TritonOptions | None, device: torch.device, num_tokens: int
) -> Launches:  # fmt: skip
    """Launches of a graph of mixed batches: both kernels get all rows, and lists that the device makes say which are
    whose."""
    splits = mixed_splits(spec, cache, options, device)
    return Launches(0, 0, min(mixed_decode_tokens(spec), num_tokens), {**NO_PREFILL, "prefill_splits": splits})

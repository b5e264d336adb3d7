"""Decode rows in parts of bounded size: a part's slots, and what hides keys, shared by all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.backends.mla.metadata import DecodeRows
from attn_backends.backends.mla.state import MLAState
from attn_backends.backends.mla.torch_mla.options import TorchMLAOptions, graph_max_seq_len
from attn_backends.spec import MLASpec


@dataclass(frozen=True)
class Part:
    """Decode rows that are gathered together, each with as many keys as the longest."""

    rows: slice
    slots: torch.Tensor  # [num_rows * num_keys] i64; a row with fewer keys repeats its last, which the bias hides
    bias: torch.Tensor  # [num_rows, query_len, 1, num_keys]: 0, or -inf for a key that the token does not see


class TorchMLAState(MLAState):
    backend_name = "TORCH_MLA"

    def make_prefill(self, spec: MLASpec) -> None:
        """Prefills are in plain torch too."""

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> tuple[Part, ...]:
        pieces = tuple(self._parts(spec, rows))
        for part, old in zip(pieces, held or (), strict=held is not None):
            old.slots.copy_(part.slots)
            old.bias.copy_(part.bias)
        return held or pieces

    def _parts(self, spec: MLASpec, rows: DecodeRows) -> Iterator[Part]:
        """The rows in parts. In a graph the parts' shapes follow from the limits alone."""
        options = self.options or TorchMLAOptions()
        in_graph = rows.idle is not None
        longest = graph_max_seq_len(options, self.limits) if in_graph else int(rows.seq_lens_cpu.max())
        key_bytes = spec.latent_dim * spec.dtype.itemsize
        at_once = max(1, options.gather_together_bytes // (longest * key_bytes))
        for first in range(0, rows.num_rows, at_once):
            part = slice(first, min(first + at_once, rows.num_rows))
            num_keys = longest if in_graph else int(rows.seq_lens_cpu[part].max())
            yield self._part(spec, rows, part, num_keys)

    def _part(self, spec: MLASpec, rows: DecodeRows, part: slice, num_keys: int) -> Part:
        page_size, seq_lens = self.cache.page_size, rows.seq_lens[part, None].long()
        keys = torch.arange(num_keys, device=self.device)
        positions = torch.minimum(keys, seq_lens - 1).clamp_(min=0)  # [rows, num_keys]
        slots = rows.page_table[part].gather(1, positions // page_size).long() * page_size + positions % page_size
        slots = slots.masked_fill(seq_lens == 0, 0)  # no page of a padded row is anybody's
        last_seen = seq_lens - rows.query_len + torch.arange(rows.query_len, device=self.device)  # [rows, query_len]
        hidden = keys > last_seen[:, :, None, None]  # [rows, query_len, 1, num_keys]
        bias = torch.zeros(hidden.shape, dtype=spec.dtype, device=self.device)
        return Part(part, slots.view(-1), bias.masked_fill_(hidden, float("-inf")))

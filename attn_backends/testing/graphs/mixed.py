"""Graphs of mixed batches over an engine's tensors: rows without tokens, tokens of no row, any page behind a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.page_table import PAD_SLOT
from attn_backends.graphs.inputs import HeldTensors
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.graphs.harness import CapturedStep, make_recorder
from attn_backends.testing.harness import Layer

JUNK_PAGE = -1  # behind a row's own pages


def engine_tensors(rows: int, tokens: int, pages: int, device: torch.device | str) -> HeldTensors:
    """With room for so many rows of so many pages; the page table is a part of a wider one."""
    held = HeldTensors.make(rows, tokens, pages + 4, torch.device(device))
    return replace(held, page_table=held.page_table[:, 2:-1])


def put_pages(table: torch.Tensor, places: Sequence[int], own: CommonAttentionMetadata) -> None:
    """The rows' own pages, and no more of them than their lengths need."""
    for place, row, length in zip(places, own.page_table.cpu(), own.seq_lens_cpu.tolist(), strict=True):
        used = -(-length // own.page_size)
        table[place, :used] = row[:used]


@dataclass
class MixedFiller:
    """Writes each batch into an engine's tensors, and makes it of views of these: rows without tokens stand among its
    own and behind them, tokens of no row behind all."""

    held: HeldTensors
    num_tokens: int  # of the graph

    def __call__(self, batch: Batch, num_rows: int, _query_len: int) -> CommonAttentionMetadata:
        own, held = batch.common(), self.held
        places = sorted(Random(own.num_tokens).sample(range(num_rows), len(batch.rows)))
        query_lens, seq_lens = (torch.zeros(num_rows, dtype=torch.int32, device="cpu") for _ in range(2))
        query_lens[places], seq_lens[places] = own.query_lens_cpu, own.seq_lens_cpu
        starts = torch.nn.functional.pad(query_lens.cumsum(0, dtype=torch.int32), (1, 0))
        table = torch.full(held.page_table.shape, JUNK_PAGE, dtype=torch.int32, device="cpu")
        put_pages(table, places, own)
        held.page_table.copy_(table)
        held.seq_lens[:num_rows] = seq_lens.to(batch.device)
        held.query_start_loc[: num_rows + 1] = starts.to(batch.device)
        held.slot_mapping.fill_(PAD_SLOT)
        held.slot_mapping[: len(own.slot_mapping)] = own.slot_mapping
        contexts = torch.zeros(num_rows, dtype=torch.int32, device="cpu")
        contexts[places] = own.context_lens_cpu
        return CommonAttentionMetadata.from_tensors(
            own.page_size, held.query_start_loc[: num_rows + 1], starts, held.seq_lens[:num_rows], seq_lens,
            held.page_table[:num_rows], held.slot_mapping[: self.num_tokens] if own.num_new_kv else None,
            num_tokens=self.num_tokens, context_lens_cpu=contexts, for_graph=True, is_mixed=True,
        )  # fmt: skip


def capture_mixed(
    layers: Sequence[Layer], examples: Sequence[Batch], held: HeldTensors, size: tuple[int, int], shared: bool = False
) -> CapturedStep:
    """A step of layers that share a state, captured for so many rows and tokens; batches of these or fewer, in rows of
    any query lengths, can be put in.

    Args:
        held: an engine's tensors, with room for the rows and tokens.
        shared: the graph reads them in place.
    """
    state, (num_rows, num_tokens) = layers[0].state, size
    state.hold_graph_buffers(len(held.seq_lens), held if shared else None)
    clone, recorder = state.mixed_graph_clone(*size), make_recorder(examples[0].device)
    return CapturedStep(layers, clone, examples, num_rows, 0, recorder, MixedFiller(held, num_tokens), num_tokens)

"""One `generate` or `stream` call: whether it goes on, and what of it the device has been given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from inspect import GEN_CLOSED, getgeneratorstate

import torch

from attn_backends.engine.outputs import Stats, TextChunk
from attn_backends.engine.request import Request, ScheduledBatch
from attn_backends.engine.runner import ModelRunner
from attn_backends.engine.sampler import PendingTokens, Sampler

Chunks = Generator[TextChunk, None, None]


@dataclass(frozen=True)
class Launch:
    """A batch whose steps the device has been given."""

    batch: ScheduledBatch
    sampled: Sequence[Request]
    last_tokens: torch.Tensor  # [num_rows] i64, on the device
    tokens: PendingTokens


def launched(
    runner: ModelRunner, sampler: Sampler, stats: Stats, batch: ScheduledBatch, logits: torch.Tensor
) -> Launch:
    """Sample, and run the other steps of a batch whose first gave these logits. Nobody waits for the device."""
    sampled, num_ahead = batch.sampled, batch.num_ahead
    each = [sampler.choose(logits, sampled, num_ahead)]
    for further in range(1, batch.num_steps):
        logits = runner.run_next(each[-1][0])
        each.append(sampler.choose(logits, sampled, num_ahead + further))
    stats.num_steps += batch.num_steps
    tokens, largest = zip(*each, strict=True)
    return Launch(batch, sampled, tokens[-1], PendingTokens(tokens, largest))


class ChunkCall:
    """A generator of chunks, known by a weak reference: one that nobody holds is closed at once."""

    def __init__(self) -> None:
        self._chunks: Callable[[], Chunks | None] = lambda: None

    @property
    def goes_on(self) -> bool:
        """Whether it can give more. One that was interrupted cannot, wherever it was."""
        chunks = self._chunks()
        return chunks is not None and getgeneratorstate(chunks) != GEN_CLOSED

    def of(self, chunks: Chunks) -> Chunks:
        """The same generator, as the one that this is about."""
        self._chunks = weakref.ref(chunks)
        return chunks

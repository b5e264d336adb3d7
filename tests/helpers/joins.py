"""What launches whose programs meet leave where these count."""

from __future__ import annotations

import torch

from attn_backends.backends.triton.kernels.split_joins import ARRIVED, HAVE_BEGUN, JOIN_WORDS, LAUNCHES


def are_at_rest(counters: torch.Tensor) -> bool:
    """Whether the next launch can count: nobody has begun, and the word that it is to arrive at is 0."""
    words = counters.view(-1, int(JOIN_WORDS.value))
    arrived = words.gather(1, ARRIVED.value + words[:, LAUNCHES.value, None].long() % 2)
    return not words[:, HAVE_BEGUN.value].any() and not arrived.any()

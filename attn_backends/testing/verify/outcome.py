"""What became of a case, and how a step's results are compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.harness import Expected, Result, lse_off_by, output_error


class Mismatch(AssertionError):
    """A result that is not as it should be."""


@dataclass
class Outcome:
    """One case: what was compared, how near it was, and what was found."""

    seed: int
    kind: str
    kinds: Counter[str] = field(default_factory=Counter)  # steps, by kind
    refused: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)  # largest error relative to its tolerance, by what it is of
    finding: str | None = None
    values: list[dict[str, Any]] = field(default_factory=list)  # declared ones, together; of a case that passed whole
    seconds: float = 0.0

    def note(self, name: str, error: float, allowed: float, what: str) -> None:
        """Keep an error if it is the worst.

        Raises:
            Mismatch: it is above what is allowed.
        """
        if not error <= allowed:
            raise Mismatch(f"{what}: the {name} is off by {error:.2e}; allowed {allowed:.0e}")
        self.worst[name] = max(self.worst.get(name, 0.0), error / allowed)


def compare(outcome: Outcome, result: Result, batch: Batch, expected: Expected, what: str) -> None:
    """A step's output and LSE against the reference, and zeros and -inf in padded rows.

    Raises:
        Mismatch: they differ; says in what.
    """
    out, lse = expected
    live = len(out)
    if result.output.dtype != batch.spec.dtype or len(result.output) < live:
        raise Mismatch(f"{what}: the output is {list(result.output.shape)} {result.output.dtype}")
    dtype = str(batch.spec.dtype).removeprefix("torch.")
    cached = str(batch.spec.cache_dtype).removeprefix("torch.")
    allowed = batch.tolerance
    outcome.note(f"{dtype} output over {cached}", output_error(result.output[:live], out), allowed, what)
    if not bool((result.output[live:] == 0).all()):
        raise Mismatch(f"{what}: padded rows of the output are not zero")
    if result.lse is not None:
        error, allowed = lse_off_by(result.lse[:live], lse, batch)
        outcome.note(f"{dtype} lse over {cached}", error, allowed, what)
        if not bool((result.lse[live:] == -torch.inf).all()):
            raise Mismatch(f"{what}: the lse of padded rows is not -inf")

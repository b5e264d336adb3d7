"""What became of a case, and how a step's results are compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_backends.kv_cache import KVCache
from attn_backends.spec import FP8_DTYPES
from attn_backends.testing.batches import Batch, as_bits
from attn_backends.testing.cases import load_cases
from attn_backends.testing.harness import Expected, Result, lse_error, output_error, slot_bytes

_ULP = {1: 0.26, 2: 2**-7, 4: 2**-22, 8: 2**-50}  # of a stored number, by its bytes; e5m2 is the coarsest of 8 bits


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
    seconds: float = 0.0

    def note(self, name: str, error: float, allowed: float, what: str) -> None:
        """Keep an error if it is the worst.

        Raises:
            Mismatch: it is above what is allowed.
        """
        if not error <= allowed:
            raise Mismatch(f"{what}: the {name} is off by {error:.2e}; allowed {allowed:.0e}")
        self.worst[name] = max(self.worst.get(name, 0.0), error / allowed)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return dict(vars(self))


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
    # torch's attention takes ALiBi's bias in the layer's dtype, where slopes that are no powers of two are rounded.
    coarse = batch.spec.alibi_slopes is not None and batch.spec.dtype is torch.float16
    allowed = batch.tolerance * (2 if coarse else 1)
    outcome.note(f"{dtype} output over {cached}", output_error(result.output[:live], out), allowed, what)
    if not bool((result.output[live:] == 0).all()):
        raise Mismatch(f"{what}: padded rows of the output are not zero")
    if result.lse is not None:
        allowed = max(allowed, load_cases().tolerance(torch.float32))
        outcome.note(f"{dtype} lse over {cached}", lse_error(result.lse[:live], lse), allowed, what)
        if not bool((result.lse[live:] == -torch.inf).all()):
            raise Mismatch(f"{what}: the lse of padded rows is not -inf")


def compare_pools(kv_cache: KVCache, expected: KVCache, exact: bool, what: str) -> None:
    """A pool after a step: the new slots, and every other byte as it was.

    Args:
        exact: byte for byte. Without, finite numbers may differ by one unit in the last place, as scales that are no
            powers of two are divided by in one way or another.

    Raises:
        Mismatch: it is not as it should be; says in which slots.
    """
    for name, got, want in zip(kv_cache._fields, kv_cache, expected, strict=True):
        differs = (slot_bytes(got) != slot_bytes(want)).any(dim=1)
        if not exact and bool(differs.any()):
            differs &= ~_near(got, want)
        if bool(differs.any()):
            slots = differs.nonzero().flatten().tolist()
            raise Mismatch(f"{what}: {len(slots)} slots of the {name} cache are not as they should be: {slots[:8]}")


def _near(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:  # [num_slots] bool
    one, other = (tensor.double().flatten(0, 1).flatten(1) for tensor in (got, want))
    ulp = _ULP[got.itemsize]
    tiny = 2.0**-14 if got.dtype in FP8_DTYPES else 0.0  # subnormal numbers are equally far apart
    near = ((one - other).abs() <= ulp * other.abs() + tiny).all(dim=1)
    same = as_bits(got).flatten(0, 1).flatten(1) == as_bits(want).flatten(0, 1).flatten(1)
    return near | same.all(dim=1)

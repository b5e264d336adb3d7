"""What outputs say of a capability: those with it, those without, those of a near miss, or others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from attn_backends.spec import MLASpec
from attn_backends.testing.cases.batches import Batch, Row, stored
from attn_backends.testing.harness import Expected, Result, lse_off_by, output_error

_FAR = 4.0  # tolerances that tell outputs with and without a capability apart


@dataclass(frozen=True)
class Supposition:
    """What outputs would be if a backend did something else: in words, and a batch that has them."""

    words: str
    batch: Batch
    is_absence: bool = False  # the capability, or the argument, has no effect at all

    @cached_property
    def expected(self) -> Expected:
        return self.batch.expected()


@dataclass(frozen=True)
class Drawn:
    """A batch, what is right for it, and what would be wrong in a way that has words."""

    batch: Batch
    suppositions: Sequence[Supposition] = ()

    @cached_property
    def expected(self) -> Expected:
        return self.batch.expected()

    @property
    def is_decisive(self) -> bool:
        """Whether right outputs differ from those of each supposition by more than any rounding."""
        return all(
            output_error(each.expected[0], self.expected[0]) > _FAR * self.batch.tolerance for each in self.suppositions
        )

    def wrong(self, result: Result) -> Supposition | str | None:
        """None for outputs, and an LSE, that are right; else the supposition they fit, or how far they are off."""
        found = _mismatch(result, self.expected, self.batch)
        if found is None:
            return None
        fitting = (each for each in self.suppositions if not _mismatch(result, each.expected, self.batch))
        return next(fitting, found)

    def failure(self, run: Callable[[], Result]) -> str | None:
        """In words what is wrong with the result of a run, or what it raises; None: nothing."""
        try:
            found = self.wrong(run())
        except Exception as error:  # whatever a kernel library raises is the finding
            return f"{type(error).__name__}: {error}"
        return None if found is None else str(found)


def _mismatch(result: Result, expected: Expected, batch: Batch) -> str | None:
    out, lse = expected
    error, allowed = output_error(result.output[: len(out)], out), batch.tolerance
    if error > allowed:
        return f"the output is off by {error:.2g} (relative, worst token; allowed {allowed:.0e})"
    if bool((result.output[len(out) :] != 0).any()):
        return "outputs of padded rows are not zeros"
    if result.lse is None:
        return None
    given = result.lse[: len(lse)]
    if bool(given.isnan().any()):
        return "the LSE is not written"
    error, allowed = lse_off_by(given, lse, batch)
    return f"the LSE is off by {error:.2g}; allowed {allowed:.0e}" if error > allowed else None


def as_layer(batch: Batch, **changes: Any) -> Batch:
    """The batch of a layer that differs in this."""
    spec = replace(batch.spec, **changes)
    return replace(batch, spec=spec, sinks=batch.sinks if spec.sinks else None)


def as_scaled(batch: Batch, k_scale: float, v_scale: float, writes_too: bool = False) -> Batch:
    """The batch as it is attended if what its cache holds is read with other scales, or new keys are written so too."""
    was = (batch.k_scale, batch.k_scale if isinstance(batch.spec, MLASpec) else batch.v_scale)

    def reread(real: torch.Tensor, row: Row, old: float, new: float) -> torch.Tensor:
        dtype, cached = batch.spec.cache_dtype, row.num_cached
        written = stored(real[cached:], dtype, new if writes_too else old)
        return torch.cat([stored(real[:cached], dtype, old), written]).double() * new

    rows = [
        replace(row, key=reread(row.key, row, was[0], k_scale), value=reread(row.value, row, was[1], v_scale))
        for row in batch.rows
    ]
    return replace(batch, rows=tuple(rows), k_scale=k_scale, v_scale=v_scale)

"""How long backends were measured to take: among those, AUTO tries the fastest first.

`measured.json` is written by benchmarks/rank_backends.py from results of the benchmarks: one layer's decode on a GPU. A
layer and load that is not in it takes the nearest that is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from attn_backends.entries import BackendEntry
    from attn_backends.spec import PlanGroup


class Load(NamedTuple):
    """What a decode step is expected to be, at most."""

    num_requests: int = 64
    num_keys: int = 4096  # of each


@dataclass(frozen=True)
class Measured:
    """Times of backends, the fastest first, at one shape."""

    is_mla: bool
    heads: tuple[int, int, int]  # num_qo_heads, num_kv_heads, head_dim
    load: Load
    us: dict[str, float]
    where: str  # GPU and date

    def __str__(self) -> str:
        """
        >>> print(Measured(False, (32, 8, 128), Load(64, 4096), {"TRITON": 248.9, "FLASHINFER": 257.7}, "an H200"))
        TRITON 248.9 us, FLASHINFER 257.7 us: a layer's decode of 64 x 4096 keys, 32/8 heads of 128, on an H200
        """
        times = ", ".join(f"{name} {us:,.1f} us" for name, us in self.us.items())
        shape = "{} x {} keys, {}/{} heads of {}".format(*self.load, *self.heads)
        return f"{times}: a layer's decode of {shape}, on {self.where}"


def nearest(groups: Sequence[PlanGroup[Any]], load: Load) -> Measured | None:
    """What was measured nearest to the largest group's layers, by the ratios of sizes; None: nothing of its kind."""
    spec = max(groups, key=lambda group: len(group.layers)).spec
    is_mla = type(spec).__name__ == "MLASpec"  # its class loads torch
    asked = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, *load)

    def distance(row: Measured) -> float:
        return sum(abs(math.log2(size / wanted)) for size, wanted in zip((*row.heads, *row.load), asked, strict=True))

    return min((row for row in _table() if row.is_mla == is_mla), key=distance, default=None)


def fastest_first(entries: Iterable[BackendEntry], measured: Measured | None) -> list[BackendEntry]:
    """Entries in their order, but for the measured ones, which share their places by their times."""
    ordered = list(entries)
    if measured is None:
        return ordered
    places = [i for i, entry in enumerate(ordered) if entry.name in measured.us]
    by_time = sorted((ordered[i] for i in places), key=lambda entry: measured.us[entry.name])
    for place, entry in zip(places, by_time, strict=True):
        ordered[place] = entry
    return ordered


@cache
def _table() -> tuple[Measured, ...]:
    found = json.loads(resources.files(__package__).joinpath("measured.json").read_text())
    return tuple(
        Measured(row["is_mla"], tuple(row["heads"]), Load(*row["load"]), row["us"], found["where"])
        for row in found["rows"]
    )

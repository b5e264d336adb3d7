"""How long backends were measured to take: on the device that was measured, AUTO tries the fastest of them first.

`measured.json` is written by benchmarks/tune/rank_backends.py from results of the benchmarks: one layer's decode on a
GPU. A layer and load that is not in it takes the nearest that is. It says nothing of other GPUs: they go by priority,
or by the user's own times (`user_table`), which come before the shipped ones everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_backends.registry.phases import phased_name, phases_of

if TYPE_CHECKING:
    from attn_backends.registry.table import BackendEntry
    from attn_backends.spec import PlanGroup


PAIR_PAYS = 1.05  # two backends have two plans a mixed step: less than this is not worth it


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
    us: dict[str, float]  # of decode
    where: str  # device and date
    prefill_us: dict[str, float] = field(default_factory=dict)  # means over prompts; none where nobody measured them

    def knows(self, name: str) -> bool:
        """Whether a backend, or both of a pair, were measured."""
        return all(each in self.us for each in phases_of(name) or (name,))

    def cost(self, name: str) -> float:
        """What backends are ordered by: the time of decode, times that of prefill where all have it."""
        prefill, decode = phases_of(name) or (name, name)
        return self.us[decode] * (self.prefill_us[prefill] if self._has_phases else 1.0)

    @property
    def _has_phases(self) -> bool:
        return self.us.keys() == self.prefill_us.keys()

    def pairs(self) -> list[str]:
        """Two backends, one a phase, that are faster together than either alone by `PAIR_PAYS`, the fastest first."""
        if not self._has_phases:
            return []
        names = [phased_name(one, other) for one in self.us for other in self.us if one != other]
        found = [name for name in names
                 if PAIR_PAYS * self.cost(name) < min(map(self.cost, phases_of(name) or ()))]  # fmt: skip
        return sorted(found, key=self.cost)

    def __str__(self) -> str:
        """
        >>> print(Measured(False, (32, 8, 128), Load(64, 4096), {"TRITON": 248.9, "FLASHINFER": 257.7}, "an H200"))
        TRITON 248.9 us, FLASHINFER 257.7 us: a layer's decode of 64 x 4096 keys, 32/8 heads of 128, on an H200
        """
        times = ", ".join(f"{name} {us:,.1f} us" for name, us in self.us.items())
        shape = "{} x {} keys, {}/{} heads of {}".format(*self.load, *self.heads)
        prompts = ", ".join(f"{name} {us:,.1f} us" for name, us in self.prefill_us.items())
        prompts = f"; of prompts {prompts}" if prompts else ""
        return f"{times}: a layer's decode of {shape}{prompts}, on {self.where}"


def nearest(groups: Sequence[PlanGroup[Any]], load: Load, gpu: str | None) -> Measured | None:
    """What was measured nearest to the largest group's layers, by the ratios of sizes.

    None for layers of a kind that was not measured, and for a GPU that is not the measured one.

    Args:
        gpu: the GPU's name, as torch says it; None where there is none.
    """
    if gpu != _table().gpu:
        return None
    from attn_backends.spec import MLASpec  # it loads torch

    spec = max(groups, key=lambda group: len(group.layers)).spec
    is_mla = isinstance(spec, MLASpec)
    asked = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, *load)

    rows = (row for row in _table().rows if row.is_mla == is_mla)
    return min(rows, key=lambda row: apart((*row.heads, *row.load), asked), default=None)


def apart(sizes: Sequence[int], others: Sequence[int]) -> float:
    """Ratios of sizes, in powers of two."""
    return sum(abs(math.log2(one / other)) for one, other in zip(sizes, others, strict=True))


def unmeasured(gpu: str | None) -> str | None:
    """Why AUTO goes by priority on a GPU, in words; None on the measured one, and where there is no GPU.

    >>> unmeasured("NVIDIA A100-SXM4-80GB")
    'no times of NVIDIA A100-SXM4-80GB are shipped, those of NVIDIA H200 alone'
    """
    measured = _table().gpu
    return None if gpu in (None, measured) else f"no times of {gpu} are shipped, those of {measured} alone"


def fastest_first(entries: Iterable[BackendEntry], measured: Measured | None) -> list[BackendEntry]:
    """Entries in their order, but for the measured ones, which share their places by their times."""
    ordered = list(entries)
    if measured is None:
        return ordered
    places = [i for i, entry in enumerate(ordered) if entry.name in measured.us]
    by_time = sorted((ordered[i] for i in places), key=lambda entry: measured.cost(entry.name))
    for place, entry in zip(places, by_time, strict=True):
        ordered[place] = entry
    return ordered


def with_pairs(entries: Iterable[BackendEntry], measured: Measured | None) -> list[str]:
    """The names of ordered entries, and before a measured one each pair that beats it by `PAIR_PAYS`."""
    ordered, pairs = [], [] if measured is None else measured.pairs()
    for name in (entry.name for entry in entries):
        if measured is not None and measured.knows(name):
            while pairs and PAIR_PAYS * measured.cost(pairs[0]) < measured.cost(name):
                ordered.append(pairs.pop(0))
        ordered.append(name)
    return ordered


class _Table(NamedTuple):
    gpu: str  # as torch names it
    rows: tuple[Measured, ...]


@cache
def _table() -> _Table:
    found = json.loads(resources.files(__package__).joinpath("measured.json").read_text(encoding="utf-8"))
    where = f"{found['gpu']} ({found['dates']})"
    rows = (Measured(row["is_mla"], tuple(row["heads"]), Load(*row["load"]), row["us"], where) for row in found["rows"])
    return _Table(found["gpu"], tuple(rows))

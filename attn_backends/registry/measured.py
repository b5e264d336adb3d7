"""How long backends were measured to take: on the device that was measured, AUTO tries the fastest of them first.

`measured.json` is written by benchmarks/tune/rank_backends.py from results of the benchmarks: one layer's decode, on
each GPU that was measured. A layer and load that is not in it takes the nearest that is. It says nothing of other GPUs:
they go by priority, or by the user's own times (`user_table`), which come before the shipped ones everywhere.
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

    None for layers of a kind that was not measured, and for a GPU that was not.

    Args:
        gpu: the GPU's name, as torch says it; None where there is none.
    """
    rows = [row for row in _tables().get(gpu or "", ()) if row.is_mla == _is_mla(groups)]
    if not rows:
        return None
    spec = _commonest(groups)
    asked = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, *load)
    return min(rows, key=lambda row: apart((*row.heads, *row.load), asked))


def _commonest(groups: Sequence[PlanGroup[Any]]) -> Any:
    """The layer of which there are most."""
    return max(groups, key=lambda group: len(group.layers)).spec


def _is_mla(groups: Sequence[PlanGroup[Any]]) -> bool:
    from attn_backends.spec import MLASpec  # it loads torch

    return isinstance(_commonest(groups), MLASpec)


def apart(sizes: Sequence[int], others: Sequence[int]) -> float:
    """Ratios of sizes, in powers of two."""
    return sum(abs(math.log2(one / other)) for one, other in zip(sizes, others, strict=True))


def unmeasured(gpu: str | None, groups: Sequence[PlanGroup[Any]] = ()) -> str | None:
    """Why AUTO goes by priority on a GPU, in words; None on a measured one, and where there is no GPU.

    Args:
        groups: layers, of whose kind there may be no times; none: of any.

    >>> unmeasured("NVIDIA A100-SXM4-80GB")
    'no times of NVIDIA A100-SXM4-80GB are shipped, those of NVIDIA H200 and NVIDIA H100 80GB HBM3 alone'
    """
    if gpu is None:
        return None
    if gpu not in _tables():
        return f"no times of {gpu} are shipped, those of {' and '.join(_tables())} alone"
    if not groups or any(row.is_mla == _is_mla(groups) for row in _tables()[gpu]):
        return None
    return f"no times of {'multi-head latent attention' if _is_mla(groups) else 'such layers'} on {gpu} are shipped"


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


@cache
def _tables() -> dict[str, tuple[Measured, ...]]:
    """What was measured, by GPUs as torch names them."""
    text = resources.files(__package__).joinpath("measured.json").read_text(encoding="utf-8")
    return {
        gpu: tuple(
            Measured(row["is_mla"], tuple(row["heads"]), Load(*row["load"]), row["us"], f"{gpu} ({found['dates']})")
            for row in found["rows"]
        )
        for gpu, found in json.loads(text).items()
    }

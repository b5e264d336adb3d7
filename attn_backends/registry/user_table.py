"""The user's own times, as `attn-backends bench` measures them: a file a device, by which AUTO orders backends there.

They hold for the versions of packages that they were measured with; with others they are stale, and are not used.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean  # each load counts alike, however long it takes
from typing import TYPE_CHECKING, Any, Literal

from attn_backends.registry.measured import Load, Measured, apart
from attn_backends.registry.table import installed_version

if TYPE_CHECKING:
    from attn_backends.spec import AttentionSpec, PlanGroup

logger = logging.getLogger(__name__)
AGAIN = "run attn-backends bench again"


@dataclass(frozen=True)
class Layer:
    """What times are looked up by: layers of another kind or dtype have none, of another shape the nearest."""

    is_mla: bool
    heads: tuple[int, int, int]  # num_qo_heads, num_kv_heads, head_dim
    dtype: str
    cache_dtype: str
    window_left: int

    @classmethod
    def of(cls, spec: AttentionSpec) -> Layer:
        from attn_backends.spec import MLASpec  # it loads torch

        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim)
        dtype, cache_dtype = (str(each).removeprefix("torch.") for each in (spec.dtype, spec.cache_dtype))
        return cls(isinstance(spec, MLASpec), heads, dtype, cache_dtype, spec.window_left)

    def distance(self, other: Layer) -> float:
        """Ratios of sizes, in powers of two; infinite for layers of another kind or dtype."""
        kinds = ((layer.is_mla, layer.dtype, layer.cache_dtype) for layer in (self, other))
        if len(set(kinds)) > 1:
            return math.inf
        windows = float((self.window_left < 0) != (other.window_left < 0))
        return windows + apart(self.heads, other.heads)


@dataclass(frozen=True)
class Row:
    """Times of backends at one load of one layer, in microseconds."""

    layer: Layer
    phase: Literal["prefill", "decode"]
    load: Load
    us: dict[str, float]


@dataclass(frozen=True)
class UserTable:
    """One device's file."""

    device: str
    date: str  # of the latest run, YYYY-MM-DD
    versions: dict[str, str | None]  # by package, of every backend that could run there; None: it was not installed
    rows: tuple[Row, ...]

    def stale(self) -> str | None:
        """What is installed otherwise than it was, in words; None if nothing is."""
        here = installed_versions(self.versions)
        changed = [f"{name} {here[name] or 'is not installed'} (then {then or 'not installed'})"
                   for name, then in self.versions.items() if here[name] != then]  # fmt: skip
        return ", ".join(changed) or None

    def measured(self, groups: Sequence[PlanGroup[Any]], load: Load) -> Measured | None:
        """The decode times nearest to the largest group's layers and load, and the means of that layer's prompts."""
        asked = Layer.of(max(groups, key=lambda group: len(group.layers)).spec)
        decodes = [row for row in self.rows if row.phase == "decode" and asked.distance(row.layer) < math.inf]
        if not decodes:
            return None
        row = min(decodes, key=lambda row: asked.distance(row.layer) + apart(row.load, load))
        prompts = [each.us for each in self.rows if each.phase == "prefill" and each.layer == row.layer]
        everywhere = [name for name in row.us if prompts and all(name in us for us in prompts)]
        means = {name: geometric_mean([us[name] for us in prompts]) for name in everywhere}
        where = f"{self.device} ({self.date}, by attn-backends bench)"
        by_time = dict(sorted(row.us.items(), key=lambda pair: pair[1]))
        return Measured(asked.is_mla, row.layer.heads, row.load, by_time, where, means)


def table_folder() -> Path:
    """Where tables are kept: `measured` in the cache folder."""
    from attn_backends.machine import cache_folder  # it loads torch

    return cache_folder() / "measured"


def table_path(device: str) -> Path:
    """The file of a device's times."""
    return table_folder() / f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The versions of packages here; None for one that is not installed."""
    return {name: installed_version(name) for name in packages}


def read_table(device: str | None) -> UserTable | None:
    """A device's own times, stale or not; None if there are none. A file that cannot be read is as if absent."""
    try:
        path = table_path(device) if device else None
        if path is None or not path.exists():
            return None
        from pydantic import TypeAdapter

        return TypeAdapter(UserTable).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        logger.warning("the times of %s cannot be read (%r): %s", device, error, AGAIN)
        return None


def save_table(table: UserTable) -> Path:
    """Write a device's times; those of other layers, if of the same versions, stay.

    Raises:
        OSError: the cache folder cannot be written.
    """
    known = read_table(table.device)
    if known is not None and known.versions == table.versions:
        measured = {row.layer for row in table.rows}
        others = tuple(row for row in known.rows if row.layer not in measured)
        table = UserTable(table.device, table.date, table.versions, others + table.rows)
    path = table_path(table.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}.tmp")
    written.write_text(json.dumps(asdict(table), indent=1) + "\n", encoding="utf-8")
    written.replace(path)
    return path

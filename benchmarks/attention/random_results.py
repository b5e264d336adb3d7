"""A file of random shapes' results: continued where it ends, and merged with others of the same GPU and code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attn_backends
from benchmarks.attention.shape_draws import purpose
from benchmarks.lib.gpu_harness import PACKAGES, installed
from benchmarks.lib.harness import write

SAME = ("purpose", "of", "gpu", "versions", "source", "bounds")  # in all parts of one result
TITLE = "attention at shapes drawn at random, each backend's time over that of the best of all others"


def source() -> str:
    """A sum over the package's code: what other code took is another result."""
    package, found = Path(attn_backends.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


class Results:
    """Rows by the number of their shape, in a file that is written after each."""

    def __init__(
        self, path: Path, seeds: Sequence[int], of: str, bounds: str, again: bool = False, title: str = TITLE
    ) -> None:  # fmt: skip
        """
        Args:
            seeds: of one purpose.
            of: the backend that the report is of.
            bounds: a name for what limits the shapes.
            again: begin anew where a file is there.

        Raises:
            SystemExit: the file that is there is other seeds', or of other code.
        """
        self.path, self.rows, self.title = path, {}, title
        self.about = {"seed": [*seeds], "purpose": purpose(seeds[0]), "of": of, "bounds": bounds, "source": source()}
        if path.exists() and not again:
            self._continue(json.loads(path.read_text()))

    rows: dict[str, dict[str, Any]]

    def _continue(self, found: Mapping[str, Any]) -> None:
        for name in ("seed", "purpose", "of", "bounds", "source"):
            if found[name] != self.about[name]:
                raise SystemExit(
                    f"{self.path} has {name} {found[name]}, and this run {self.about[name]}: "
                    "name another file by --json, or begin anew by --again"
                )
        self.rows = {row["id"]: row for row in found["rows"]}

    def add(self, row: dict[str, Any]) -> None:
        self.rows[row["id"]] = row
        self.write()

    def write(self) -> Path:
        rows = sorted(self.rows.values(), key=lambda row: tuple(map(int, row["id"].split("/"))))
        return write(self.path.stem, self.title, rows, installed(*PACKAGES), self.path.parent, **self.about)


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of several; of a shape that is in two the first counts.

    Raises:
        ValueError: they are not of one kind; says in what they differ.
    """
    first = dict(parts[0])
    for part in parts[1:]:
        for name in SAME:
            if part[name] != first[name]:
                raise ValueError(f"results of {name} {first[name]!r} and {part[name]!r} do not add up to one")
    rows: dict[str, dict[str, Any]] = {}
    for part in parts:
        for row in part["rows"]:
            rows.setdefault(row["id"], row)
    by_number = sorted(rows.values(), key=lambda row: (row["seed"], row["index"]))
    seeds = sorted({seed for part in parts for seed in part["seed"]})
    return first | {"rows": by_number, "seed": seeds, "date": max(part["date"] for part in parts)}

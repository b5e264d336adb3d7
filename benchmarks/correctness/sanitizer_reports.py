"""What compute-sanitizer's logs say: reports, each once, told apart by tool, words and places in kernels.

A report of a place that `explained_reports.json` has with a reason is expected; all others are new.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "attn_backends"
EXPLAINED = HERE / "explained_reports.json"
MOST_LINES = 12  # of a report that are kept
_PREFIX = re.compile(r"^=========(?: (?P<body>.*))?$")
_PLACE = re.compile(r"(?:(Read|Write) access )?\bat (\S.*?)\+(0x[0-9a-f]+)(?: in ([^\s:]+):(\d+))?")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d+ hazards?")
_SUMMARY = re.compile(r"^(?:ERROR|RACECHECK|LEAK|INITCHECK|SYNCCHECK) SUMMARY: .*")
_NO_REPORT = ("COMPUTE-SANITIZER", "Target application returned an error", "Error: process didn't terminate")


class Place(NamedTuple):
    """An access that a report names."""

    access: str  # "Read", "Write" or ""
    kernel: str
    offset: str  # in its code, hexadecimal
    file: str  # "" where the kernel has no line numbers
    line: int

    @property
    def functions(self) -> frozenset[str]:
        """Ours that the line may be in: sources of one name may be several."""
        return functions_at(self.file, self.line) if self.file else frozenset()

    def is_of(self, known: dict[str, Any]) -> bool:
        """Whether it is such an access as an explained report names."""
        is_there = known["functions"] is None or not self.functions.isdisjoint(known["functions"])
        return known["kernel"] in self.kernel and is_there and self.access in known["accesses"]


class Report(NamedTuple):
    """One report of a tool."""

    lines: tuple[str, ...]

    @property
    def places(self) -> list[Place]:
        """Up to the host's frames, which say from where the kernel was launched."""
        found = [_PLACE.search(line) for line in self.lines if "Frame" not in line]
        return [Place(m[1] or "", m[2].split("(")[0], m[3], m[4] or "", int(m[5] or 0)) for m in found if m]

    @property
    def key(self) -> tuple[object, ...]:
        """The same for reports that differ in threads, blocks and addresses alone."""
        places = [(p.access, p.kernel, (p.file, p.line) if p.file else p.offset) for p in self.places]
        head = _PLACE.sub("", _NUMBERS.sub("", self.lines[0]))
        return head, *places

    def explanation(self, tool: str) -> str | None:
        """Why it is expected: one reason for all of its places."""
        return next((known["why"] for known in explained() if known["tool"] == tool and self._is(known)), None)

    def _is(self, known: dict[str, Any]) -> bool:
        """Whether it says the words of an explained report, and all of its places are such as that one names."""
        text, words, places = " ".join(self.lines), known.get("words", ()), self.places
        has_words = all(each in text for each in words)
        return bool(words or places) and has_words and all(place.is_of(known) for place in places)


class Log:
    """A log that a tool is still writing to."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._rest, self._lines = path, 0, "", list[str]()
        self.summaries: list[str] = []

    def new_reports(self, ended: bool = False) -> list[Report]:
        """Those that were completed since the last call; with the tool's end the last one too."""
        if self._path.exists():
            with self._path.open(errors="replace") as log:
                log.seek(self._read)
                self._rest += log.read()
                self._read = log.tell()
        *whole, self._rest = self._rest.split("\n")
        found = [report for line in whole for report in self._add(line)]
        return found + (list(self._completed()) if ended else [])

    def _add(self, line: str) -> Iterator[Report]:
        match = _PREFIX.match(line.rstrip())
        if match is None:  # what the program itself prints
            return
        body = match["body"] or ""
        if body.startswith("    "):
            if self._lines:
                self._lines.append(body.strip())
            return
        yield from self._completed()
        if _SUMMARY.match(body):
            self.summaries.append(body)
        elif body.strip() and not body.startswith(_NO_REPORT):
            self._lines = [body.strip()]

    def _completed(self) -> Iterator[Report]:
        if self._lines:
            yield Report(tuple(self._lines))
        self._lines = []


class Reports:
    """All reports of a run, each once, with how often it came and the case behind which it was first read."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], dict[str, Any]] = {}

    def add(self, tool: str, report: Report, backend: str, seed: int | None) -> None:
        row = self._found.setdefault((tool, *report.key), {
            "tool": tool, "backend": backend, "first seed": seed, "times": 0, "why": report.explanation(tool),
            "functions": sorted({name for place in report.places for name in place.functions}),
            "report": report.lines[:MOST_LINES],
        })  # fmt: skip
        row["times"] += 1

    def rows(self) -> list[dict[str, Any]]:
        """New ones first."""
        return sorted(self._found.values(), key=lambda row: (row["why"] is not None, row["tool"], -row["times"]))

    def counts(self, tool: str, backend: str) -> tuple[int, int]:
        """Of a tool and the backend that was first: reports that are new, and that are explained."""
        mine = [row for row in self._found.values() if (row["tool"], row["backend"]) == (tool, backend)]
        return sum(row["why"] is None for row in mine), sum(row["why"] is not None for row in mine)


@cache
def explained() -> list[dict[str, Any]]:
    """The reports that are expected: a tool, part of a kernel's name, the functions and accesses of places, words if
    the kernel alone does not tell them from others, and why. No functions: anywhere in a kernel that a library
    compiled."""
    known: list[dict[str, Any]] = json.loads(EXPLAINED.read_text())
    return known


@cache
def functions_at(file: str, line: int) -> frozenset[str]:
    """The innermost functions that a line lies in, of all our sources of that name."""
    inside = (_innermost(path.read_text(), line) for path in SOURCES.rglob(Path(file).name))
    return frozenset(name for name in inside if name)


def _innermost(source: str, line: int) -> str:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno).name if around else ""

"""How the `attn-backends` command shows things: tables on a terminal, whole lines in a pipe, JSON on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from attn_backends.cli.errors import Screen

if TYPE_CHECKING:
    from attn_backends.registry.support import Support
    from attn_backends.registry.verdicts import Explanation
    from attn_backends.testing.quick_check import CheckResult

_SETS = ("devices", "dtypes", "cache_dtypes", "head_dims", "page_sizes", "layouts", "attention_types")


def print_json(value: Any) -> None:
    """Values as JSON on standard output."""
    print(json.dumps(value, indent=2))


def print_list(found: Sequence[Support], auto_order: str) -> None:
    """One line a backend: can it be used here, and if not, what to type. Behind them, how AUTO orders them here."""
    rows = [
        (row.name, row.package or "", row.version or "", "yes" if row.usable else "no", row.reason or "", row.fix or "")
        for row in found
    ]
    console = _console()
    console.print(_table("backend", "package", "version", "usable here", "why not", "fix", rows=rows))
    console.print(f"AUTO tries them {escape(auto_order)}", highlight=False)


def print_support(found: Sequence[Support]) -> None:
    """One line a backend: what it honours and where that has run, in Markdown, to paste into the README."""
    rows = []
    for row in found:
        can = row.capabilities or {}
        flags = ", ".join(key for key, value in can.items() if value is True)
        rows.append(
            (row.name, *(_words(can[key]) if can else "?" for key in _SETS), flags, can.get("cuda_graph", "?"), row.ran)
        )
    titles = (*(key.replace("_", " ") for key in _SETS), "honours", "CUDA graphs", "ran on")
    _console().print(_table("backend", *titles, rows=rows, style=box.MARKDOWN))


def print_doctor(row: Support, results: Sequence[CheckResult], auto_order: str | None) -> None:
    """What a backend is, what it honours, how AUTO orders backends on its device, and how its checks went."""
    console = _console()
    package = " ".join(filter(None, [row.package or "no package", row.version]))
    console.print(f"{row.name}: {package}", highlight=False)
    if row.usable:
        console.print(f"device: {row.device}; AUTO orders backends there {escape(str(auto_order))}", highlight=False)
    else:
        console.print(f"[red]cannot be used here:[/red] {escape(row.reason or '')}", highlight=False)
    if row.fix:
        console.print(f"try: {escape(row.fix)}", highlight=False)
    if row.capabilities:
        console.print(_table("capability", "value", rows=[(key, _words(v)) for key, v in row.capabilities.items()]))
    if results:
        rows = [(result.name, "ok" if result.ok else "FAILED", result.detail) for result in results]
        console.print(_table("check against the reference", "result", "detail", rows=rows))


def print_explanation(explanation: Explanation, auto_order: str) -> None:
    """Every backend's verdict with its reasons, the one chosen, and how AUTO orders backends there."""
    rows = [
        (verdict.name, "yes" if verdict.usable else "no", str(verdict.cache.page_size) if verdict.cache else "",
         "\n".join(verdict.reasons))
        for verdict in explanation.verdicts
    ]  # fmt: skip
    console = _console()
    console.print(_table("backend", "serves every layer", "page size", "why not", rows=rows))
    console.print(f"chosen: {explanation.chosen or 'none'}\n{escape(explanation.reason)}", highlight=False)
    console.print(f"AUTO orders backends there {escape(auto_order)}", highlight=False)


def print_rows(*titles: str, rows: Sequence[Sequence[str]]) -> None:
    """A table."""
    _console().print(_table(*titles, rows=rows))


def _table(*titles: str, rows: Sequence[Sequence[str]], style: box.Box = box.ROUNDED) -> Table:
    table = Table(*titles, box=style)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def bar(console: Console, *, transient: bool = False) -> Progress:
    """A bar of work that takes long: what is being done, how much is done, and for how long."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=transient)


def _console() -> Console:
    """Standard output; a pipe or a file gets whole lines."""
    console = Screen()
    return console if console.is_terminal else Screen(width=800)


def _words(value: object) -> str:
    """A plain capability value, for a table."""
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

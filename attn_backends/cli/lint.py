"""The `lint` command: what a backend accepts and does not use, as text and as data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.markup import escape

from attn_backends.cli.errors import EXIT_FAILED, Screen, clear_errors
from attn_backends.cli.imports import import_modules
from attn_backends.cli.tables import print_json


def lint(
    target: Annotated[str, typer.Argument(help="A backend's name, or its class as package.module:Class.")],
    device: Annotated[str, typer.Option("--device", help="Device to run on: cpu, cuda, … or auto.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another number draws other batches.")] = 0,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="A module that registers backends; may be given again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find what a backend accepts and does not use. Takes seconds, and needs neither pytest nor a GPU.

    It runs small random layers with each declared capability, and compares them with what float64 says of layers with
    it and without; builds batches of every kind behind one another, and replays graphs; and reads the code for options,
    parameters, attributes and fields that nobody reads. The exit status is 1 if anything was found.
    """
    with clear_errors():
        from attn_backends.testing.lint.run import lint_backend
        from attn_backends.testing.lint.subject import Subject

        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a class that is not installed yet
        import_modules(imports or ())
        backend, options, chosen = _resolve(target, device)
        with _progress(backend.get_name()) as show:
            report = lint_backend(Subject(backend, chosen, seed), options, show)
    if as_json:
        print_json(report.to_dict())
    else:
        from attn_backends.testing.lint.finding import CODES

        screen = Screen(soft_wrap=True, highlight=False)
        for code in dict.fromkeys(found.code for found in report.findings):
            screen.print(f"[red]{code}[/red]: {CODES[code]}")
            for found in (each for each in report.findings if each.code == code):
                screen.print(f"  [bold]{escape(found.where)}[/bold]: {escape(found.what)}")
                screen.print(f"    {escape(found.hint)}")
        count = f"{len(report.findings)} finding{'' if len(report.findings) == 1 else 's'}"
        screen.print(f"{report.backend} on {report.device}: {count} in {len(report.checks)} checks")
    if report.findings:
        raise typer.Exit(EXIT_FAILED)


def _resolve(target: str, device: str) -> tuple[Any, Any, str]:
    """The class, its options model, and the device to run on.

    Raises:
        ValueError: no such backend, or it cannot run here; says what it lacks, and what to type.
        ImportError: its module, or its kernels, cannot be imported.
    """
    from attn_backends.registry import get_backend, get_entry
    from attn_backends.registry.support import choose_device, support
    from attn_backends.registry.table import import_target

    entry = _entry(target) if ":" in target else get_entry(target)
    row = support(entry)
    if not row.usable:
        triton = "; or let Triton interpret it: TRITON_INTERPRET=1 attn-backends lint …"
        raise ValueError(row.why_not + (triton if row.package == "triton" else ""))
    options = import_target(entry.options) if isinstance(entry.options, str) else entry.options
    return get_backend(entry.name), options, choose_device(row, device)


def _entry(target: str) -> Any:
    """The row of a class; one that is not registered gets a row for this process."""
    from attn_backends.registry import backends, register_backend
    from attn_backends.registry.table import import_target

    try:
        backend = import_target(target)
    except (AttributeError, ModuleNotFoundError) as error:
        raise ValueError(
            f"{target}: {error}; give package.module:Class of a backend, installed or below this folder"
        ) from error
    if not hasattr(backend, "get_name"):
        raise TypeError(f"{target} is {backend!r}, and no subclass of attn_backends.AttentionBackend")
    name = backend.get_name()
    if name not in backends:
        register_backend(name, backend)
    elif backends[name].target.rpartition(":")[2] != backend.__qualname__:
        raise ValueError(f"{target} calls itself {name}, which is {backends[name].target}: give it a name of its own")
    return backends[name]


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal which check runs."""
    console = Screen(stderr=True)
    if not console.is_terminal:
        yield lambda check: None
        return
    with console.status(f"{name}: …") as status:
        yield lambda check: status.update(f"{name}: {escape(check)}")

"""The `verify` command: random cases against the reference and guard bands, and what to type to repeat a failure."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn_backends.cli.errors import EXIT_INTERRUPTED, Screen, clear_errors
from attn_backends.cli.imports import import_modules
from attn_backends.cli.tables import bar

if TYPE_CHECKING:
    from attn_backends.testing.verify.campaign import Tally
    from attn_backends.testing.verify.covering import Planned
    from attn_backends.testing.verify.worker import Asked

EXIT_FOUND = 1
_DEFAULT_MINUTES = 5.0
_MOST_SHOWN = 10  # findings; the report has all of them
_LINE_EVERY_S = 20.0  # of progress, where there is no terminal


def verify(
    name: Annotated[str, typer.Argument(help="A backend's name; attn-backends list shows them.")],
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", min=0.0, help="How long to run; 5, or to the end with --cases or --declared."),
    ] = None,
    cases: Annotated[int | None, typer.Option("--cases", min=1, help="How many cases to run at most.")] = None,
    declared: Annotated[
        bool,
        typer.Option("--declared", help="All that the backend declares, in all pairs, rather than random layers."),
    ] = False,
    covered: Annotated[
        Path | None,
        typer.Option("--covered", help="With --declared: a report or a merged one; leave out what it says has run."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", help="With --declared: NAME=VALUE,VALUE; only these values of it. May be given again."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another number draws other cases.")] = 0,
    case: Annotated[int | None, typer.Option("--case", min=0, help="Run this one case alone, and show it.")] = None,
    device: Annotated[str, typer.Option("--device", help="Device to run on: cpu, cuda, cuda:1, … or auto.")] = "auto",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes that run cases side by side.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", help="Work of a case: small, medium or large; by default what suits the device."),
    ] = None,
    multiprocessors: Annotated[
        int | None, typer.Option("--multiprocessors", min=1, help="Multiprocessors of the GPU that a CPU stands for.")
    ] = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="A module that registers backends; may be given again.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for the report.")] = None,
) -> None:
    """Run random layers and batches of published models' head shapes, eager and in CUDA graphs, against float64.

    With --declared they are those of a covering array: each value that the backend declares, and each pair of values
    that it serves together, is in some case; open ranges have their ends and 8 values between.

    Every tensor lies in guard bands, so that a write or a read beyond it is found too. The exit status is 1 if anything
    was found, and the report has one command for each finding that repeats it; it is 130 if Ctrl-C ended the run.
    """
    with clear_errors():
        _check_options(declared, covered, where, json_file, seed, case)
        asked, package = _asked(name, device, size, multiprocessors, imports or (), declared, where or ())
        if case is not None:
            raise typer.Exit(_run_one(asked, case))
        most = (_DEFAULT_MINUTES if cases is None and not declared else 1e6) if minutes is None else minutes
        planned, workers = _planned(asked, seed, cases, covered), workers or _default_workers(asked.device)
        report = _run_many(asked, planned, most, workers, package)
        _save(report, json_file)
    _print_report(report)
    raise typer.Exit(EXIT_FOUND if report["findings"] else EXIT_INTERRUPTED if report["interrupted"] else 0)


def _save(report: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")


def _check_options(
    declared: bool, covered: Path | None, where: list[str] | None, json_file: Path | None, seed: int, case: int | None
) -> None:
    """Refuse what does not go together, or cannot be kept, before anything runs.

    Raises:
        ValueError: says what, and what to give.
    """
    _check_seeds(seed, case)
    _check_file(json_file)
    if covered is not None and not declared:
        raise ValueError("--covered goes with --declared: random cases are drawn whatever has run")
    if where and not declared:
        raise ValueError("--where goes with --declared: random cases are drawn of all values")


def _check_seeds(seed: int, case: int | None) -> None:
    """Refuse what torch's generators do not take, which would be found of the backend."""
    from attn_backends.testing.verify.campaign import MOST_CASE, MOST_SEED

    for option, given, most in (("--seed", seed, MOST_SEED), ("--case", case or 0, MOST_CASE)):
        if given > most:
            raise ValueError(f"{option} is {given}; allowed: 0 to {most}")


def _check_file(file: Path | None) -> None:
    """Refuse a report's file in a folder that is not there before the run, and not when all is to be written."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise ValueError(f"--json {file}: {why}; give a file that can be written, such as report.json")


def _asked(
    name: str, device: str, size: str | None, multiprocessors: int | None, imports: Sequence[str], declared: bool,
    where: Sequence[str],
) -> tuple[Asked, str | None]:  # fmt: skip
    """What all cases have in common, and the backend's package.

    Raises:
        ValueError: no such backend or size, or it cannot run here; says what it lacks, and what to type.
    """
    from attn_backends.registry.support import choose_device, devices_here, support
    from attn_backends.registry.table import get_entry
    from attn_backends.testing.verify.sizes import SIZES, default_size
    from attn_backends.testing.verify.worker import Asked

    import_modules(imports)
    row = support(get_entry(name))
    if not row.usable and row.device is None and row.fix is None and row.capabilities:
        needs, here = " or ".join(row.capabilities["devices"]), ", ".join(devices_here())
        raise ValueError(f"{row.name} needs {needs}; there is none here (here: {here}). {_what_to_type(row.package)}")
    if not row.usable:
        raise ValueError(row.why_not)
    chosen = choose_device(row, device)
    if size is not None and size not in SIZES:
        raise ValueError(f"--size is {size!r}; allowed: {', '.join(SIZES)}")
    size = size or default_size(chosen)
    return Asked(row.name, chosen, size, multiprocessors, tuple(imports), declared, tuple(where)), row.package


def _what_to_type(package: str | None) -> str:
    if package == "triton":
        return "Type it on a machine that has one, or let Triton interpret: TRITON_INTERPRET=1 attn-backends verify …"
    return "Type it on a machine that has one, or verify another: attn-backends list"


def _default_workers(device: str) -> int:
    """Half of the cores beside a GPU, which workers share; all of them on a CPU."""
    cores = os.cpu_count() or 1
    return cores if device.startswith("cpu") else max(1, min(8, cores // 2))


def _run_one(asked: Asked, seed: int) -> int:
    """One case in this process; returns the exit status."""
    from attn_backends.testing.verify.covering import row_of
    from attn_backends.testing.verify.worker import cases_of, prepare, run_seed

    console, backend = Screen(soft_wrap=True), prepare(asked)
    row = row_of(asked, seed) if asked.declared else None
    case = next(cases_of(asked, backend, seed, row))
    for name, value in vars(case).items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    outcome = run_seed(asked, backend, seed, row)
    console.print(f"worst errors, of what is allowed: {outcome.worst}", highlight=False, markup=False)
    console.print("found: " + (outcome.finding or "nothing"), highlight=False, markup=False)
    return 0 if outcome.finding is None else EXIT_FOUND


def _planned(asked: Asked, seed: int, cases: int | None, covered: Path | None) -> Planned:
    """The cases of a run.

    Raises:
        ValueError: what has run is no report, or has nothing of the backend.
    """
    from attn_backends.testing.verify.covering import plan_declared, plan_random

    if not asked.declared:
        return plan_random(asked, seed, cases)
    try:
        ran = None if covered is None else json.loads(covered.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--covered {covered} cannot be read: {error}; give a report of --json, or a merged one"
        ) from error
    return plan_declared(asked, seed, cases, ran)


def _run_many(asked: Asked, planned: Planned, minutes: float, workers: int, package: str | None) -> dict[str, Any]:
    from attn_backends.testing.verify.campaign import run_campaign
    from attn_backends.testing.verify.report import as_report

    started = time.monotonic()
    with _progress(asked, planned.num_cases, minutes) as show:
        tally = run_campaign(asked, planned.blocks, minutes, workers, show)
    return as_report(asked, tally, planned, time.monotonic() - started, package)


@contextmanager
def _progress(asked: Asked, cases: int | None, minutes: float) -> Iterator[Callable[[Tally], None]]:
    """Shows what there is after each case: a bar on a terminal, else a line now and then."""
    console, started, last = Screen(stderr=True), time.monotonic(), [time.monotonic()]

    def summary(tally: Tally) -> str:
        return f"{tally.num_cases} cases, {tally.num_steps} steps, {len(tally.findings)} findings"

    def line(tally: Tally) -> None:
        if time.monotonic() - last[0] > _LINE_EVERY_S:
            last[0] = time.monotonic()
            console.print(f"{asked.name} on {asked.device}: {summary(tally)}", highlight=False)

    if not console.is_terminal:
        yield line
        return
    with bar(console) as progress:
        task = progress.add_task(f"{asked.name} on {asked.device}", total=1.0)

        def move(tally: Tally) -> None:
            share = (time.monotonic() - started) / max(1e-9, 60 * minutes)
            done = min(1.0, max(share, tally.num_cases / cases if cases else 0.0))
            progress.update(task, completed=done, description=f"{asked.name} on {asked.device}: {summary(tally)}")

        yield move


def _print_report(report: dict[str, Any]) -> None:
    """Cases by kind, the worst errors, what was refused, and the findings."""
    console = Screen()
    console = console if console.is_terminal else Screen(width=200)
    where = report["machine"]["gpu"] or report["machine"]["cpu"]
    known = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    console.print(f"{report['backend']} on {report['device']} ({escape(where)}; {known})", highlight=False)
    table = Table("case", "run", "", "worst error", "of what is allowed", "case's seed")
    worst = [(name, f"{each['of_tolerance']:.2f}", str(each["seed"])) for name, each in report["worst"].items()]
    kinds = [(kind, str(number)) for kind, number in report["cases"].items()]
    for left, right in zip_longest(kinds, worst):
        table.add_row(*(left or ("", "")), "", *(right or ()))
    console.print(table)
    if report["refused"]:
        refused = ", ".join(f"{reason} ({times})" for reason, times in report["refused"].items())
        console.print(f"refused, and left out: {escape(refused)}", highlight=False)
    if report["declared"]:
        _print_declared(console, report)
    for finding in report["findings"][:_MOST_SHOWN]:
        console.print(f"[red]found[/red] in {finding['kind']}: {escape(finding['what'])}", highlight=False)
        console.print(f"  repeat it: {finding['command']}", highlight=False, soft_wrap=True)
    if len(report["findings"]) > _MOST_SHOWN:
        console.print(f"and {len(report['findings']) - _MOST_SHOWN} more: --json has all of them")
    rate = report["num_cases"] / max(1e-9, report["seconds"])
    end = ", interrupted" if report["interrupted"] else ", without what was under way" if report["unfinished"] else ""
    console.print(
        f"{report['num_cases']} cases, {report['num_steps']} steps in {report['seconds']:.0f} s ({rate:.1f} cases a "
        f"second): {len(report['findings'])} findings{end}",
        highlight=False,
    )


def _print_declared(console: Console, report: dict[str, Any]) -> None:
    """What has run of what is declared, what is refused, and what did not run."""
    values = [times for counts in report["values"].values() for times in counts.values()]
    pairs = report["num_pairs"]
    refused = "".join(f", {times} refused ({why})" for why, times in pairs["refused"].items())
    ran = f"{sum(times > 0 for times in values)} of {len(values)} declared values and {pairs['run']} of "
    summary = f"{ran}{pairs['declared']} pairs of them ran{refused}, {pairs['not_run']} pairs did not run"
    console.print(escape(summary), highlight=False)
    missing = [f"{one} with {other}" for one, others in report["pairs_not_run"].items() for other in others]
    for pair in missing[:_MOST_SHOWN]:
        console.print(f"  did not run: {escape(pair)}", highlight=False)
    if len(missing) > _MOST_SHOWN:
        console.print(f"  and {len(missing) - _MOST_SHOWN} more: --json has all of them")

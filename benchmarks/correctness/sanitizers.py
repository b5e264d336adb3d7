"""Random cases of `attn-backends verify` under NVIDIA's compute-sanitizer: writes results/<name>.json as it goes.

    python -m benchmarks correctness sanitizers [--backend TRITON TRITON_MLA ...] [--import MODULE ...]
        [--tool memcheck ...] [--seed N] [--cases 3] [--minutes 4] [--workers 15] [--size medium]
        [--out FOLDER] [--options NAME=VALUE ...]

A process of each backend runs cases without a tool, which compiles their kernels; each that ran to its end goes to the
processes under tools, which have started by then. memcheck and initcheck see single allocations only without torch's
caching allocator, and graphs are captured with it alone: so these two have eager cases, and memcheck graphs by their
segments. Kernels of torch itself are left out where that hides nothing.

Reports of places in explained_reports.json are expected. The exit status is 1 where others are reported, where a result
is wrong, or where a backend ran no case under a tool. `--options` go to compute-sanitizer: racecheck-report=all prints
the bytes, threads and values of every hazard.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_backends.testing.verify.sizes import SIZES
from benchmarks.correctness.sanitizer_process import KINDS, Plan, Waiting
from benchmarks.correctness.sanitizer_run import GRACE_S, Record, drive, survey
from benchmarks.lib.gpu_harness import PACKAGES, installed
from benchmarks.lib.harness import print_table, write

TOOLS = tuple(dict.fromkeys(kind.tool for kind in KINDS))
WRITE_EVERY_S = 5.0


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["TRITON"])
    parser.add_argument("--import", nargs="+", default=[], dest="imports", help="modules that register backends")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=[*TOOLS])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=3, help="of a backend: so many eager, and as many in graphs")
    parser.add_argument("--minutes", type=float, default=4.0, help="of all tools, which run side by side")
    parser.add_argument("--case-seconds", type=float, default=90.0, help="of one case under a tool, at most")
    parser.add_argument("--workers", type=int, default=15, help="processes under tools")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--name", default="sanitizers")
    parser.add_argument("--out", type=Path, help="folder of the result")
    parser.add_argument("--options", nargs="+", default=[], metavar="NAME=VALUE", help="more of compute-sanitizer's")
    return parser.parse_args(given)


def run(arguments: argparse.Namespace, plan: Plan, record: Record) -> None:
    """All processes, until each has ended or time is over; the result is written as they go."""
    waiting = {kind: Waiting() for kind in KINDS if kind.tool in arguments.tool}
    backends, first = arguments.backend, arguments.seed << 20

    def survey_all() -> None:
        each = [threading.Thread(target=survey, args=(plan, name, first, arguments.cases, waiting, record), daemon=True)
                for name in backends]  # fmt: skip
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()
        for cases in waiting.values():
            cases.close()

    kinds = [list(waiting)[i % len(waiting)] for i in range(max(arguments.workers, len(waiting)))]
    threads = [threading.Thread(target=drive, args=(plan, kind, backends, waiting[kind], record), daemon=True)
               for kind in kinds]  # fmt: skip
    threads.append(threading.Thread(target=survey_all, daemon=True))
    for thread in threads:
        thread.start()
    last = plan.deadline + GRACE_S + 10
    while (alive := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < last:
        alive[0].join(WRITE_EVERY_S)
        save(arguments, record)


def save(arguments: argparse.Namespace, record: Record) -> list[dict[str, Any]]:
    """Write what there is; the rows of it."""
    rows = record.rows(arguments.backend, ["none", *arguments.tool])
    with record.lock:
        more = {
            "not seen": {f"{kind.tool}, {kind.cases}": kind.unseen for kind in KINDS},
            "reports": record.reports.rows(), "processes": list(record.processes),
        }  # fmt: skip
    write(arguments.name, title(arguments), rows, installed(*PACKAGES), arguments.out, **more)
    return rows


def title(arguments: argparse.Namespace) -> str:
    return f"compute-sanitizer over cases from seed {arguments.seed}, {arguments.size}"


def has_failed(rows: Sequence[dict[str, Any]]) -> bool:
    return any(row["new"] or row["mismatches"] or not row["eager"] + row["graphs"] for row in rows)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    record, begun = Record(), time.monotonic()
    options = dict(option.split("=", 1) for option in arguments.options)
    asked = {"device": arguments.device, "size": arguments.size, "imports": arguments.imports}
    with tempfile.TemporaryDirectory() as made:
        plan = Plan(asked, begun + 60 * arguments.minutes, arguments.case_seconds, Path(made), options)
        run(arguments, plan, record)
    rows = save(arguments, record)
    print_table(title(arguments), [{name: row[name] for name in row if name != "first"} for row in rows])
    for report in record.reports.rows():
        print(f"{report['tool']} {report['times']} times, first in {report['backend']} {report['first seed']}: "
              f"{report['why'] or 'NEW'}", *report["report"], sep="\n  ", flush=True)  # fmt: skip
    for row in rows:
        print(*(f"{row['backend']} {row['tool']}: {finding}" for finding in row["first"]), sep="\n", end="")
    return int(has_failed(rows))


if __name__ == "__main__":
    sys.exit(main())

"""Random cases of `attn-backends verify` under NVIDIA's compute-sanitizer: writes results/sanitizers_<backend>.json.

    python benchmarks/sanitizers.py [--backend TRITON] [--tool memcheck racecheck initcheck synccheck] [--seed N]
        [--seconds 100] [--size medium] [--workers 2]

Each tool runs the same cases in processes of its own, side by side, until the time is over: eager steps and captured
graphs, and kernels that start before the one in front of them has ended. Tensors have no guard bands there: memcheck
compares every access with what was allocated, and bands would initialise what initcheck is to find. memcheck and
initcheck see single allocations only without torch's caching allocator, and graphs are captured with it alone: so these
two have eager cases, and memcheck graphs by their segments.

What the tools do not follow is in each row: racecheck sees shared memory alone, and neither it nor synccheck follows
what the tensor memory accelerator writes behind an mbarrier.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from gpu_harness import PACKAGES, installed
from harness import print_table, write

from attn_backends.testing import guard
from attn_backends.testing.verify.cases import draw_case
from attn_backends.testing.verify.sizes import SIZES
from attn_backends.testing.verify.worker import Asked, main as work, prepare

SANITIZER = "compute-sanitizer"
SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)
FINDING = re.compile(
    r"^=+ ((?:Invalid|Error: |Uninitialized|Barrier error|Race reported|Misaligned|Program hit)[^\n]*)", re.MULTILINE
)


class Pass(NamedTuple):
    """One tool over one kind of cases."""

    tool: str
    graphs: bool
    cached: bool  # torch's allocator keeps memory
    unseen: str  # what the tool does not follow there


PASSES = (
    Pass("memcheck", False, False, ""),
    Pass("memcheck", True, True, "writes within a segment of torch's allocator"),
    Pass("initcheck", False, False, "shared memory"),
    Pass("racecheck", False, True, "global memory; what the tensor memory accelerator writes behind an mbarrier"),
    Pass("racecheck", True, True, "global memory; what the tensor memory accelerator writes behind an mbarrier"),
    Pass("synccheck", False, True, "mbarriers"),
    Pass("synccheck", True, True, "mbarriers"),
)


def seeds_of(asked: Asked, graphs: bool, first: int) -> Iterator[int]:
    """Seeds from the first on whose cases are captured, or are not."""
    backend = prepare(asked)
    seed = first
    while True:
        case = draw_case(backend, seed, SIZES[asked.size], asked.device, asked.multiprocessors)
        if (case.graph_rows > 0) == graphs:
            yield seed
        seed += 1


def run_pass(one: Pass, asked: Asked, first: int, worker: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Cases under a tool until the time is over; what the tool and the cases found."""
    log = folder / f"{one.tool}_{one.graphs}_{worker}.log"
    command = [
        SANITIZER,
        "--tool",
        one.tool,
        "--log-file",
        str(log),
        sys.executable,
        __file__,
        "--work",
        asked.to_json(),
    ]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "0" if one.cached else "1"}
    if one.cached:
        env.pop("PYTORCH_NO_CUDA_MEMORY_CACHING")
    deadline, outcomes, ended = time.monotonic() + seconds, [], True
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # that it is ready
        for seed in seeds_of(asked, one.graphs, first):
            if time.monotonic() > deadline:
                break
            try:
                process.stdin.write(f"{seed}\n")
                process.stdin.flush()
                outcomes.append(json.loads(process.stdout.readline()))
            except (OSError, json.JSONDecodeError):  # it died
                break
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            ended = False
    return {"outcomes": outcomes, "log": log.read_text() if log.exists() else "", "ended": ended}


def row_of(one: Pass, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A result's row: what all processes of a pass found."""
    logs = [part["log"] for part in parts]
    summaries = [int(a or b) for log in logs for a, b in SUMMARY.findall(log)]
    found = [line for log in logs for line in FINDING.findall(log)]
    outcomes = [outcome for part in parts for outcome in part["outcomes"]]
    return {
        "tool": one.tool,
        "cases": "graphs" if one.graphs else "eager",
        "num_cases": len(outcomes),
        "num_steps": sum(sum(outcome["kinds"].values()) for outcome in outcomes),
        "errors": sum(summaries) if len(summaries) == len(parts) else f"{len(found)} or more",
        "mismatches": sum(outcome["finding"] is not None for outcome in outcomes),
        "ended": all(part["ended"] for part in parts),
        "not seen": one.unseen,
        "first": [*found[:3], *(o["finding"][:300] for o in outcomes if o["finding"])][:4],
    }


def without_bands() -> None:
    """What cases are given and allocate is as torch makes it."""
    guards = guard.GuardBands
    guards.watching = lambda self: nullcontext()  # type: ignore[method-assign, assignment]
    guards.place = lambda self, tensor, **_: tensor.clone(memory_format=guard.torch.preserve_format)  # type: ignore[method-assign]
    guards.check = lambda self, what: None  # type: ignore[method-assign]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="TRITON")
    parser.add_argument("--tool", nargs="+", default=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=100.0, help="of each pass, which run side by side")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=2, help="processes of a pass")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.work:
        without_bands()
        sys.argv[1:] = [arguments.work]
        work()
        return
    asked = Asked(arguments.backend, arguments.device, arguments.size, None, ())
    passes = [one for one in PASSES if one.tool in arguments.tool]
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(len(passes) * arguments.workers) as pool:
        begun = {
            one: [
                pool.submit(run_pass, one, asked, (arguments.seed << 20) + (worker << 16), worker, arguments.seconds,
                            Path(made))
                for worker in range(arguments.workers)
            ]
            for one in passes
        }  # fmt: skip
        rows = [row_of(one, [part.result() for part in parts]) for one, parts in begun.items()]
    title = f"{arguments.backend} under compute-sanitizer, seed {arguments.seed}, {arguments.size} cases"
    print_table(title, [{name: row[name] for name in row if name not in ("not seen", "first")} for row in rows])
    for row in rows:
        print(row["tool"], row["cases"], *row["first"], sep="\n  ", flush=True)
    write(f"sanitizers_{arguments.backend.lower()}", title, rows, installed(*PACKAGES))


if __name__ == "__main__":
    main()

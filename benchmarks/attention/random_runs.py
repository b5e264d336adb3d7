"""What runs over shapes drawn at random share: their options, and processes that make shapes ready."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention.shape_draws import purpose
from benchmarks.lib.gpu_harness import free_memory
from benchmarks.lib.processes import Failed, Row, Work, processes_to_compile, rows_of

OUT_OF_MEMORY = "OutOfMemoryError"


def add_options(parser: argparse.ArgumentParser, count: int, rounds: int) -> None:
    """With usual numbers of shapes and rounds."""
    parser.add_argument("--seed", type=int, help="0 to 999 to tune by, 1000 to 1999 to judge by")
    parser.add_argument("--count", type=int, default=count, help="of shapes")
    parser.add_argument(
        "--bare", action=argparse.BooleanOptionalAction, default=True, help="libraries' kernels by hand"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="30 for what is reported")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no shape is begun")
    parser.add_argument("--processes", type=int, help="that make shapes ready; 0: this one does")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path, help="the file of results")
    parser.add_argument("--again", action="store_true", help="measure anew what the file has")


def check_seed(parser: argparse.ArgumentParser, seed: int | None) -> None:
    """End with an error where there is none, or one for nothing."""
    if seed is None:
        parser.error("give a --seed")
    try:
        purpose(seed)
    except ValueError as error:
        parser.error(str(error))


def measured(
    arguments: argparse.Namespace, shapes: Sequence[Any], work: Work
) -> Iterator[tuple[Any, Row | Failed]]:  # fmt: skip
    """Each shape with its row, whose contenders that dropped out are "dropped", as they come, while there is time.
    Those that lacked memory beside others are measured anew at the end, alone."""
    deadline, count = time.monotonic() + 60 * arguments.minutes, arguments.processes
    if count is None:
        count = 0 if arguments.device == "cpu" else processes_to_compile()
    again: list[Any] = []
    for each, found in rows_of(shapes, count, work, lambda: time.monotonic() < deadline):
        dropped = [found.why] if isinstance(found, Failed) else found["dropped"]
        if count > 1 and any(OUT_OF_MEMORY in line for line in dropped):
            again.append(each)
        else:
            yield each, found
    yield from rows_of(again, 1, work, lambda: True)


def clean_up(device: str) -> bool:
    """Free memory. Returns whether the device's context is alive."""
    gc.collect()
    if device != "cpu":
        try:
            free_memory(torch.device(device))
            torch.cuda.synchronize()
        except Exception:  # torch.AcceleratorError, or a RuntimeError
            return False
    return True

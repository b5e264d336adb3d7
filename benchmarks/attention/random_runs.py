"""The options of runs over shapes drawn at random."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.attention.shape_draws import purpose


def add_options(parser: argparse.ArgumentParser, count: int, rounds: int) -> None:
    """With usual numbers of shapes and rounds."""
    parser.add_argument("--seed", type=int, help="0 to 999 to tune by, 1000 to 1999 to judge by")
    parser.add_argument("--count", type=int, default=count, help="of shapes")
    parser.add_argument("--rounds", type=int, default=rounds, help="30 for what is reported")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no shape is begun")
    parser.add_argument("--processes", type=int, help="that make shapes ready; 0: this one does")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path, help="the file of results")


def add_contest_options(parser: argparse.ArgumentParser) -> None:
    """Of those whose files go on where they end."""
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True, help="libraries' own kernels")
    parser.add_argument("--again", action="store_true", help="measure anew what the file has")


def check_seed(parser: argparse.ArgumentParser, seed: int | None) -> None:
    """End with an error where there is none, or one for nothing."""
    if seed is None:
        parser.error("give a --seed")
    try:
        purpose(seed)
    except ValueError as error:
        parser.error(str(error))

"""Seconds that `attn-backends generate` takes on a CPU of which other work has some cores, by how long threads spin.

    python -m benchmarks engine busy_cores [--spins 1000 20000 300000] [--busy 0 1 2] [--max-tokens 32] [--repeats 3]

Threads of GNU's OpenMP, which torch has on Linux, spin before they sleep while they wait for one another:
`GOMP_SPINCOUNT` says how often, 300000 times if nothing does; the command sets `SPINS` (attn_backends.cli.app). Other
work is a loop on each of so many cores. Each number of spins has its turn in every repeat, in a process of its own;
loading the model is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attn_backends.cli.app import SPINS
from benchmarks.lib.harness import report


@contextmanager
def busy(num_cores: int) -> Iterator[None]:
    """Other work on so many cores."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cores)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds(spins: int, max_tokens: int) -> float:
    """Of generation alone: four prompts at once."""
    command = [sys.executable, "-m", "attn_backends.cli.app", "generate", "--device", "cpu", "--json"]
    environ = os.environ | {"GOMP_SPINCOUNT": str(spins)}
    done = subprocess.run(
        [*command, "--max-tokens", str(max_tokens)], env=environ, stdin=subprocess.DEVNULL, capture_output=True,
        check=True, text=True,
    )  # fmt: skip
    return float(json.loads(done.stdout)["stats"]["seconds"])


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", type=int, nargs="+", default=[1000, int(SPINS), 300000])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="cores that other work has")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(given)
    rows: list[dict[str, Any]] = []
    for num_cores in arguments.busy:
        taken: dict[int, list[float]] = {spins: [] for spins in arguments.spins}
        with busy(num_cores):
            for _ in range(arguments.repeats):
                for spins, times in taken.items():
                    times.append(seconds(spins, arguments.max_tokens))
        for spins, times in taken.items():
            rows.append({"busy cores": num_cores, "spins": spins, "seconds": statistics.median(times)})
            print(rows[-1], flush=True)
    report("busy_cores", f"four prompts, {arguments.max_tokens} new tokens, SmolLM2-135M-Instruct", rows)


if __name__ == "__main__":
    main()

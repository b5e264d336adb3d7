"""Host time of one layer's eager forward: what a step that no graph serves costs the host a layer.

    python -m benchmarks host forward_host_time [--backend TRITON FLASH_ATTN ...]

The write of the new keys is in it, and the launches, but no kernel's time: the layers of one step are called one after
the other, as by an engine, and the device is waited for in front of them, outside the time. Backends take one step each
in turns. Planning is no part of it, but what the first layer alone does is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.attention.contest import GQA, parts_of, writing_call
from benchmarks.attention.paged_problem import Problem, Shape, make_problem
from benchmarks.lib.gpu_harness import PACKAGES, free_memory, installed
from benchmarks.lib.harness import report
from benchmarks.lib.reasons import reason

SHAPES = [
    Shape((512,) * 64, GQA),
    Shape((512,) * 63 + (256,), GQA, is_prefill=True, decodes=63),
    Shape((256,) * 4, GQA, is_prefill=True),
]
LAYERS, WARMUP = 32, 20


def forward_of(name: str, problem: Problem) -> Callable[[], Callable[[], object]]:
    """What plans a step, and then its layers' calls, over one copy of the cache after the other.

    Raises:
        Unsupported: the backend cannot serve it.
    """
    parts = parts_of(name, problem, {})
    metadata, copies = parts.builder.build(0, problem.common), len(problem.queries)

    def planned() -> Callable[[], object]:
        call = writing_call(parts.impl, problem, parts.state.begin_forward(metadata))
        return lambda: [call(layer % copies) for layer in range(LAYERS)]

    return planned


@torch.inference_mode()
def measure(shape: Shape, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of one batch, and who dropped out."""
    device = torch.device(arguments.device)
    problem, calls, dropped = make_problem(shape, torch.bfloat16, 16, device), {}, []
    for name in arguments.backend:
        try:
            calls[name] = forward_of(name, problem)
            calls[name]()()  # compiles what it needs
        except Exception as error:  # whatever a kernel library raises
            calls.pop(name, None)
            dropped.append(f"{shape.name}: {name}: {reason(error)}")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARMUP + arguments.calls):
        for name, planned in calls.items():
            layers = planned()
            wait()
            started = time.perf_counter()
            layers()
            taken[name].append((time.perf_counter() - started) * 1e6 / LAYERS)
    return [
        {
            "batch": shape.name,
            "contender": name,
            "us": statistics.median(times[WARMUP:]),
            "p90 us": statistics.quantiles(times[WARMUP:], n=10)[-1],
        }
        for name, times in taken.items()
    ], dropped


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", type=str.upper, default=["TRITON", "FLASH_ATTN", "FLASHINFER"])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    arguments = parser.parse_args(given)
    rows: list[dict[str, Any]] = []
    dropped: list[str] = []
    for shape in SHAPES:
        measured, out = measure(shape, arguments)
        rows, dropped = rows + measured, dropped + out
        free_memory(torch.device(arguments.device))
    report(
        "forward_host_time",
        f"host time of one layer's eager forward, of {LAYERS} in a step",
        rows,
        installed(*PACKAGES),
    )
    if dropped:
        raise SystemExit("\n".join(dropped))


if __name__ == "__main__":
    main()

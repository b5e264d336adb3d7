"""Attention backends of ours beside vLLM's own, inside vLLM: everything else is equal, and each has its own process.

    python -m benchmarks engine vllm_backends [--model NAME ...] [--backend NAME ...] [--rows WHAT ...] [--together]

A backend of ours has AB_ in front; the others are vLLM's. Models are shapes with random weights. A step is a decode
step of requests that are all there, in vLLM's full CUDA graphs; prompts are timed until all have their first token; the
mixed load is of requests whose prompts and answers have lengths that are even in their logarithms. The
log-probabilities of some prompts' first tokens are compared with those of the backend named first. Kernels that vLLM's
monitor sees compiled while it serves are counted. Without a GPU it runs a toy model on vLLM's CPU build.

With `--together` all backends are in one process, and take each load in turns: then a host whose speed changes from one
minute to the next is as fast for all. A value is the median of the turns, and "of first" that of each turn's ratio to
the backend named first.

Needs vLLM: on the GPU 0.26 was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from operator import truediv
from typing import Any

import torch

from benchmarks.engine.vllm_loads import GPU, KINDS, OURS, SHAPES, TOY, Loads, run_one
from benchmarks.lib.gpu_harness import installed
from benchmarks.lib.harness import print_table, write

MARK = "RESULT "  # in front of the line that a process ends with
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
_MEMORY = 0.7  # of the GPU's, for all backends together
WITHOUT_COMPILING = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


def in_a_process(model: str, backend: str, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model and backend, of a new process."""
    command = [sys.executable, "-m", "benchmarks", "engine", "vllm_backends", "--one", "--model", model, "--backend",
               backend, "--rows", *given.rows, "--seed", str(given.seed), "--options", json.dumps(given.options),
               *(["--compile"] if given.compile else [])]  # fmt: skip
    started = time.perf_counter()
    done = subprocess.run(command, env={**QUIET, **os.environ}, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        print(f"{model}, {backend}: ended with {done.returncode}:\n{done.stdout[-2000:]}", flush=True)
        return {"rows": [{"what": "failed", "unit": "", "value": done.returncode}]}
    figures: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    figures["rows"].append({"what": "process", "unit": "s", "value": time.perf_counter() - started})
    return figures


def in_turns(model: str, given: argparse.Namespace, options: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The rows of all backends, of one process, after each turn.

    Raises:
        SystemExit: two of them are ours, of which vLLM has one at a time.
    """
    if sum(name.startswith(OURS) for name in given.backend) > 1:
        raise SystemExit(f"--together: {', '.join(given.backend)} has two of ours: name one, or leave --together out")
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    sizes, share = GPU if torch.cuda.is_available() else TOY, {"gpu_memory_utilization": _MEMORY / len(given.backend)}
    loads = {name: Loads(model, name, sizes, share | options, given.seed) for name in given.backend}
    taken: dict[tuple[str, str], dict[str, list[float]]] = {}
    for turn in range(given.repeat):
        for kind in given.rows:
            for name in given.backend[:: -1 if turn % 2 else 1]:
                for row in loads[name].figures(kind, once=True) if kind != "check" else ():
                    taken.setdefault((row["what"], row["unit"]), {}).setdefault(name, []).append(row["value"])
                    print(model, name, turn, row["what"], row["value"], row["unit"], flush=True)
        yield [
            {"model": model, "backend": name, "what": what, "unit": unit, "value": statistics.median(values),
             "all": [*values], "of first": statistics.median(map(truediv, values, of_each[given.backend[0]]))}
            for (what, unit), of_each in taken.items() for name, values in of_each.items()
        ]  # fmt: skip


def compared(first: list[list[dict[str, float]]], other: list[list[dict[str, float]]]) -> dict[str, Any]:
    """How far log-probabilities of tokens that both name lie apart: of first tokens, and of later ones as long as the
    texts are the same."""
    firsts, laters, same = [], [], 0
    for ours, theirs in zip(first, other, strict=True):
        for place, (mine, his) in enumerate(zip(ours, theirs, strict=True)):
            (laters if place else firsts).extend(abs(mine[token] - his[token]) for token in mine.keys() & his)
            if max(mine, key=mine.__getitem__) != max(his, key=his.__getitem__):
                break
        else:
            same += 1
    return {"what": "log-probabilities", "unit": "", "value": max(firsts), "mean": sum(firsts) / len(firsts),
            "later": max(laters, default=0.0), "texts": len(first), "same texts": same}  # fmt: skip


def with_comparison(figures: dict[str, Any], first: dict[str, Any]) -> list[dict[str, Any]]:
    """A process's rows, with the comparison in place of what was compared."""
    checks = [[row["logprobs"] for row in each["rows"] if row["what"] == "check"] for each in (first, figures)]
    rows = [row for row in figures["rows"] if row["what"] != "check"]
    return rows + ([compared(checks[0][0], checks[1][0])] if all(checks) else [])


def table(rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    """A figure each, with a column a backend."""
    columns = {f"{row['model']}, {row['backend']}": None for row in rows}
    found = {(row["what"], f"{row['model']}, {row['backend']}"): row["value"] for row in rows}
    units = {row["what"]: row["unit"] for row in rows}
    return [
        {"": f"{what} {unit}".strip()} | {column: found.get((what, column), "") for column in columns}
        for what, unit in units.items()
    ]


def main(given: Sequence[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", choices=SHAPES, default=["Llama-8B", "SmolLM2-135M"] if on_gpu else ["toy"]
    )
    theirs = ["FLASH_ATTN", f"{OURS}TRITON", "TRITON_ATTN", "FLASHINFER"] if on_gpu else ["CPU_ATTN", f"{OURS}TORCH"]
    parser.add_argument("--backend", nargs="+", default=theirs, help="the first is what others are compared with")
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--repeat", type=int, default=1, help="processes of each, in turns")
    parser.add_argument("--together", action="store_true", help="in one process, without log-probabilities")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument(
        "--compile", action="store_true", help="vLLM's own default: torch.compile, and piecewise graphs"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="more of vLLM's settings, as JSON")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    options = arguments.options if arguments.compile or not on_gpu else WITHOUT_COMPILING | arguments.options
    if arguments.one:
        figures = run_one(arguments.model[0], arguments.backend[0], arguments.rows, options, arguments.seed)
        print(MARK + json.dumps(figures), flush=True)
        return
    rows: list[dict[str, Any]] = []
    title = "vLLM with attention backends of ours and its own"
    name = f"vllm_backends_{'cuda' if on_gpu else 'cpu'}" + "_together" * arguments.together
    name += "_compiled" * arguments.compile
    for model in arguments.model:
        if arguments.together:
            before = rows
            for of_model in in_turns(model, arguments, options):
                rows = before + of_model
                write(name, f"{title}, in one process", rows, installed("torch", "vllm"))
            continue
        first: dict[str, Any] = {}
        for turn in range(arguments.repeat):
            for backend in arguments.backend:
                figures = in_a_process(model, backend, arguments)
                first = first or figures
                named = {"model": model, "backend": backend, "turn": turn}
                rows += [named | row for row in with_comparison(figures, first)]
                print(json.dumps(rows[-len(figures["rows"]) :]), flush=True)
                write(name, title, rows, ("torch",), vllm=figures.get("vllm"))
    print_table(title, table(rows))


if __name__ == "__main__":
    main()

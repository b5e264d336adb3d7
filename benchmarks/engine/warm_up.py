"""Seconds until an engine is ready with cold and warm kernel caches, and what is left to compile when requests come.

    python -m benchmarks engine warm_up [--model SHAPE ...] [--backend NAME] [--repeat N] [--without]

A model is a shape with random weights. Every figure is of a process of its own: cold, with an empty folder for Triton's
compiled kernels; then warm, with what the first one left there. Each makes the engine and runs a mixed load of requests
twice, all there at once. Where other work shares the host, loads of one process differ by a fifth: --repeat starts more
warm processes, and their medians come too. Compilations are counted by Triton's own hook: what was compiled, and what
was read from its cache. Both loads are the same steps: the file has how long each kind took, and those of which the
first took longest beside the second. With --without, a cold one without warming up comes too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_backends import LLM, EngineConfig, SamplingParams
from benchmarks.engine.random_models import SHAPES, random_model
from benchmarks.lib.gpu_harness import installed
from benchmarks.lib.harness import print_table, write

GRAPHS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]
MARK = "RESULT "  # in front of the line that a process ends with


class Compilations:
    """What Triton compiled or read from its cache since last asked, by kernel."""

    def __init__(self) -> None:
        self._compiled: Counter[str] = Counter()
        self._read: Counter[str] = Counter()
        try:
            import triton
        except ImportError:
            return
        triton.knobs.compilation.listener = self._take

    def _take(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        (self._read if cache_hit else self._compiled)[src.name] += 1

    def pop(self) -> dict[str, dict[str, int]]:
        taken = {"compiled": dict(self._compiled), "read": dict(self._read)}
        self._compiled.clear()
        self._read.clear()
        return taken


class Steps:
    """The steps that an engine launches, each until the next one: the host runs ahead of the device by few."""

    def __init__(self, llm: LLM) -> None:
        self._runner = llm.runner
        self._begun: list[tuple[float, int, str]] = []  # when, tokens with padding, and what ran them
        self._run, self._run_next = llm.runner.run, llm.runner.run_next
        self._runner.run = lambda batch: self._timed(self._run, batch)  # type: ignore[method-assign]
        self._runner.run_next = lambda tokens: self._timed(self._run_next, tokens)  # type: ignore[method-assign]

    def _timed(self, run: Any, given: Any) -> Any:
        begun, replays = time.perf_counter(), self._runner.num_replays
        result = run(given)
        kind = "eager" if self._runner.num_replays == replays else "graph"
        self._begun.append((begun, self._runner._step.common.num_tokens, kind))
        return result

    def pop(self) -> list[Step]:
        """Those since last asked."""
        times = [begun for begun, _, _ in self._begun] + [time.perf_counter()]
        lasted = (end - begun for begun, end in pairwise(times))
        taken = [Step(kind, size, long) for (_, size, kind), long in zip(self._begun, lasted, strict=True)]
        self._begun.clear()
        return taken


class Step(NamedTuple):
    kind: str
    tokens: int
    seconds: float


def compared(first: Sequence[Step], second: Sequence[Step], most: int = 12) -> dict[str, Any]:
    """Seconds of each kind of step in two loads, and the steps whose first took longest beside the second."""
    if [step[:2] for step in first] != [step[:2] for step in second]:
        return {"steps": [len(first), len(second)], "same": False}
    kinds = {
        kind: [sum(step.seconds for step in steps if step.kind == kind) for steps in (first, second)]
        for kind in dict.fromkeys(step.kind for step in first)
    }
    pairs = sorted(zip(first, second, strict=True), key=lambda pair: pair[1].seconds - pair[0].seconds)
    slower = [{"kind": a.kind, "tokens": a.tokens, "ms": [1e3 * a.seconds, 1e3 * b.seconds]} for a, b in pairs[:most]]
    return {"steps": [len(first), len(second)], "same": True, "seconds": kinds, "slower": slower}


class Phases:
    """How long an engine takes for what it reports while it loads."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._phase, self._since = "", time.perf_counter()

    def __call__(self, message: str, done: int = 0, total: int | None = None) -> None:
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = message.partition(":")[0], now


def load(count: int) -> tuple[list[int], list[int]]:
    """Prompt lengths from 16 to 1024 tokens and new tokens from 16 to 512, both evenly in their logarithms."""
    numbers = np.random.default_rng(0)
    prompts, new = (np.exp(numbers.uniform(math.log(16), math.log(most), count)) for most in (1024, 512))
    return prompts.astype(int).tolist(), new.astype(int).tolist()


def run_once(arguments: argparse.Namespace) -> dict[str, object]:
    """One process's figures."""
    compilations, phases = Compilations(), Phases()
    config = EngineConfig.model_validate({
        "device": arguments.device, "dtype": arguments.dtype, "backend": arguments.backend, "warm_up": arguments.warm,
        "cache": {"prefix_caching": False, "memory": arguments.memory},
        "scheduler": {"max_num_requests": 256, "max_num_tokens": arguments.budget},
        "graphs": {"sizes": GRAPHS} if arguments.device == "cuda" else {"mode": "none"},
    })  # fmt: skip
    started = time.perf_counter()
    model = random_model(arguments.model[0], config)
    loaded = time.perf_counter()
    before = compilations.pop()
    phases("engine")
    llm = LLM(config, model, torch.device(arguments.device), phases)
    ready = time.perf_counter()
    phases("ready")
    while_loading = compilations.pop()
    lens, new = load(arguments.requests)
    numbers, seconds, left, steps, ran = np.random.default_rng(1), [], [], Steps(llm), []
    for _ in range(2):
        prompts = [numbers.integers(3, llm.model.vocab_size, length).tolist() for length in lens]
        llm.generate(prompts, [SamplingParams(max_tokens=count, ignore_eos=True) for count in new])
        seconds.append(llm.stats.seconds)
        left.append(compilations.pop())
        ran.append(steps.pop())
    return {
        "backend": llm.selection.name,
        "model s": loaded - started,
        "compiling s": phases.seconds["compiling kernels"],
        "graphs s": phases.seconds["capturing CUDA graphs"],
        "steps s": phases.seconds["running steps to warm up"],
        "ready s": ready - loaded,
        "kernels": sum(while_loading["compiled"].values()) + sum(while_loading["read"].values()),
        "first load s": seconds[0],
        "second load s": seconds[1],
        "first/second": seconds[0] / seconds[1],
        "compiled in loads": sum(sum(each["compiled"].values()) + sum(each["read"].values()) for each in left),
        "compilations": {"model": before, "engine": while_loading, "first load": left[0], "second load": left[1]},
        "both loads": compared(*ran),
    }


def in_a_process(model: str, folder: str, given: Sequence[str], warm: bool) -> dict[str, Any]:
    """The same, of a new process whose kernels are in a folder."""
    command = [sys.executable, "-m", "benchmarks", "engine", "warm_up", *given, "--model", model, "--one",
               *([] if warm else ["--cold-engine"])]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "TRITON_CACHE_DIR": folder}, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    figures: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return figures


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of medians over the processes of one model that started alike."""
    figures = [name for name, value in rows[0].items() if isinstance(value, int | float)]
    named = {"model": rows[0]["model"], "caches": f"median of {len(rows)} {rows[0]['caches']}"}
    return named | {"backend": rows[0]["backend"]} | {name: median(row[name] for row in rows) for name in figures}


def turned(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """A figure each, with a column a run; the kernels' names are in the file alone."""
    names = [name for name in rows[0] if name not in ("model", "caches", "compilations", "both loads")]
    return [{"": name} | {f"{row['model']}, {row['caches']}": row.get(name) for row in rows} for name in names]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=["SmolLM2-135M", "Llama-8B"])
    parser.add_argument("--backend", default="TRITON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", default="48GiB", help="of the KV cache")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=1, help="processes that start warm")
    parser.add_argument("--without", action="store_true", help="also a cold engine that does not warm up")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cold-engine", dest="warm", action="store_false", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.one:
        print(MARK + json.dumps(run_once(arguments)), flush=True)
        return
    passed = [f"--{name}={getattr(arguments, name)}"
              for name in ("backend", "device", "dtype", "memory", "budget", "requests")]  # fmt: skip
    rows: list[dict[str, object]] = []
    packages, name = installed("torch", "triton", "transformers"), f"warm_up_{arguments.device}"
    title = f"an engine's first requests, {arguments.requests} of mixed lengths, {arguments.dtype}"
    for model in arguments.model:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            warm_runs = [(f"warm {i + 1}" if i else "warm", folder, True) for i in range(arguments.repeat)]
            runs = [("cold", folder, True), *warm_runs] + [("without", other, False)] * arguments.without
            for caches, where, warm in runs:
                figures = in_a_process(model, where, passed, warm)
                for phase, kernels in figures["compilations"].items():
                    print(f"{model}, {caches}, {phase}: {kernels}", flush=True)
                rows.append({"model": model, "caches": caches} | figures)
                write(name, title, rows, packages)
        if arguments.repeat > 1:
            rows.append(medians([row for row in rows if row["model"] == model and str(row["caches"])[:4] == "warm"]))
            write(name, title, rows, packages)
    print_table(title, turned(rows))


if __name__ == "__main__":
    main()

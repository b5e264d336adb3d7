"""Milliseconds a decode step of the whole engine, scheduler included: eager, in CUDA graphs, compiled, fused.

    python -m benchmarks engine engine_steps [--model SHAPE_OR_FOLDER] [--backend NAME ...] [--mode NAME ...]
        [--requests 1 32 256] [--kernels]

A model is a shape with random weights (SmolLM2-135M, Llama-8B, DeepSeek-V2-Lite), a folder or a GGUF file. Graphs need
a GPU; on a CPU they are left out. Several backends are measured one after the other, and who cannot serve is left out.
Prompts are not counted: a step's time is the difference between a run of many new tokens and one of few, by the
difference of their steps. With --kernels, what the GPU does in a step is listed by kernel.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn_backends import LLM, EngineConfig, SamplingParams, Unsupported
from attn_backends.engine.models.checkpoint import DEFAULT_MODEL
from attn_backends.engine.models.load import STAGES, Stage, load_model
from attn_backends.engine.outputs import silent
from attn_backends.registry.table import AUTO
from benchmarks.engine.random_models import SHAPES, random_model
from benchmarks.lib.gpu_harness import installed
from benchmarks.lib.harness import report, write
from benchmarks.lib.reasons import reason

PLAIN: dict[str, Any] = {"accelerate": "off"}  # the model as it is
MODES: dict[str, dict[str, Any]] = {  # name: settings
    "eager": PLAIN | {"graphs": {"mode": "none"}},
    "graph": PLAIN,
    "piecewise": PLAIN | {"graphs": {"mode": "piecewise"}},
    "merged": {},
    "compiled": {"graphs": {"mode": "none"}, "accelerate": "compile"},
    "compiled, graph": {"accelerate": "compile"},
    "fused": {},
    "fused, 8 steps": {"scheduler": {"decode_steps_per_launch": 8}},
}
SOME_STAGES: dict[str, tuple[Stage, ...]] = {"merged": ("merge",)}  # modes with one of `accelerate: on`'s stages alone
FEW = 8  # new tokens of the shorter run


def step_ms(llm: LLM, count: int, arguments: argparse.Namespace) -> float:
    """Median time of a decode step with so many requests."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(
        100, min(40_000, llm.model.vocab_size), (count, arguments.prompt_tokens), generator=generator
    ).tolist()
    taken: dict[int, list[float]] = {FEW: [], arguments.new_tokens: []}
    steps = {}
    for _ in range(arguments.repeats + 1):  # the first warms up
        for length, seconds in taken.items():
            llm.generate(texts, SamplingParams(max_tokens=length, ignore_eos=True))
            seconds.append(llm.stats.seconds)
            steps[length] = llm.stats.num_steps
    few, many = (statistics.median(taken[length][1:]) for length in (FEW, arguments.new_tokens))
    return (many - few) * 1e3 / (steps[arguments.new_tokens] - steps[FEW])


def kernels(llm: LLM, count: int, prompt_tokens: int) -> list[dict[str, object]]:
    """Microseconds a decode step by kernel, those of the prompts' own step left out: in all, and how often."""
    texts = [[100 + i] * prompt_tokens for i in range(count)]
    totals: dict[str, tuple[float, int]] = {}
    for new_tokens, sign in ((4, -1), (36, 1)):
        llm.generate(texts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            llm.generate(texts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        for event in profile.key_averages():
            us, calls = totals.get(event.key, (0.0, 0))
            totals[event.key] = us + sign * event.self_device_time_total, calls + sign * event.count
    rows = [{"requests": count, "kernel": name[:90], "us a step": us / 32, "calls": calls / 32}
            for name, (us, calls) in totals.items() if us / 32 >= 1]  # fmt: skip
    return sorted(rows, key=lambda row: -row["us a step"])  # type: ignore[operator]


def engine(arguments: argparse.Namespace, backend: str, mode: str) -> LLM:
    """An engine over the model, with settings of a mode; graphs of the measured sizes alone."""
    settings, stages = MODES[mode], SOME_STAGES.get(mode, STAGES)
    graphs = {"mode": "full" if arguments.device == "cuda" else "none", "sizes": arguments.requests}
    given: dict[str, Any] = {
        "model": arguments.model, "device": arguments.device, "dtype": arguments.dtype, "backend": backend,
        "cache": {"prefix_caching": False, "memory": arguments.memory, "page_size": arguments.page_size},
    }  # fmt: skip
    given |= settings
    given["graphs"] = graphs | settings.get("graphs", {})
    given["scheduler"] = {"max_num_requests": max(arguments.requests)} | settings.get("scheduler", {})
    config = EngineConfig.model_validate(given)
    if arguments.model in SHAPES:
        model = random_model(arguments.model, config, stages)
    else:
        model = load_model(config, torch.device(arguments.device), stages=stages)
    return LLM(config, model, torch.device(arguments.device), silent)


Rows = list[dict[str, object]]


def measure(arguments: argparse.Namespace, backend: str, rows: Rows, used: Rows, save: Callable[[], None]) -> None:
    """Fill rows of a backend, one for each number of requests, with a time a mode; add what its kernels took, if asked.

    `save` is called after every figure.
    """
    for name in arguments.mode:
        settings = MODES[name]
        if arguments.device == "cpu" and settings.get("graphs", {}).get("mode") != "none":
            continue
        started = time.perf_counter()
        llm = engine(arguments, backend, name)
        print(f"{name}: {llm.selection.name}, ready after {time.perf_counter() - started:.1f} s", flush=True)
        for row, count in zip(rows, arguments.requests, strict=True):
            row["backend"] = llm.selection.name
            row[f"{name} ms"] = taken = step_ms(llm, count, arguments)
            row[f"{name} tokens/s"] = count * 1e3 / taken
            print(f"  {count} requests: {taken:.2f} ms", flush=True)
            save()
            if arguments.kernels:
                of = {"backend": llm.selection.name, "mode": name}
                used += [of | kernel for kernel in kernels(llm, count, arguments.prompt_tokens)]
                save()
        del llm
        gc.collect()
        if arguments.device != "cpu":
            torch.cuda.empty_cache()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", nargs="+", type=str.upper, default=[AUTO])
    parser.add_argument("--page-size", type=int, help="what the engine takes if not given")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", default="24GiB", help="of the KV cache")
    parser.add_argument("--prompt-tokens", type=int, default=384)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--name", default="", help="of the result, in front of the model's")
    arguments = parser.parse_args(given)
    model = arguments.model.lower() if arguments.model in SHAPES else ""
    name = "_".join(filter(None, ["engine_steps", arguments.name, model]))
    packages = installed("torch", "triton", "transformers", "flashinfer-python", "vllm")
    title = f"a decode step of {arguments.model}, {arguments.dtype}"
    measured: dict[str, tuple[str, Rows]] = {  # by file
        f"{name}_{arguments.device}": (title, []),
        f"{name}_kernels_{arguments.device}": (f"{title}, by kernel", []),
    }
    (_, rows), (_, used) = measured.values()

    def each(act: Callable[..., object]) -> None:
        for file, (what, of) in measured.items():
            if of:
                act(file, what, of, packages)

    for backend in arguments.backend:
        own: Rows = [{"backend": backend, "requests": count} for count in arguments.requests]
        rows += own
        try:
            measure(arguments, backend, own, used, lambda: each(write))
        except (Unsupported, ImportError) as error:
            print(f"dropped out: {backend}: {reason(error)}", flush=True)
            del rows[-len(own) :]
    each(report)


if __name__ == "__main__":
    main()

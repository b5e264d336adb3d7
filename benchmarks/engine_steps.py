"""Milliseconds a decode step of the whole engine: eager, in CUDA graphs, compiled, and both. One run, one model.

    python benchmarks/engine_steps.py --device cuda [--model FOLDER_OR_GGUF] [--dtype bfloat16]

Graphs need a GPU; on a CPU they are left out. Prompts are not counted: a step's time is the difference between a run of
many new tokens and one of few, by the difference of their steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
from harness import report

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine.checkpoint import DEFAULT_MODEL

MODES = {  # name: settings
    "eager": {"graphs": {"mode": "none"}},
    "graph": {"graphs": {"mode": "full"}},
    "piecewise": {"graphs": {"mode": "piecewise"}},
    "compiled": {"graphs": {"mode": "none"}, "compile": "model"},
    "compiled, graph": {"graphs": {"mode": "full"}, "compile": "model"},
}


FEW = 8  # new tokens of the shorter run


def step_ms(llm: LLM, count: int, new_tokens: int, repeats: int = 5) -> float:
    """Median time of a decode step with `count` requests of 32 tokens each."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(100, 40_000, (count, 32), generator=generator).tolist()
    taken: dict[int, list[float]] = {FEW: [], new_tokens: []}
    steps = {}
    for _ in range(repeats + 1):  # the first warms up
        for length, seconds in taken.items():
            llm.generate(texts, SamplingParams(max_tokens=length, ignore_eos=True))
            seconds.append(llm.stats.seconds)
            steps[length] = llm.stats.num_steps
    few, many = (statistics.median(taken[length][1:]) for length in (FEW, new_tokens))
    return (many - few) * 1e3 / (steps[new_tokens] - steps[FEW])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=72)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = [{"requests": count} for count in arguments.requests]
    for name, settings in MODES.items():
        if arguments.device == "cpu" and settings["graphs"] != {"mode": "none"}:
            continue
        config = {"device": arguments.device, "dtype": arguments.dtype, "cache": {"prefix_caching": False}} | settings
        started = time.perf_counter()
        llm = LLM.from_pretrained(arguments.model, EngineConfig.model_validate(config))
        print(f"{name}: ready after {time.perf_counter() - started:.1f} s")
        for row, count in zip(rows, arguments.requests, strict=True):
            row[f"{name} ms"] = step_ms(llm, count, arguments.new_tokens)
        del llm
        gc.collect()
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
    report(f"engine_steps_{arguments.device}", f"a decode step of the engine, {arguments.dtype}", rows)


if __name__ == "__main__":
    main()

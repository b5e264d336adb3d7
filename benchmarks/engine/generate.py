"""Tokens per second of `LLM.generate` against transformers' own `generate`, in one run, greedy, end tokens ignored.

transformers runs each batch as its users would: alone, and as a left-padded batch. Prompts have different lengths.

    python -m benchmarks engine generate [--model FOLDER] [--new-tokens 64] [--accelerate off]

With `--accelerate off` the results go to `generate_plain.json`. The seconds that loading took are in them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine.models.checkpoint import DEFAULT_MODEL, find_model
from attn_backends.engine.models.hf import convert_gguf
from benchmarks.engine.generate_prompts import prompts
from benchmarks.lib.harness import report


def ours(llm: LLM, texts: list[str], new_tokens: int) -> tuple[float, list[list[int]]]:
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate(texts, sampling)
    return llm.stats.tokens_per_second, [list(output.token_ids) for output in outputs]


def theirs(model, tokenizer, texts: list[str], new_tokens: int) -> tuple[float, list[list[int]]]:  # type: ignore[no-untyped-def]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    started = time.perf_counter()
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    seconds = time.perf_counter() - started
    new = ids[:, inputs.input_ids.shape[1] :]
    return new.numel() / seconds, new.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--accelerate", choices=("off", "on"), default="on", help="our engine's setting")
    arguments = parser.parse_args()
    folder = find_model(arguments.model, convert_gguf)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    rows = []
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        config = EngineConfig(dtype=dtype, accelerate=arguments.accelerate, cache={"prefix_caching": False})
        started = time.perf_counter()
        llm = LLM.from_pretrained(folder, config)
        load_seconds = time.perf_counter() - started
        for count in (1, 4, 16):
            texts = prompts(count)
            taken = [  # in turns, so that a slow minute of the machine hits both; the first turn warms up
                (ours(llm, texts, arguments.new_tokens), theirs(model, tokenizer, texts, arguments.new_tokens))
                for _ in range(arguments.repeats + 1)
            ]
            own_speed, their_speed = (statistics.median(turn[side][0] for turn in taken[1:]) for side in (0, 1))
            own_ids, their_ids = taken[0][0][1], taken[0][1][1]
            same = sum(a == b for a, b in zip(own_ids, their_ids, strict=True))
            rows.append(
                {
                    "dtype": dtype,
                    "requests": count,
                    "attn_backends tokens/s": own_speed,
                    "transformers tokens/s": their_speed,
                    "ratio": own_speed / their_speed,
                    "equal texts": f"{same} of {count}",
                    "load s": load_seconds,
                }
            )
        del model, llm
        gc.collect()
    name = {"off": "generate_plain", "on": "generate"}[arguments.accelerate]
    report(name, f"greedy generation, {arguments.new_tokens} new tokens a request", rows)


if __name__ == "__main__":
    main()

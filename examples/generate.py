"""The high road: a model, some settings, texts as they are made, and the figures of the run.

`python examples/generate.py` uses the built-in default model; `python examples/generate.py FOLDER` your own.
"""

import sys

from attn_backends import LLM, SamplingParams, load_config

PROMPTS = ["The capital of France is", "Water boils at", "The three primary colours are"]


def main() -> None:
    config = load_config(overrides={"backend": "TORCH", "cache.memory": "256MiB", "scheduler.max_num_requests": 8})
    llm = LLM.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else None, config)

    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=24)):
        print(f"{output.prompt}▸{output.text} [{output.finish_reason}]\n")

    question = llm.render_prompt("Name a fruit that is yellow.")  # the model's chat template, if it has one
    for chunk in llm.stream([question], SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=1)):
        print(chunk.text, end="", flush=True)

    stats = llm.stats
    print(f"\n\n{llm.selection.name}: {llm.selection.reason}")
    print(f"{stats.num_new_tokens} tokens in {stats.num_steps} steps, {stats.peak_pages} KV pages at peak")


if __name__ == "__main__":
    main()

"""Hugging Face transformers on a backend by name: `generate()`, a session that keeps its cache, and `generate_batch()`.

`python examples/transformers_generate.py FOLDER` takes a Hugging Face folder; without one the built-in default model.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import attn_backends.adapters.transformers as ab
from attn_backends.engine.models.checkpoint import DEFAULT_MODEL, find_model
from attn_backends.engine.models.hf import convert_gguf

PROMPTS = ["The capital of France is", "Water boils at", "The three primary colours are"]


def main() -> None:
    ab.register()
    folder = sys.argv[1] if len(sys.argv) > 1 else find_model(DEFAULT_MODEL, convert_gguf)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="attn_backends:TORCH")
    greedy = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": tokenizer.pad_token_id}

    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    out = model.generate(**batch, **greedy, return_dict_in_generate=True)
    for text in tokenizer.batch_decode(out.sequences, skip_special_tokens=True):
        print(f"{text!r}")
    print(f"over the pages of {out.past_key_values.backend}\n")

    cache = ab.PagedCache(model.config)  # kept from turn to turn: a turn computes its own tokens alone
    turns = [{"role": "user", "content": "Name a fruit that is yellow."}]
    for question in ("And one that is red?", None):
        chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        answer = model.generate(**chat, **greedy, past_key_values=cache)[0, chat["input_ids"].shape[1] :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        print(f"{turns[-1]['content']} {text!r}, {cache.get_seq_length()} tokens cached")
        turns += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]

    config = GenerationConfig(**greedy, eos_token_id=tokenizer.eos_token_id)
    room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)  # without, most of the memory there is
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    for output in model.generate_batch(prompts, config, room, progress_bar=False).values():
        print(f"{tokenizer.decode(output.generated_tokens)!r}")


if __name__ == "__main__":
    main()

"""The loads that vllm_backends times in a process of its own: one model, one attention backend, in vLLM."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-8B": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
        "rope_theta": 500000.0,
    },
    "SmolLM2-135M": LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
    "toy": LLAMA | {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    },
}  # fmt: skip
OURS = "AB_"  # in front of a backend of ours
KINDS = ("check", "step", "long", "prefill", "mix")  # of loads, in the order in which they run
CHECKED = (3, 17, 130, 500, 900, 1500, 40, 257)  # prompt lengths whose log-probabilities are compared
DECODED = 8  # tokens of each


@dataclass(frozen=True)
class Sizes:
    """How much there is of each load."""

    requests: tuple[int, ...]  # that decode at once
    prompt: int
    new: int  # tokens that a step's time is taken over, thrice
    long: tuple[int, int]  # requests, and prompt tokens of each
    prefills: tuple[tuple[int, int], ...]
    mixed: int  # requests of mixed lengths
    longest: tuple[int, int]  # of their prompts, and of what they generate
    graphs: tuple[int, ...]
    max_model_len: int
    budget: int  # tokens of a step


GPU = Sizes(
    (1, 32, 256), 384, 64, (32, 6000), ((1, 4096), (64, 1024)), 512, (1024, 512),
    (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256), 8192, 8192,
)  # fmt: skip
TOY = Sizes((1, 4), 24, 8, (2, 100), ((1, 64), (4, 32)), 8, (64, 24), (), 2048, 256)


class Compilations(logging.Handler):
    """What vLLM's own monitor says was compiled after it was ready."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("vllm.utils.jit_monitor").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Loads:
    """An engine, and what is timed of it. Prompts are random, and the same for every backend."""

    def __init__(self, model: str, backend: str, sizes: Sizes, options: dict[str, Any], seed: int) -> None:
        self.vocab, self.sizes, self.seed = SHAPES[model]["vocab_size"], sizes, seed
        started = time.perf_counter()
        self.llm = make_llm(model, backend, sizes, options)
        self.ready_s = time.perf_counter() - started
        self.compilations = Compilations()
        self._warm: set[tuple[int, ...]] = set()  # lengths of requests that have run
        self._steps: list[tuple[float, int]] = []  # when a step ended, and how many requests with it
        self._step = self.llm.llm_engine.step
        self.llm.llm_engine.step = self._timed_step

    def _timed_step(self) -> Any:
        outputs = self._step()
        self._steps.append((time.perf_counter(), len(outputs)))
        return outputs

    def run(self, lens: Sequence[int], new: Sequence[int], seed: int, **more: Any) -> tuple[float, list[Any]]:
        """Seconds from the requests to their last token, and vLLM's outputs."""
        from vllm import SamplingParams

        numbers = np.random.default_rng((self.seed, seed))
        prompts = [{"prompt_token_ids": numbers.integers(3, self.vocab, n).tolist()} for n in lens]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False, **more) for n in new]
        self._steps.clear()
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - started
        assert [len(each.outputs[0].token_ids) for each in outputs] == list(new)
        return taken, outputs

    def step_ms(self, requests: int, prompt: int) -> list[float]:
        """Milliseconds of a decode step, of three stretches of `sizes.new` steps.

        Raises:
            RuntimeError: not all requests decode at once.
        """
        new, spread = self.sizes.new, self._steps_to_begin(requests, prompt)
        self._warm_up([prompt] * requests, [3] * requests)
        self.run([prompt] * requests, [3 * new + 8 + spread] * requests, 1)
        ends = [place for place, (_, count) in enumerate(self._steps) if count]
        if ends[-1] - ends[0] > spread:
            raise RuntimeError(
                f"the last of {requests} requests ended {ends[-1] - ends[0]} steps behind the first, and would begin "
                f"{spread} behind it at most, so they did not decode together: the cache holds too few tokens. Compare "
                "fewer backends --together, or give a smaller --model"
            )
        last = ends[0] - 1  # the last step of all of them
        times = [when for when, _ in self._steps[last - 3 * new : last + 1]]
        return [(times[i + new] - times[i]) / new * 1e3 for i in range(0, 3 * new, new)]

    def _steps_to_begin(self, requests: int, prompt: int) -> int:
        """Steps in which all prompts are taken in, at most, beside the tokens of those that decode already."""
        return math.ceil(requests * prompt / (self.sizes.budget - requests))

    def prefill_ms(self, requests: int, prompt: int, times: int) -> list[float]:
        """Milliseconds until the first token of all requests."""
        lens, new = [prompt] * requests, [1] * requests
        self._warm_up(lens, new)
        return [self.run(lens, new, seed)[0] * 1e3 for seed in range(1, times + 1)]

    def mixed_s(self, times: int) -> list[float]:
        """Seconds of requests of mixed lengths, all there at once."""
        numbers = np.random.default_rng(self.seed)
        lens, new = (
            np.exp(numbers.uniform(math.log(16), math.log(most), self.sizes.mixed)).astype(int).tolist()
            for most in self.sizes.longest
        )
        self._warm_up(lens, new)
        return [self.run(lens, new, seed)[0] for seed in range(1, times + 1)]

    def _warm_up(self, lens: Sequence[int], new: Sequence[int]) -> None:
        """Run requests of these lengths, unless such have run."""
        if (*lens, *new) not in self._warm:
            self._warm.add((*lens, *new))
            self.run(lens, new, 0)

    def logprobs(self) -> list[list[dict[str, float]]]:
        """The likeliest tokens' log-probabilities, by prompt and generated token."""
        lens = [min(n, self.sizes.max_model_len - DECODED) for n in CHECKED]
        _, outputs = self.run(lens, [DECODED] * len(lens), 7, logprobs=5)
        return [
            [{str(token): found.logprob for token, found in each.items()} for each in output.outputs[0].logprobs]
            for output in outputs
        ]

    def figures(self, kind: str, once: bool = False) -> list[dict[str, Any]]:
        """A row for each figure of one kind of load, which runs a few times, or once."""
        sizes = self.sizes
        if kind == "check":
            return [{"what": "check", "logprobs": self.logprobs()}]
        if kind == "step":
            return [_row(f"step, {n} x {sizes.prompt}", "ms", self.step_ms(n, sizes.prompt)) for n in sizes.requests]
        if kind == "long":
            count, prompt = sizes.long
            return [_row(f"step, {count} x {prompt}", "ms", self.step_ms(count, prompt))]
        if kind == "prefill":
            return [_row(f"prompts, {n} x {long}", "ms", self.prefill_ms(n, long, 1 if once else 3))
                    for n, long in sizes.prefills]  # fmt: skip
        return [_row(f"mixed load, {sizes.mixed} requests", "s", self.mixed_s(1 if once else 2))]

    def rows(self, wanted: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each figure, and what the engine says of itself."""
        made = [row for kind in KINDS if kind in wanted for row in self.figures(kind)]
        made.append({"what": "ready", "unit": "s", "value": self.ready_s})
        messages = self.compilations.messages
        made.append({"what": "compiled while serving", "unit": "", "value": len(messages), "messages": messages})
        return made


def _row(what: str, unit: str, taken: list[float]) -> dict[str, Any]:
    return {"what": what, "unit": unit, "value": statistics.median(taken), "all": taken}


def fill_weights(_: Any, model: Any, *__: Any) -> None:
    """Random weights that make a model's logits depend on its attention: vLLM's dummy ones are all near zero, norms'
    too. It takes the place of the method of vLLM's that makes those."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for _, weight in sorted(model.named_parameters()):
        if weight.dim() == 1:
            weight.data.fill_(1)
        else:
            weight.data.normal_(0, 1.5 / math.sqrt(weight.shape[-1]), generator=generator)


def make_llm(model: str, backend: str, sizes: Sizes, options: dict[str, Any]) -> Any:
    """vLLM's engine in this process, over a config that is written here."""
    on_gpu = torch.cuda.is_available()
    if backend.startswith(OURS):
        os.environ["ATTN_BACKENDS_VLLM"] = backend.removeprefix(OURS)
        from attn_backends.adapters.vllm.plugin import add_to_vllm

        add_to_vllm()  # as vLLM does where the package is installed
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = fill_weights
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(SHAPES[model] | {"torch_dtype": "bfloat16"}))
    settings: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0,
        "dtype": "bfloat16" if on_gpu else "float32", "max_model_len": sizes.max_model_len,
        "max_num_seqs": max(*sizes.requests, 8), "max_num_batched_tokens": sizes.budget,
        "enable_prefix_caching": False, "disable_log_stats": True,
    }  # fmt: skip
    if on_gpu:
        settings["attention_backend"] = "CUSTOM" if backend.startswith(OURS) else backend
        settings["gpu_memory_utilization"] = 0.6
        settings["compilation_config"] = {"cudagraph_capture_sizes": list(sizes.graphs)}
    else:
        settings["enforce_eager"] = True
    for name, value in options.items():
        both = isinstance(value, dict) and isinstance(settings.get(name), dict)
        settings[name] = settings[name] | value if both else value
    return LLM(**settings)


def run_one(model: str, backend: str, wanted: Sequence[str], options: dict[str, Any], seed: int) -> dict[str, Any]:
    """The figures of one process, and what they were measured with."""
    on_gpu = torch.cuda.is_available()
    loads = Loads(model, backend, GPU if on_gpu else TOY, options, seed)
    rows = loads.rows(wanted)
    import vllm

    with suppress(Exception):  # vLLM's own shutdown may complain; the figures are here
        loads.llm.llm_engine.engine_core.shutdown()
    return {"vllm": vllm.__version__, "rows": rows}

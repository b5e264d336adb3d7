"""The engine's own time a decode step: everything but planning attention and launching the model. No model, no GPU.

Model and plans are stubs: a few logits that are there already, and nothing. The time of a decode step is split by who
takes it: `schedule`, the runner (`arrange`: rows and pages; `table`: the step table; `launch`: the rest of it),
`sample`, `update`, and handing out (tokens to the host, texts to the caller).

    python -m benchmarks host engine_host [--requests 1 32 256] [--steps 1 8]

`same`: requests of one length, so that the batch stays as it is. `spread`: at each step some requests end.
`stream`: as `same`, with the text asked for piece by piece.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attn_backends import LLM, AttentionSpec, EngineConfig, SamplingParams
from attn_backends.engine.models.context import AttentionContext
from attn_backends.engine.models.loaded_model import LayerProbe, LoadedModel
from benchmarks.lib.harness import report

VOCAB, PROMPT, NEW = 259, 384, 256
NUM_LOGITS = 16  # to look for the largest of many is the device's work
PHASES = {  # in the order of a step
    "schedule": ("scheduler.schedule", "scheduler.follow"),
    "arrange": ("runner.arrange", "runner.grow"),
    "table": ("runner.table.step", "runner.table.advance"),
    "sample": ("sampler.choose",),
    "update": ("scheduler.update",),
    "launch": ("runner.run", "runner.run_next", "runner.layers.plan", "runner.layers.model.forward"),
}


@dataclass
class Clock:
    """Seconds by phase, each without the phases inside it. It runs from the first decode step to the last."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    inside: float = 0.0  # of calls that the running one has made

    def wrap(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self.inside = self.inside, 0.0
            started = time.perf_counter()
            result = call(*args, **kwargs)
            taken = time.perf_counter() - started
            self.seconds[phase] += taken - self.inside
            self.inside = before + taken
            return result

        return timed


@dataclass(frozen=True)
class Stub(LoadedModel):
    """Logits that are there already, of another set at each step."""

    logits: list[torch.Tensor] = field(default_factory=list)
    times: list[tuple[float, dict[str, float]]] = field(default_factory=list)  # of decode steps, as they begin
    clock: Clock = field(default_factory=Clock)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        if len(token_ids) == len(logits_at):
            self.times.append((time.perf_counter(), dict(self.clock.seconds)))
        return self.logits[len(self.times) % len(self.logits)][: len(logits_at)]


def stub(num_requests: int) -> Stub:
    alphabet = {char: 3 + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={"<pad>": 0, "<s>": 1, "</s>": 2} | alphabet, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(num_requests, NUM_LOGITS, generator=generator) for _ in range(7)]
    return Stub(
        torch.nn.Module(), PreTrainedTokenizerFast(tokenizer_object=tokenizer),
        {0: LayerProbe(AttentionSpec(1, 1, 16), None)}, PROMPT + NEW + 1, VOCAB, frozenset({2}), logits=logits,
    )  # fmt: skip


def engine(num_requests: int, num_steps: int) -> LLM:
    config = EngineConfig.model_validate({
        "backend": "TORCH", "graphs": {"mode": "none"},
        "cache": {"num_pages": num_requests * ((PROMPT + NEW) // 16 + 2)},
        "scheduler": {"max_num_requests": num_requests, "max_num_tokens": num_requests * PROMPT,
                      "decode_steps_per_launch": num_steps},
    })  # fmt: skip
    llm = LLM(config, stub(num_requests), torch.device("cpu"))
    object.__setattr__(llm.runner.layers, "plan", lambda *_: {})  # past a frozen class
    return llm


def instrument(llm: LLM, clock: Clock) -> None:
    """Let the clock time every phase's calls."""
    for phase, names in PHASES.items():
        for name in names:
            owner: Any = llm
            *path, last = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            if hasattr(owner, last):
                object.__setattr__(owner, last, clock.wrap(phase, getattr(owner, last)))


def run(llm: LLM, load: str, num_requests: int) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (num_requests, PROMPT), generator=generator).tolist()
    lengths = [NEW if load != "spread" else NEW - i * (NEW // 2) // num_requests for i in range(num_requests)]
    sampling = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    if load == "stream":
        for _ in llm.stream(prompts, sampling):
            pass
    else:
        llm.generate(prompts, sampling)


def step_us(load: str, num_requests: int, num_steps: int, repeats: int) -> dict[str, float]:
    """Microseconds of a decode step by phase: the run that took the least of several."""
    llm, best = engine(num_requests, num_steps), {"total": float("inf")}
    model = llm.model
    assert isinstance(model, Stub)
    instrument(llm, model.clock)
    for _ in range(repeats):
        model.times.clear()
        run(llm, load, num_requests)
        # From the first step of a launch to the first of another, or a launch would be counted in part.
        (start, at_start), (end, at_end) = model.times[0], model.times[(len(model.times) - 1) // num_steps * num_steps]
        count = (len(model.times) - 1) // num_steps * num_steps
        took = {phase: (at_end[phase] - at_start[phase]) * 1e6 / count for phase in PHASES}
        total = (end - start) * 1e6 / count
        if total < best["total"]:
            best = took | {"hand out": total - sum(took.values()), "total": total}
    return best


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 8], help="decode_steps_per_launch")
    parser.add_argument("--loads", nargs="+", default=["same", "spread", "stream"])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    rows: list[dict[str, object]] = []
    for load in arguments.loads:
        for num_requests in arguments.requests:
            for num_steps in arguments.steps:
                if load == "same" or num_requests > 1:
                    took = step_us(load, num_requests, num_steps, arguments.repeats)
                    rows.append({"load": load, "requests": num_requests, "steps": num_steps} | took)
    report("engine_host", "microseconds of a decode step on the host", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)  # its operations are small
    main()

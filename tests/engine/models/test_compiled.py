"""A compiled model gives the tokens of the same model run as it is, and what cannot be compiled is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine.models import compiled
from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.load import load_model, ready_model
from attn_backends.engine.models.loaded_model import LoadedModel
from attn_backends.validation import ConfigError
from tests.helpers.tiny_models import save_tiny, tiny_model

CPU = torch.device("cpu")
PROMPTS = ["a", "one two three", "xyz" * 12]
TIGHT = {"num_pages": 16, "page_size": 4}  # preemptions
SETTINGS = {"cache": TIGHT, "scheduler": {"max_num_tokens": 9}, "device": "cpu", "accelerate": "off"}
LONG = SamplingParams(max_tokens=12, ignore_eos=True)


def engine(folder: Path, graphs: bool = False) -> LLM:
    config = EngineConfig.model_validate(SETTINGS | {"model": str(folder)})
    model = load_model(config, CPU)
    return LLM(config, compiled.compile_model(model, CPU) if graphs else model, CPU)


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    """Together, with rows that come and go, prompts in between, a shared prefix and preemptions; then one alone."""
    prompts = [*PROMPTS, PROMPTS[2] + "b"]
    lengths = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (12, 2, 9, 14)]
    together = [output.token_ids for output in llm.generate(prompts, lengths)]
    assert min(llm.stats.num_preemptions, llm.stats.num_prefix_hit_tokens) > 0
    return together + [output.token_ids for output in llm.generate(PROMPTS[:1], LONG)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_hidden_layers": 1}),
        ("gemma2", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
        ("deepseek_v3", {"num_hidden_layers": 2}),  # attention's output is wider than what it is given for values
    ],
)
def test_the_same_tokens(tmp_path: Path, family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where the graphs run as they are: what a compiler makes of them is its own affair."""
    sizes: set[int] = set()
    run = compiled.run_graph

    def counted(graph: compiled.Graph, token_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.add(len(token_ids))
        return run(graph, token_ids, *others)

    folder = save_tiny(tmp_path / family, family, **changes)
    monkeypatch.setattr(compiled, "run_graph", counted)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    llm = engine(folder, graphs=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = tokens(llm)
    assert got == tokens(engine(folder))
    assert sizes >= {1, 2, 3, 9}


def test_attention_outside_of_a_step_is_an_error() -> None:
    with pytest.raises(LookupError):
        torch.ops.attn_backends.attend(*torch.ones(3, 1, 1, 4), 0, 4)


def test_a_cpu_is_refused_before_anything_is_read() -> None:
    config = EngineConfig(model="/nowhere", device="cpu", accelerate="compile", backend="TORCH")
    with pytest.raises(ConfigError, match=r"device cpu; allowed there: off or on.*set accelerate: on"):
        LLM.from_pretrained(config=config)
    with pytest.raises(ConfigError, match="set accelerate: on"):
        ready_model(tiny_model("llama", num_hidden_layers=1), None, "compile")


class Branching(torch.nn.Module):
    """What no graph can hold: a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        return input_ids if input_ids.sum() > 3 else -input_ids


def test_a_model_that_is_no_graph() -> None:
    with pytest.raises(ModelError, match="accelerate: on"):
        compiled.compile_model(LoadedModel(Branching(), None, {}, 8, 8, frozenset()), CPU)

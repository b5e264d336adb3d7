"""A compiled model gives the tokens of the same model run as it is, and says what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine import compiled
from attn_backends.engine.checkpoint import ModelError
from attn_backends.engine.hf import LoadedModel
from tests.tiny_models import save_tiny

PROMPTS = ["a", "one two three", "xyz" * 12]
SETTINGS = {"cache": {"num_pages": 64}, "scheduler": {"max_num_tokens": 9}, "device": "cpu"}  # prompts in chunks
LONG = SamplingParams(max_tokens=12, ignore_eos=True)


def engine(folder: Path, compile: str, **settings: Any) -> LLM:
    return LLM.from_pretrained(folder, EngineConfig.model_validate(SETTINGS | {"compile": compile} | settings))


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    together = [output.token_ids for output in llm.generate(PROMPTS, LONG)]
    return together + [output.token_ids for output in llm.generate(PROMPTS[:1], LONG)]  # and steps of one token


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3", {}), ("gemma2", {"layer_types": ["sliding_attention", "full_attention"]})],
)
def test_the_same_tokens(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = save_tiny(tmp_path / family, family, num_hidden_layers=2, **changes)
    llm = engine(folder, "model")
    assert isinstance(llm.model, compiled.CompiledModel)
    assert tokens(llm) == tokens(engine(folder, "none"))
    assert not inductor_config.freezing  # nothing of ours stays in torch's settings


def test_bfloat16(tmp_path: Path) -> None:
    """One token each: later ones may differ by rounding."""
    folder = save_tiny(tmp_path / "llama", num_hidden_layers=1)
    one = SamplingParams(max_tokens=1)
    got, expected = (
        [output.token_ids for output in engine(folder, how, dtype="bfloat16").generate(PROMPTS, one)]
        for how in ("model", "none")
    )
    assert got == expected


def test_attention_outside_of_a_step_is_an_error() -> None:
    with pytest.raises(LookupError):
        torch.ops.attn_backends.attend(*torch.ones(3, 1, 1, 4), 0)


def test_without_a_compiler(tiny_llama: Path) -> None:
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ModelError, match="apt install"):
        engine(tiny_llama, "model")


class Branching(torch.nn.Module):
    """What no graph can hold: a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        return input_ids if input_ids.sum() > 3 else -input_ids


def test_a_model_that_is_no_graph() -> None:
    model = LoadedModel(Branching(), None, {}, 8, 8, frozenset())
    with pytest.raises(ModelError, match="compile: none"):
        compiled.compile_model(model, torch.device("cpu"))

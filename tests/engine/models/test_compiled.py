"""A compiled model gives the tokens of the same model run as it is, and says what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine.models import compiled
from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.fused.linears import prefers_mkl, prefers_native
from attn_backends.engine.models.loaded_model import LoadedModel
from tests.helpers.best_tokens import assert_best_tokens
from tests.helpers.tiny_models import save_tiny

PROMPTS = ["a", "one two three", "xyz" * 12]
TIGHT = {"num_pages": 16, "page_size": 4}  # preemptions
SETTINGS = {"cache": TIGHT, "scheduler": {"max_num_tokens": 9}, "device": "cpu"}  # prompts in chunks
LONG = SamplingParams(max_tokens=12, ignore_eos=True)


def engine(folder: Path, accelerate: str, **settings: Any) -> LLM:
    return LLM.from_pretrained(folder, EngineConfig.model_validate(SETTINGS | {"accelerate": accelerate} | settings))


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    """Together, with rows that come and go, prompts in between, a shared prefix and preemptions; then one alone."""
    prompts = [*PROMPTS, PROMPTS[2] + "b"]
    lengths = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (12, 2, 9, 14)]
    together = [output.token_ids for output in llm.generate(prompts, lengths)]
    assert min(llm.stats.num_preemptions, llm.stats.num_prefix_hit_tokens) > 0
    return together + [output.token_ids for output in llm.generate(PROMPTS[:1], LONG)]


@pytest.fixture
def graph_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every step that ran in a graph."""
    sizes: list[int] = []
    run = compiled.run_graph

    def counted(graph: compiled.Graph, token_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(len(token_ids))
        return run(graph, token_ids, *others)

    monkeypatch.setattr(compiled, "run_graph", counted)
    return sizes


@pytest.mark.first
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_hidden_layers": 1}),
        ("qwen3", {"num_hidden_layers": 1}),
        ("gemma2", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_the_same_tokens(tmp_path: Path, family: str, changes: dict[str, Any], graph_sizes: list[int]) -> None:
    folder = save_tiny(tmp_path / family, family, **changes)
    llm = engine(folder, "compile")
    assert isinstance(llm.runner.layers.model, compiled.TracedModel)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = tokens(llm)
    assert got == tokens(engine(folder, "on"))
    ours = prefers_native(torch.float32) or prefers_mkl(torch.float32)
    several = family == "llama" and ours  # fused, its products operators: for any size
    assert set(graph_sizes) == ({2, 3} if several else {2})
    assert not inductor_config.freezing  # nothing of ours stays in torch's settings


def test_attention_that_cannot_be_traced(tmp_path: Path, graph_sizes: list[int]) -> None:
    """It is an operator in the graph then."""
    folder = save_tiny(tmp_path / "llama", num_hidden_layers=1)
    settings = {"cache": TIGHT | {"dtype": "float8_e4m3fn"}}
    llm = engine(folder, "compile", **settings)
    assert isinstance(llm.runner.layers.model, compiled.CompiledModel)
    assert tokens(llm) == tokens(engine(folder, "on", **settings))
    assert graph_sizes


@pytest.mark.first
def test_bfloat16(tmp_path: Path, graph_sizes: list[int]) -> None:
    """Tokens that are as good as tied may change places: how a processor multiplies bfloat16 decides."""
    # Of a token's size, all but logits: fewer products to tune.
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64, "num_key_value_heads": 4}
    folder = save_tiny(tmp_path / "llama", **sizes)
    eight, llm = SamplingParams(max_tokens=8, ignore_eos=True), engine(folder, "compile", dtype="bfloat16")
    assert_best_tokens(llm, folder, "llama", ["ab", "cd", "ef"], eight, least_same=0.75, **sizes)
    assert max(graph_sizes) > 2


def test_attention_outside_of_a_step_is_an_error() -> None:
    with pytest.raises(LookupError):
        torch.ops.attn_backends.attend(*torch.ones(3, 1, 1, 4), 0, 4)


def test_without_a_compiler(tiny_llama: Path) -> None:
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ModelError, match="apt install"):
        engine(tiny_llama, "compile")


class Branching(torch.nn.Module):
    """What no graph can hold: a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        return input_ids if input_ids.sum() > 3 else -input_ids


def test_a_model_that_is_no_graph() -> None:
    model = LoadedModel(Branching(), None, {}, 8, 8, frozenset(), source=Branching())
    with pytest.raises(ModelError, match="accelerate: on"):
        compiled.compile_model(model, torch.device("cpu")).prepared([], {}, {})

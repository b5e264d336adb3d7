"""Models on FLASHINFER: plan groups against transformers eager, and graphs against eager steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.testing.graphs.simulator import GraphSimulator
from tests.helpers import flashinfer_emulated  # noqa: F401 (registers)
from tests.helpers.best_tokens import assert_best_tokens
from tests.helpers.tiny_models import save_tiny

FAMILIES = ["gemma2", "gemma3", "gpt_oss", "mistral"]  # windows, soft caps and sinks, alone and alternating
HEADS = {"head_dim": 64}
PROMPTS = ["a", "the quick brown fox", "xyz" * 12, "the quick brown dog"]
LONG = SamplingParams(max_tokens=10, ignore_eos=True)
BUSY = {"cache": {"num_pages": 40, "page_size": 4}, "scheduler": {"max_num_tokens": 24, "max_num_requests": 4}}

PLACES = [
    pytest.param("FLASHINFER_EMULATED", "cpu", id="emulated"),
    pytest.param("FLASHINFER", "cuda", id="cuda", marks=pytest.mark.gpu),
]


def engine(folder: Path, name: str, device: str, **settings: object) -> LLM:
    if device == "cuda":
        pytest.importorskip("flashinfer")
    config = {"backend": name, "device": device, "dtype": "float16", "accelerate": "off"}
    recorder = GraphSimulator(refuse_unreachable=True) if device == "cpu" and "graphs" in settings else None
    return LLM.from_pretrained(folder, EngineConfig.model_validate(config | settings), recorder=recorder)


def texts(llm: LLM, sampling: SamplingParams = LONG) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(PROMPTS, sampling)]


@pytest.mark.parametrize(("name", "device"), PLACES)
@pytest.mark.parametrize("family", FAMILIES)
def test_plan_groups_against_transformers_eager(tmp_path: Path, family: str, name: str, device: str) -> None:
    folder = save_tiny(tmp_path / family, family, **HEADS)
    llm = engine(folder, name, device, **BUSY, graphs={"mode": "none"})
    assert_best_tokens(llm, folder, family, PROMPTS, LONG, **HEADS)


@pytest.mark.parametrize(("name", "device"), PLACES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_graphs_give_the_tokens_of_eager_steps(tmp_path: Path, family: str, name: str, device: str) -> None:
    folder = save_tiny(tmp_path / family, family, **HEADS)
    eager = engine(folder, name, device, **BUSY, graphs={"mode": "none"})
    expected = texts(eager)
    for mode in ("full", "piecewise"):
        llm = engine(folder, name, device, **BUSY, graphs={"mode": mode, "sizes": [1, 4]})
        assert texts(llm) == expected, mode
        assert llm.stats.num_graph_steps > llm.stats.num_steps / 3

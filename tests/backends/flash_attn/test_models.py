"""Models on FLASH_ATTN: graphs against eager steps, and plan groups against TORCH, with each provider."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_backends import LLM, EngineConfig
from attn_backends.testing.graphs.simulator import GraphSimulator
from tests.backends.flashinfer.test_models import HEADS, LONG, PROMPTS, texts
from tests.helpers import flash_attn_backends  # noqa: F401 (registers)
from tests.helpers.tiny_models import save_tiny, tiny_model

FA2, FA3 = "FLASH_ATTN_FLASH_ATTN", "FLASH_ATTN_VLLM_FA3"
PAGE_SIZES = {FA2: 256, FA3: 16}
MODULES = {FA2: "flash_attn", FA3: "vllm.vllm_flash_attn.flash_attn_interface"}
PLACES = [
    pytest.param(FA2, "cpu", id="fa2 emulated"),
    pytest.param(FA3, "cpu", id="fa3 emulated"),
    pytest.param(FA2, "cuda", id="fa2", marks=pytest.mark.gpu),
    pytest.param(FA3, "cuda", id="fa3", marks=pytest.mark.gpu),
]


def engine(folder: Path, name: str, device: str, **settings: object) -> LLM:
    """Steps of few tokens over few pages, so that prompts come in chunks and requests are preempted."""
    if device == "cuda":
        pytest.importorskip(MODULES[name])
    page_size = PAGE_SIZES[name]
    config = {
        "backend": name if device == "cuda" else f"{name}_EMULATED", "device": device, "dtype": "float16",
        "accelerate": "off", "cache": {"num_pages": 10, "page_size": page_size},
        "scheduler": {"max_num_tokens": 24, "max_num_requests": 4},
    }  # fmt: skip
    recorder = GraphSimulator(refuse_unreachable=True) if device == "cpu" and "graphs" in settings else None
    return LLM.from_pretrained(folder, EngineConfig.model_validate(config | settings), recorder=recorder)


@pytest.mark.parametrize(("name", "device"), PLACES)
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "mistral"])
def test_plan_groups_against_transformers_eager(tmp_path: Path, family: str, name: str, device: str) -> None:
    """Every token is one that transformers finds best, or as good as best at this precision."""
    folder = save_tiny(tmp_path / family, family, **HEADS)
    llm = engine(folder, name, device, graphs={"mode": "none"})
    reference = tiny_model(family, vocab_size=259, **HEADS)
    reference.load_state_dict(type(reference).from_pretrained(folder).state_dict())
    for output in llm.generate(PROMPTS, LONG):
        prompt = llm.model.tokenizer(output.prompt).input_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *output.token_ids]]), use_cache=False).logits
        logits = logits[0, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert bool((behind <= 0.02 * logits.std(-1)).all()), f"{output.prompt!r}: {behind.max():.3f} behind the best"


@pytest.mark.parametrize(("name", "device"), PLACES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_graphs_give_the_tokens_of_eager_steps(tmp_path: Path, family: str, name: str, device: str) -> None:
    folder = save_tiny(tmp_path / family, family, **HEADS)
    expected = texts(engine(folder, name, device, graphs={"mode": "none"}))
    for mode in ("full", "piecewise"):
        llm = engine(folder, name, device, graphs={"mode": mode, "sizes": [1, 4]})
        assert texts(llm) == expected, mode
        assert llm.stats.num_graph_steps > llm.stats.num_steps / 3


@pytest.mark.parametrize(("name", "device"), PLACES)
def test_several_steps_a_launch(tmp_path: Path, name: str, device: str) -> None:
    """Lengths that the host knows upper bounds of alone."""
    folder = save_tiny(tmp_path / "llama", "llama", **HEADS)
    expected = texts(engine(folder, name, device, graphs={"mode": "none"}))
    scheduler = {"max_num_tokens": 24, "max_num_requests": 4, "decode_steps_per_launch": 3}
    llm = engine(folder, name, device, graphs={"mode": "full", "sizes": [1, 4]}, scheduler=scheduler)
    assert texts(llm) == expected

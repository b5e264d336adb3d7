"""KV scales that the engine works out while it loads: what a text shows, then constants, in graphs too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from attn_backends import LLM, EngineConfig
from attn_backends.cli.app import app
from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.runner import HEADROOM, TEXT
from attn_backends.testing.graphs.simulator import GraphSimulator
from attn_backends.validation import ConfigError
from tests.engine.models import test_kv_scales as given_scales
from tests.engine.models.test_kv_scales import PROMPTS, checkpoint, expected, scales_of, tokens
from tests.helpers.tiny_models import save_tiny

CALIBRATED: dict[str, Any] = {"num_pages": 64, "dtype": "float8_e4m3fn", "calculate_kv_scales": True}
__all__ = ["checkpoint"]  # a fixture


def engine(folder: Path, recorder: GraphSimulator | None = None, **cache: Any) -> LLM:
    settings = {"accelerate": "off", "cache": {**CALIBRATED, "prefix_caching": False, **cache}}
    graphs = {"graphs": {"mode": "full", "sizes": [1, 2, 4]}} if recorder else {}
    return LLM.from_pretrained(folder, EngineConfig.model_validate(settings | graphs), recorder=recorder)


def largest(folder: Path, token_ids: list[int]) -> dict[int, list[float]]:
    """The largest key and value of each layer, as transformers' own model makes them."""
    found: dict[int, list[float]] = {}
    plain = transformers.AttentionInterface()["sdpa"]

    def watched(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
        found[module.layer_idx] = [float(part.abs().amax()) for part in (key, value)]
        return plain(module, query, key, value, *rest, **named)

    transformers.AttentionInterface.register("watched", watched)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="watched").eval()
    with torch.inference_mode():
        model(torch.tensor([token_ids]))
    return found


def test_scales_are_those_of_the_text_and_are_used(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llm = engine(tiny_llama)
    token_ids = llm.model.tokenizer(TEXT).input_ids[: llm.runner.limits.max_model_len]
    pairs = largest(tiny_llama, token_ids)
    scales = scales_of(llm)
    assert {layer: list(pair) for layer, pair in scales.items()} == {
        layer: pytest.approx([HEADROOM * number / 448 for number in pair], rel=1e-4) for layer, pair in pairs.items()
    }
    assert len(set(scales.values())) == len(scales), "layers differ"
    assert f"KV scales by a pass over {len(token_ids)} tokens" in caplog.text
    prompts = [llm.model.tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert tokens(llm) == list(expected(tiny_llama, scales, prompts))
    assert scales_of(llm) == scales, "constants from then on"


def test_graphs_that_are_captured_afterwards_have_them(tiny_llama: Path) -> None:
    """Scales far from 1, so that a graph without them would say something else."""
    captured = engine(tiny_llama, GraphSimulator(refuse_unreachable=True), dtype="float8_e5m2")
    eager = engine(tiny_llama, dtype="float8_e5m2")
    assert scales_of(captured) == scales_of(eager)
    assert max(scale for pair in scales_of(eager).values() for scale in pair) < 1e-2
    assert tokens(captured) == tokens(eager)
    assert captured.stats.num_graph_steps > 0


def test_latent_rows_have_one_scale(tmp_path: Path) -> None:
    llm = engine(save_tiny(tmp_path / "deepseek", "deepseek_v3"))
    assert all(v_scale == 1.0 and 0 < k_scale < 1 for k_scale, v_scale in scales_of(llm).values())


@pytest.mark.parametrize(
    ("cache", "told"),
    [
        ({"dtype": "auto"}, "allowed: false, as dtype is auto; true for an fp8 dtype without k_scale and v_scale"),
        ({"dtype": "bfloat16"}, "allowed: false, as dtype is bfloat16"),
        ({"k_scale": 0.5}, "allowed: false, as dtype is float8_e4m3fn and k_scale is set"),
    ],
)
def test_where_it_has_no_meaning(cache: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.model_validate({"cache": {**CALIBRATED, **cache}})


def test_a_checkpoint_with_scales_is_not_calibrated(checkpoint: Any) -> None:
    folder = checkpoint(given_scales.of_attention(given_scales.drawn(1)))
    with pytest.raises(ModelError, match=r"brings KV scales: leave cache\.calculate_kv_scales out to use them"):
        engine(folder)


def test_the_command_line_takes_it(tmp_path: Path, tiny_llama: Path) -> None:
    config = tmp_path / "fp8.yaml"
    config.write_text("cache: {dtype: float8_e4m3fn, calculate_kv_scales: true, num_pages: 64}\naccelerate: off\n")
    asked = ["generate", "--config", str(config), "--model", str(tiny_llama), "--prompt", "a", "--max-tokens", "2"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output

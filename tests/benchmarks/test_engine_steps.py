"""The benchmark of engine steps runs on a DeepSeek-shaped model with random weights, for each backend it is given."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest


def test_a_deepseek_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.import_module("benchmarks.lib.harness"), "RESULTS", tmp_path)
    shapes = importlib.import_module("benchmarks.engine.random_models").SHAPES
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 4, "vocab_size": 300, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
             "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16}  # fmt: skip
    monkeypatch.setitem(shapes, "DeepSeek-V2-Lite", shapes["DeepSeek-V2-Lite"] | small)
    given = ("--model DeepSeek-V2-Lite --backend TORCH_MLA TORCH --device cpu --dtype float32 --memory 1MiB "
             "--mode eager --prompt-tokens 4 --new-tokens 10 --requests 1 3 --repeats 1")  # fmt: skip
    importlib.import_module("benchmarks.engine.engine_steps").main(given.split())
    rows = json.loads((tmp_path / "engine_steps_deepseek-v2-lite_cpu.json").read_text())["rows"]
    assert [(row["backend"], row["requests"]) for row in rows] == [("TORCH_MLA", 1), ("TORCH_MLA", 3)]
    assert all(row["eager tokens/s"] == pytest.approx(1e3 * row["requests"] / row["eager ms"]) for row in rows)
    assert "dropped out: TORCH: Unsupported" in capsys.readouterr().out

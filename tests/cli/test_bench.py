"""`attn-backends bench`: what it measures, keeps and says, with a clock of the test; and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from attn_backends.cli import app as cli
from attn_backends.machine import cpu_name
from attn_backends.registry import user_table
from attn_backends.testing.bench import chart
from tests.helpers.tiny_models import save_tiny

HEADS = "layers: [{num_qo_heads: 4, num_kv_heads: 2, head_dim: 32, count: 2}]\nmax_model_len: 40\n"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of tables; loads are two, and every call takes five microseconds."""
    from attn_backends.testing.bench import loads, measure

    def clock(run: Any) -> float:
        run()
        return 5.0

    monkeypatch.setattr(user_table, "table_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(measure, "make_clock", lambda device: clock)
    monkeypatch.setattr(loads, "DECODES", ((2, 30), (3, 1000)))
    monkeypatch.setattr(loads, "PROMPTS", ((1, 20),))
    return tmp_path / "kept"


@pytest.fixture
def heads(tmp_path: Path) -> str:
    file = tmp_path / "heads.yaml"
    file.write_text(HEADS)
    return str(file)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", "--device", "cpu", *words])


def test_times_are_shown_kept_and_used(kept: Path, heads: str) -> None:
    result = run("--layers", heads)
    assert result.exit_code == 0, result.output
    assert "2 decodes of 30" in result.output
    assert "3 decodes of 40" in result.output
    assert "1 prompts of 20" in result.output
    assert "AUTO takes TORCH for these layers. AUTO: the first as measured (TORCH 5.0 us" in result.output
    table = user_table.read_table(cpu_name())
    assert table is not None
    assert [(row.phase, *row.load, row.us) for row in table.rows] == [
        ("decode", 2, 30, {"TORCH": 5.0}), ("prefill", 1, 20, {"TORCH": 5.0}), ("decode", 3, 40, {"TORCH": 5.0}),
    ]  # fmt: skip
    assert table.stale() is None
    assert {"torch", "attn-backends"} <= set(table.versions)
    assert "flash-attn" not in table.versions  # it does not run on a CPU, installed or not
    if chart.can_draw():
        assert {path.suffix for path in kept.iterdir()} == {".json", ".svg", ".png"}
    listed = CliRunner().invoke(cli.app, ["list"]).output
    assert f"by times that attn-backends bench measured on {cpu_name()}" in " ".join(listed.split())


def test_json_without_keeping(kept: Path, heads: str, tmp_path: Path) -> None:
    result = run("--layers", heads, "--json", "--no-save", "--dtype", "bfloat16", "--minutes", "1")
    found = json.loads(result.stdout)
    assert [row["us"] for row in found["rows"]] == 3 * [{"TORCH": 5.0}]
    assert found["rows"][0]["heads"] == [4, 2, 32]
    assert found["written"] == []
    assert "by priority" in found["auto"]
    assert not kept.exists()


def test_a_chart_in_a_folder_of_the_users(
    kept: Path, heads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    found = json.loads(run("--layers", heads, "--json", "--chart", str(tmp_path / "charts")).stdout)
    assert found["notes"] == ["a chart needs matplotlib: pip install matplotlib"]
    assert [Path(path).suffix for path in found["written"]] == [".json"]
    monkeypatch.undo()


def test_a_dry_run_measures_nothing(kept: Path, heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.testing.bench.measure.make_run", None)
    plan = json.loads(run("--layers", heads, "--dry-run", "--json").stdout)
    assert plan["backends"] == ["TORCH"]
    assert plan["loads"] == ["2 decodes of 30", "1 prompts of 20", "3 decodes of 40"]
    assert plan["would_write"].startswith(str(kept))
    assert "TRITON" in plan["left_out"]
    assert "2 decodes of 30, 1 prompts of 20" in run("--layers", heads, "--dry-run").output
    assert not kept.exists()


def test_a_models_config_alone_is_enough(kept: Path, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama", "llama")
    (alone := tmp_path / "alone").mkdir()
    (alone / "config.json").write_text((folder / "config.json").read_text())
    for model in (folder, alone / "config.json"):
        found = json.loads(run("--model", str(model), "--json", "--no-save").stdout)
        assert {row["phase"] for row in found["rows"]} == {"decode", "prefill"}
    weightless = run("--model", str(alone))
    assert weightless.exit_code != 0  # a folder is a model's, with its weights


def test_nothing_that_runs_is_a_failure(kept: Path, heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*args: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("attn_backends.testing.bench.measure.make_run", dies)
    result = run("--layers", heads)
    assert result.exit_code == 1
    assert "TORCH has no time of 2 decodes of 30: RuntimeError: no kernel" in result.output
    assert not kept.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layers", "nothing.yaml"], "cannot read --layers nothing.yaml"),
        (["--layers", "nothing.yaml", "--model", "x"], "--layers takes the place of --model"),
        (["--model", "nothing"], "no model 'nothing'"),
        (["--dtype", "int8"], "dtype (from option dtype): got 'int8'"),
    ],
)
def test_wrong_input_is_refused(kept: Path, words: list[str], told: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_layers_that_nothing_serves_are_refused_with_the_reasons(kept: Path, tmp_path: Path) -> None:
    file, config = tmp_path / "heads.yaml", tmp_path / "config.yaml"
    plain = "{num_qo_heads: 4, head_dim: 32}"
    latent = "{num_qo_heads: 4, head_dim: 24, head_dim_vo: 16, kv_lora_rank: 32, qk_rope_head_dim: 8}"
    file.write_text(f"layers: [{plain}, {latent}]")
    config.write_text("cache: {layout: HND}\n")
    result = run("--layers", str(file), "--config", str(config))
    assert result.exit_code == 2
    assert "no backend that AUTO may choose serves these layers on cpu" in " ".join(result.output.split())

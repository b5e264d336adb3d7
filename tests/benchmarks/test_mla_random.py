"""MLA decodes drawn at random: what is drawn, and what is measured at them."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.attention import mla_random
from benchmarks.attention.mla_draws import BOUNDS, MOST_TOKENS, ONE_TOKEN, WIDTH, draw, published_heads

MANY = [draw(1000, index, BOUNDS["cuda"]) for index in range(1000)]
ASKED = ("--seed", "1", "--rounds", "1", "--device", "cpu", "--backend", "torch_mla")


def test_heads_are_those_of_models() -> None:
    drawn = Counter(each.shape.heads for each in MANY)
    assert drawn.keys() == {(heads, 1, WIDTH) for _, heads in published_heads()}
    assert {16, 20, 64, 128} <= {heads for heads, _, _ in drawn}
    assert min(drawn.values()) > 0.5 * len(MANY) / len(drawn)


def test_sizes_are_in_bounds_and_span_them() -> None:
    bounds = BOUNDS["cuda"]
    for each in MANY:
        lens, query_len = each.shape.seq_lens, each.shape.query_len
        assert bounds.shortest <= min(lens)
        assert max(lens) <= bounds.keys
        assert len(lens) <= bounds.requests
        assert 1 <= query_len <= min(MOST_TOKENS, *lens)
        assert 2 * WIDTH * sum(lens) <= bounds.num_bytes
        assert each.shape.flops <= bounds.flops
    assert sum(each.shape.query_len == 1 for each in MANY) / len(MANY) == pytest.approx(ONE_TOKEN, abs=0.05)
    assert {each.shape.query_len for each in MANY} == {*range(1, MOST_TOKENS + 1)}
    assert sum(max(each.shape.seq_lens) <= 64 for each in MANY) > 100
    assert sum(max(each.shape.seq_lens) > 30_000 for each in MANY) > 50


def test_a_number_names_one_shape() -> None:
    assert [draw(1000, index, BOUNDS["cuda"]) for index in range(50)] == MANY[:50]
    assert len({each.shape for each in MANY}) > 950


def test_layers_and_decodes_are_measured_and_a_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emulated = importlib.import_module("tests.emulated.flash_attn_mla")
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", emulated)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    path = tmp_path / "mla.json"
    for count in (1, 2):
        mla_random.main([*ASKED, "--count", str(count), "--json", str(path)])
        rows = json.loads(path.read_text())["rows"]
        assert [row["id"] for row in rows] == [f"1/{index}" for index in range(count)]
    said = capsys.readouterr().out
    assert said.count("1/0") == 1
    assert "geometric_mean" in said
    for row in rows:
        for form in ("decode", "layer"):
            assert row[f"{form} best other"] in {"FA3 qv", "FA3 qv, page 32"}
            assert 0 < row[f"{form} low"] <= row[f"{form} ratio"] <= row[f"{form} high"]
            assert row[f"{form} us"] > 0


def test_a_seed_for_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mla_random.parse(["--seed", "5000"])
    assert "give one of 0 to 999 to tune by" in capsys.readouterr().err

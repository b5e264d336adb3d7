"""Reports of `verify` merged, and the page and the table made of them: what ran, was refused, or did not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attn_backends.registry import support
from attn_backends.testing.verify.pairs import Pairs
from benchmarks.correctness.merge_verify import merge
from benchmarks.correctness.what_ran import PAGE, RESULTS, SHIPPED, page, shipped

FACTORS = {"dtype": ("float16", "float32"), "page_size": (16, 64), "sinks": ("off", "on")}


def masks(*rows: dict[str, Any], given: Any = FACTORS) -> list[str]:
    pairs = Pairs(given)
    for row in rows:
        pairs.add(row)
    return pairs.as_json()


def report(seed: int = 0, values: Any = None, run: Any = (), refused: Any = None, **more: Any) -> dict[str, Any]:
    given = values or {name: {str(value): 0 for value in each} for name, each in FACTORS.items()}
    return {
        "backend": "TRITON", "size": "large", "first_seed": seed, "command": "c", "device": "cuda",
        "date": "2026-11-24",
        "machine": {"gpu": "NVIDIA H200", "compute_capability": "9.0"}, "versions": {"torch": "2.11.0"},
        "seconds": 2.0,
        "num_cases": 3, "num_steps": 5, "cases": {"decode": 3}, "steps": {"decode": 5}, "refused": {}, "findings": [],
        "worst": {"float16 output over float16": {"of_tolerance": 0.25, "seed": seed}}, "declared": True,
        "values": given, "pairs": {"run": masks(*run, given=given), "refused": refused or {}}, **more,
    }  # fmt: skip


def test_committed_pages_are_what_the_script_makes() -> None:
    results = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == page(results), "run python -m benchmarks correctness what_ran"
    assert json.loads(SHIPPED.read_text()) == shipped(results), "run python -m benchmarks correctness what_ran"


def test_pairs_of_several_runs_are_one_set() -> None:
    values = {"dtype": {"float16": 2, "float32": 0}, "page_size": {"16": 2, "64": 0}, "sinks": {"off": 0, "on": 0}}
    turned = {"sinks": {"on": 1, "off": 0}, "dtype": {"float32": 0, "float16": 1}, "page_size": {"64": 1, "16": 0}}
    one = report(1, values, run=[{"dtype": "float16", "page_size": 16}])
    other = report(2, turned, run=[{"dtype": "float16", "page_size": 64, "sinks": "on"}])
    both = merge([one, other])["backends"]["TRITON"]
    assert both["values"]["dtype"] == {"float16": 3, "float32": 0}
    assert both["values"]["sinks"] == {"off": 0, "on": 1}
    assert both["num_pairs"] == {"declared": 12, "run": 4, "refused": {}, "not_run": 8}
    assert both["pairs_not_run"]["dtype=float16"] == ["sinks=off"]
    assert len(both["pairs_not_run"]["dtype=float32"]) == 4


def test_what_one_run_refuses_and_another_runs_has_run() -> None:
    row = {"dtype": "float32", "sinks": "on"}
    refuses = report(1, refused={"sinks": masks(row, {"page_size": 64})})
    assert merge([refuses])["backends"]["TRITON"]["num_pairs"]["refused"] == {"sinks": 1}
    both = merge([refuses, report(2, run=[row])])["backends"]["TRITON"]["num_pairs"]
    assert (both["run"], both["refused"], both["not_run"]) == (1, {"sinks": 0}, 11)


def test_a_report_without_values_says_nothing_of_them() -> None:
    older = report(1)
    del older["values"], older["pairs"]
    assert "values" not in merge([older])["backends"]["TRITON"]
    assert merge([older, report(2)])["backends"]["TRITON"]["num_pairs"]["not_run"] == 12


MEMORY = {
    "seed": 7,
    "kind": "decode",
    "what": "CUDA error: out of memory",
    "command": "attn-backends verify TRITON --case 7",
}
OTHER = {**MEMORY, "seed": 8, "what": "the output is off", "command": "attn-backends verify TRITON --case 8"}


@pytest.mark.parametrize(("printed", "num_findings"), [("found: nothing", 1), ("found: the output is off", 2)])
def test_cases_that_were_mended_are_no_findings(printed: str, num_findings: int) -> None:
    """Where nothing was found in them again, with the cause; one that was not run again stays."""
    mended = [{"command": OTHER["command"], "cause": "a rule was wrong", "printed": ["seed", printed]}]
    before = merge([report(1, findings=[MEMORY, OTHER])], mended=mended)
    merged = merge([before, report(2)])  # it stays so when more is merged
    assert merged["num_findings"] == num_findings
    (mine,) = merged["backends"].values()
    assert MEMORY in mine["findings"]
    assert [each["cause"] for each in mine["mended"]] == ["a rule was wrong"] * (2 - num_findings)
    assert ("1 more were findings" in page(merged)) is (num_findings == 1)


@pytest.mark.parametrize(("printed", "num_findings"), [("found: nothing", 1), ("found: the output is off", 2)])
def test_cases_of_memory_that_passed_by_themselves_are_no_findings(printed: str, num_findings: int) -> None:
    """Nothing else that was found is forgotten, whatever its case printed later."""
    alone = [{"command": each["command"], "printed": ["seed", printed]} for each in (MEMORY, OTHER)]
    found = report(1, findings=[MEMORY, OTHER])
    merged = merge([found], alone)
    assert merged["num_findings"] == num_findings
    mine = merged["backends"]["TRITON"]
    assert OTHER in mine["findings"]
    assert len(mine["ran_alone"]) == 2 - num_findings
    assert ("memory was too little for 1," in page(merged)) is (num_findings == 1)
    if num_findings == 1:
        assert mine["ran_alone"] == [{**MEMORY, "printed_alone": ["seed", printed]}]
    assert merge([found])["num_findings"] == 2


def test_runs_of_two_gpus_are_not_merged() -> None:
    with pytest.raises(ValueError, match="TRITON ran on NVIDIA A100 and on NVIDIA H200: merge the runs of each"):
        merge([report(1), report(2, machine={"gpu": "NVIDIA A100"})])


def test_a_run_that_goes_on_has_cases_of_the_same_seed() -> None:
    assert merge([report(1), report(1, continued=True)])["num_cases"] == 6
    with pytest.raises(ValueError, match="TRITON from seed 1"):
        merge([report(1), report(1)])


def test_the_page_says_what_ran_what_is_refused_and_what_did_not_run() -> None:
    values = {"dtype": {"float16": 2, "float32": 0}, "page_size": {"16": 2, "64": 0}, "sinks": {"off": 2, "on": 0}}
    row = {"dtype": "float16", "page_size": 16, "sinks": "off"}
    refused = {"page_size": masks({"page_size": 64})}
    results = merge([report(1, values=values, run=[row], refused=refused)])
    text = page(results)
    section = text.split("## TRITON\n")[1].split("\n## ")[0]
    assert "NVIDIA H200 (compute capability 9.0), 2026-11-24; torch 2.11.0." in section
    assert "3 cases, 5 steps, 0 findings. The worst error is 0.25 of its tolerance: float16 output over" in section
    assert "| dtype | float16: 2, float32: **not run** |" in section
    assert "| page_size | 16: 2, 64: refused (page_size) |" in section
    assert "12 declared, 3 run, none refused, 9 not run." in section
    assert "dtype=float16 with sinks=on" in section
    assert "## FLASHMLA\n\nNot run." in text
    (line,) = shipped(results)["TRITON"]
    assert line == {"provider": None, "machine": "NVIDIA H200", "cases": 3, "values": 5, "values_run": 3, "pairs": 12,
                    "pairs_run": 3}  # fmt: skip


def test_providers_stand_with_their_backend() -> None:
    results = merge([report(backend="FLASH_ATTN_VLLM_FA3"), report(backend="FLASH_ATTN_MLA")])
    assert "## FLASH_ATTN with vllm_fa3" in page(results)
    found = shipped(results)
    assert [line["provider"] for line in found["FLASH_ATTN"]] == ["vllm_fa3"]
    assert [line["provider"] for line in found["FLASH_ATTN_MLA"]] == [None]


def test_the_support_table_says_where_a_backend_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"A": [{"provider": "p", "machine": "NVIDIA H200", "cases": 3, "values": 5, "values_run": 4, "pairs": 12,
                   "pairs_run": 3}, {"provider": None, "machine": "AMD EPYC", "cases": 7}]}  # fmt: skip
    monkeypatch.setattr(support, "_runs", lambda: runs)
    assert support.ran("A") == "H200, p: 4 of 5 values, 3 of 12 pairs; AMD EPYC: 7 cases"
    assert support.ran("B") == "not run"


def test_a_table_of_every_run_stays_small() -> None:
    assert Path(SHIPPED).stat().st_size < 20_000

"""The benchmarks of attention run: on tiny shapes, without a GPU, with FlashInfer emulated."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
import torch

from attn_backends import AttentionSpec
from attn_backends.backends.flash_attn.fa2 import FlashAttn2
from attn_backends.backends.flash_attn.fa3 import VllmFa3
from attn_backends.backends.flash_attn.fa4 import FlashAttn4
from attn_backends.testing.reference import reference_attention
from tests.emulated import flash_attn, flash_attn_4, vllm_flash_attn
from tests.helpers.flash_attn_backends import emulated
from tests.helpers.flashinfer_emulated import EmulatedFlashInfer


class Script(Protocol):
    def __call__(self, name: str, *arguments: str) -> list[dict[str, Any]]: ...


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """Runs a script; returns the rows that it wrote. To draw them takes longer than to measure them, and is off."""
    monkeypatch.setattr(load("benchmarks.lib.harness"), "RESULTS", tmp_path)
    monkeypatch.setattr(load("benchmarks.attention.attention"), "find_spec", lambda name: None)

    def run(name: str, *arguments: str) -> list[dict[str, Any]]:
        load(f"benchmarks.{name}").main(["--device", "cpu", "--backend", "TORCH", *arguments])
        (path,) = tmp_path.glob("*.json")
        rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
        return rows

    return run


@pytest.fixture
def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", load("tests.emulated.flashinfer"))


@pytest.mark.usefixtures("_flashinfer")
def test_every_contender_of_every_shape_is_right(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("benchmarks.attention.attention"), "find_spec", find_spec)
    rows = script("attention.attention", "--shapes", "tiny", "--rounds", "1")
    assert load("benchmarks.lib.harness").RESULTS.joinpath("attention_torch_tiny.png").stat().st_size > 10_000
    assert [row["contender"] for row in rows if row["with KV write us"]] == ["TORCH"] * 7
    bare = {row["contender"] for row in rows} - {"TORCH"}
    assert bare == {"FlashInfer tensor-core", "FlashInfer CUDA-core", "FlashInfer tensor-core, fixed lengths",
                    "FlashInfer CUDA-core, fixed lengths", "FlashInfer fa2", "FlashInfer fa3",
                    "FlashInfer fa2, ragged", "FlashInfer fa3, ragged"}  # fmt: skip
    assert all(row["vs best bare"] > 0 and row["error"] < 1e-2 for row in rows)
    assert all((row["read us"] is None) == ("prefill" in row["shape"] or "window" in row["shape"]) for row in rows)


@pytest.mark.usefixtures("_flashinfer")
def test_flashinfer_is_beside_the_fastest_of_its_bare_kernels(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the mode, those that are measured; for decodes not those planned for fixed lengths, though they be faster."""
    attention, name = load("benchmarks.attention.attention"), EmulatedFlashInfer.name
    monkeypatch.setitem(attention.OWN, name, attention.OWN["FLASHINFER"])
    us = {name: 6.0, "FlashInfer CUDA-core": 3.0, "FlashInfer fa2": 4.0, "FlashInfer fa3, ragged": 2.0}
    twins: list[dict[str, str]] = []

    def calls_us(right: dict[str, Any], *further: Any) -> Any:
        twins.append(further[-1])
        return {each: [us.get(each, 1.0 if each.endswith("fixed lengths") else 9.0)] for each in right}, 1.0

    monkeypatch.setattr(attention, "calls_us", calls_us)
    rows = script("attention.attention", "--shapes", "tiny", "--rounds", "1", "--backend", name)
    ratios = [row["vs own bare"] for row in rows if row["contender"] == name]
    assert ratios == [2.0, 2.0, 3.0, 1.5, 2.0, 3.0, 1.5]
    assert all(row["vs own bare"] is None for row in rows if row["contender"] != name)
    for given in twins:  # which are in turns side by side
        assert len(set(given.values())) == 1
        assert set(given) >= {name, "FlashInfer fa2", "FlashInfer tensor-core"}
        assert not any("fixed lengths" in each for each in given)


def test_a_result_says_what_made_it(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/there/benchmarks/attention/attention.py", "--name", "all of it"])
    script("attention.attention", "--shapes", "tiny", "--rounds", "1", "--no-bare", "--name", "all")
    result = json.loads(load("benchmarks.lib.harness").RESULTS.joinpath("attention_all.json").read_text())
    assert result["benchmark"] == "attention_all"
    assert result["command"] == "python -m benchmarks attention attention --name 'all of it'"


def test_a_shape_that_nobody_can_be_measured_at_is_an_error(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise MemoryError("none")

    monkeypatch.setattr(load("benchmarks.attention.attention"), "make_problem", no_memory)
    with pytest.raises(SystemExit, match="a backend of ours dropped out"):
        script("attention.attention", "--shapes", "tiny256", "--rounds", "1", "--no-bare")


@pytest.mark.usefixtures("_flashinfer")
def test_plans_are_timed_eager_and_for_graphs(script: Script) -> None:
    rows = script("host.plan_host_time", "--requests", "2", "--tokens", "64", "--steps", "4")
    ours = [row["contender"] for row in rows if row["contender"].startswith("TORCH")]
    assert ours == [f"TORCH, {kind}, {how}" for kind in ("eager", "graph") for how in ("step", "advance")]
    assert len(rows) == len(ours) + 10
    assert all(row["with table us"] >= row["plan us"] > 0 for row in rows)


def test_forwards_are_timed_by_batch(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    paged_problem = load("benchmarks.attention.paged_problem")
    small = (4, 2, 64)
    shapes = [paged_problem.Shape((20, 30), small), paged_problem.Shape((20, 30), small, is_prefill=True, decodes=1)]
    monkeypatch.setattr(load("benchmarks.host.forward_host_time"), "SHAPES", shapes)
    rows = script("host.forward_host_time", "--calls", "3")
    assert [row["batch"] for row in rows] == [shape.name for shape in shapes]
    assert all(row["contender"] == "TORCH" and row["p90 us"] >= row["us"] > 0 for row in rows)


@pytest.mark.usefixtures("_flashinfer")
def test_a_shared_prefix_is_used_and_checked(script: Script) -> None:
    (row,) = script("rules.cascade", "--requests", "3", "--prefixes", "32", "--own", "20", "--rounds", "1")
    assert row["prefix used"] == 32
    assert all(row[f"{name} us"] > 0 for name in ("plain", "shared", "bare plain", "bare cascade"))


def test_a_cache_in_fp8_has_its_own_share_of_bytes(script: Script) -> None:
    rows = script("attention.attention", "--shapes", "tiny", "--rounds", "1", "--no-bare", "--dtype", "fp8")
    assert len(rows) == 7
    shape = load("benchmarks.attention.attention").SHAPES["tiny"][0]
    moved = rows[0]["TB/s"] * rows[0]["us"] * 1e6
    assert moved == pytest.approx(2 * 64 * (120 * 2 * 1 + 3 * 4 * 2))
    assert shape.num_bytes(torch.bfloat16, torch.bfloat16) == 2 * 64 * (120 * 2 * 2 + 3 * 4 * 2)


@pytest.fixture
def _flash_attn(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated kernels under the names of the real ones, for FLASH_ATTN and for the bare kernels."""
    for package in ("vllm", "vllm.vllm_flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for name, module in {**flash_attn.MODULES, **vllm_flash_attn.MODULES}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", flash_attn_4)
    providers = [emulated(VllmFa3), emulated(FlashAttn2), emulated(FlashAttn4)]
    for where in ("state.FlashAttnState.providers", "backend.FlashAttnBackend.providers", "state.PROVIDERS"):
        monkeypatch.setattr(f"attn_backends.backends.flash_attn.{where}", providers)
    for name, value in {"PROVIDERS": providers, "PROVIDER_CAN": {p.name: p.capabilities() for p in providers}}.items():
        monkeypatch.setattr(load("benchmarks.attention.attention"), name, value)
    monkeypatch.setattr("attn_backends.registry.table._classes", {})


@pytest.mark.usefixtures("_flash_attn")
def test_each_provider_is_beside_its_own_bare_kernel(script: Script) -> None:
    names = ("FLASH_ATTN", "FLASH_ATTN:flash_attn", "FLASH_ATTN:flash_attn_4")
    rows = script("attention.attention", "--shapes", "tiny256", "--rounds", "1", "--backend", *names)
    ours = {row["contender"]: row for row in rows if row["contender"].startswith("FLASH_ATTN")}
    assert set(ours) == {"FLASH_ATTN:vllm_fa3", "FLASH_ATTN:flash_attn, page 256", "FLASH_ATTN:flash_attn_4"}
    bare = {row["contender"] for row in rows} - set(ours)
    assert {"FA3", "FA3, scheduled once", "FA2, page 256", "FA4"} <= bare
    assert all(row["vs own bare"] > 0 and row["error"] < 1e-2 for row in ours.values())


@pytest.mark.usefixtures("_flash_attn")
def test_kernels_that_round_queries_are_held_against_such(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a limit of their own; no other kernel is. Windows over such caches they refuse."""
    shapes = load("benchmarks.attention.attention").SHAPES
    monkeypatch.setitem(shapes, "tiny", [shape for shape in shapes["tiny"] if shape.window_left < 0])
    rows = script(
        "attention.attention", "--shapes", "tiny", "--rounds", "1", "--dtype", "fp8", "--backend", "FLASH_ATTN", "TORCH"
    )
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["contender"], []).append(row["error"])
    assert {"TORCH", "FLASH_ATTN:vllm_fa3", "FA3", "FA3, scheduled once"} == set(errors)
    for name, found in errors.items():
        assert max(found) < (1e-2 if name == "TORCH" else 8e-2), name
        assert (max(found) < 1e-2) == (name == "TORCH"), name
    problem = load("benchmarks.attention.paged_problem")
    shape = problem.Shape((40,), (4, 2, 64))
    wide = problem.make_problem(shape, torch.bfloat16, 16, torch.device("cpu"))
    narrow = problem.make_problem(shape, torch.float8_e4m3fn, 16, torch.device("cpu"))
    assert (wide.rounded.error_limit, narrow.error_limit, narrow.rounded.error_limit) == (1e-2, 1e-2, 8e-2)
    assert wide.rounded is wide  # whose answers are worked out once for all
    assert narrow.rounded is narrow.rounded


def test_a_contender_that_is_missing_or_wrong_drops_out(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    kernel = load("benchmarks.attention.bare_kernels").Bare(lambda problem: lambda i: problem.outputs[i].zero_())
    monkeypatch.setitem(load("benchmarks.attention.bare_kernels").DECODE, "FA3", kernel)
    rows = script("attention.attention", "--shapes", "tiny", "--rounds", "1")
    assert {row["contender"] for row in rows} == {"TORCH"}


def test_mla_decodes_and_layers_are_right(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = load("tests.emulated.flash_attn_mla")
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", emulated)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    asked = ("--backend", "TORCH_MLA", "--shapes", "tiny", "--rounds", "1", "--page-size", "16")
    rows = script("attention.attention", "--mla", *asked)
    assert [row["contender"] for row in rows] == ["TORCH_MLA", "FA3 qv", "FA3 qv, page 32"] * 2
    for row in rows:
        assert all(row[f"{part} error"] < 1e-2 and row[f"{part} vs best bare"] > 0 for part in ("decode", "layer"))
        assert min(row["decode us"], row["layer us"], row["of copy"]) > 0


def test_mla_prompts_are_right(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens alone, and behind context, for which there is no attention of one call."""
    emulated = load("tests.emulated.flash_attn_mla")
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", emulated)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    asked = ("--backend", "TORCH_MLA", "--shapes", "tiny", "--rounds", "1", "--page-size", "16")
    rows = script("attention.mla_prefill", *asked)
    new, behind = rows[:3], rows[3:]
    assert {row["contender"] for row in new} == {"FA3", "TORCH_MLA", "row by row"}
    assert {row["contender"] for row in behind} == {"FA3", "TORCH_MLA"}
    assert all(row["error"] < 1e-2 for row in rows)
    assert all(row["attention us"] > 0 and row["attention vs best bare"] > 0 for row in new)
    assert [bool(row["layer us"]) for row in behind] == [row["contender"] != "FA3" for row in behind]


def test_latent_pages_of_any_length_are_split(script: Script) -> None:
    """Lengths that are no multiple of a page, in smaller pages of the same memory."""
    mla = load("benchmarks.attention.mla_problem")
    latent, _ = mla.make_forms(mla.MLAShape((41, 70), (2, 1, 576)), torch.float32, 64, torch.device("cpu"))
    small = latent.repaged(16)
    assert (small.cache.num_pages, small.cache.page_size) == (12, 16)
    with pytest.raises(ValueError, match="no multiples of page size 128"):
        latent.repaged(128)


def test_latent_caches_in_fp8(script: Script) -> None:
    asked = ("--backend", "TORCH_MLA", "--shapes", "tiny", "--rounds", "1", "--page-size", "16", "--no-bare")
    row, _ = script("attention.attention", "--mla", *asked, "--dtype", "fp8")
    assert row["decode error"] < 1e-2
    assert row["TB/s"] * row["decode us"] * 1e6 == pytest.approx(3 * (64 * 576 + 2 * 4 * (576 + 512)))


def test_reference_is_that_of_the_kit(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = load("benchmarks.attention.paged_problem")
    monkeypatch.setattr(problem, "CHUNK", 4 * 9 * 3)  # three queries at a time
    query, key, value = torch.randn(8, 4, 6), torch.randn(9, 2, 6), torch.randn(9, 2, 6)
    for window_left in (-1, 0, 3):
        spec = AttentionSpec(4, 2, 6, window_left=window_left)
        expected, _ = reference_attention(query, key, value, spec)
        torch.testing.assert_close(problem.reference(query, key, value, spec.scale, window_left), expected)


def test_other_pages_hold_the_same_memory(script: Script) -> None:
    problem = load("benchmarks.attention.paged_problem")
    small = problem.make_problem(problem.Shape((64, 32), (4, 2, 8)), torch.float32, 16, torch.device("cpu"))
    large = small.repaged(32)
    assert large.cache.num_pages == 3
    assert all(a.key.data_ptr() == b.key.data_ptr() for a, b in zip(small.caches, large.caches, strict=True))
    with pytest.raises(ValueError, match="no multiples of page size 48"):
        small.repaged(48)


def test_who_is_compared_has_turns_side_by_side(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = load("benchmarks.lib.gpu_harness")
    turns: list[str] = []
    monkeypatch.setattr(harness, "host_clock", lambda replay, count: float(replay() or count))
    replays = {name: lambda name=name: turns.append(name) for name in ("ours", "third", "bare", "copy")}
    taken = harness.rounds_us(replays, 20, torch.device("cpu"), {"ours": "bare", "gone": "bare"})
    assert {name: len(times) for name, times in taken.items()} == dict.fromkeys(replays, 20)
    turns = turns[-80:]  # behind those that warm up
    rounds = ["".join(name[0] for name in turns[i : i + 4]) for i in range(0, 80, 4)]
    assert all("ob" in order or "bo" in order for order in rounds), rounds
    assert len(set(rounds)) > 4
    assert harness.ratio([2.0, 6.0, 9.0], [1.0, 2.0, 9.0]) == 2.0


def test_the_slow_have_their_rounds_behind_the_others(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = load("benchmarks.lib.gpu_harness")
    turns: list[str] = []
    us = {"one": 1.0, "two": 2.0, "slow": 99.0, "copy": 0.01}
    monkeypatch.setattr(harness, "host_clock", lambda replay, count: us[replay()])
    replays = {name: lambda name=name: turns.append(name) or name for name in us}
    taken = harness.rounds_us(replays, 5, torch.device("cpu"), {})
    assert taken == {name: [us[name]] * (3 if name == "slow" else 5) for name in us}
    assert turns[-3:] == ["slow"] * 3


@pytest.mark.parametrize("under", [[], ["--under", "nice"]])
@pytest.mark.sampled
def test_tests_are_counted_by_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, under: list[str]) -> None:
    monkeypatch.setattr(load("benchmarks.lib.harness"), "RESULTS", tmp_path)
    conformance = load("benchmarks.correctness.conformance")
    monkeypatch.setattr(conformance, "ROOT", tmp_path)
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n\nclass TestOne:\n    def test_graph(self): pass\n    def test_other(self): pass\n"
        "\ndef test_skipped(): pytest.skip('here')\n\ndef test_wrong(): assert False\n"
    )
    with pytest.raises(SystemExit) as ended:
        conformance.main([str(file), "--marker", "not gpu", "--workers", "2", *under])
    assert ended.value.code == 1
    rows = json.loads((tmp_path / "conformance_some.json").read_text())["rows"]
    outcomes = [[row[kind] for kind in ("passed", "graphs", "failed", "skipped")] for row in rows]
    assert outcomes == [[0, 0, 1, 1], [2, 1, 0, 0]]

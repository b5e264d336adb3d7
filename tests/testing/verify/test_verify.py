"""`attn-backends verify`: cases follow from their seeds, a process that dies is named, and the report repeats it."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn_backends.cli.app import app
from attn_backends.machine import num_multiprocessors, pretend_multiprocessors
from attn_backends.registry import get_backend
from attn_backends.spec import AttentionSpec, MLASpec
from attn_backends.testing.cases.batches import as_bits, stored
from attn_backends.testing.cases.features import undeclared
from attn_backends.testing.cases.models import published_models
from attn_backends.testing.verify import campaign, worker
from attn_backends.testing.verify.campaign import Jobs
from attn_backends.testing.verify.cases import Case, draw_case
from attn_backends.testing.verify.data import as_read, cache_of, page_lists
from attn_backends.testing.verify.run import Outcome, run_case
from attn_backends.testing.verify.sizes import SIZES, fits
from attn_backends.testing.verify.worker import Asked, run_seed
from benchmarks.correctness.merge_verify import merge
from tests.helpers.forked import run_python

ROOT = Path(__file__).parents[3]
NAMES = ("TORCH", "TORCH_MLA")


def verify(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return run_python("-m", "attn_backends.cli.app", "verify", *arguments, environ=clean | environ)


def check_refused(told: str, *arguments: str) -> None:
    """By the command in this process: a new one would take most of its time to import torch."""
    done = CliRunner().invoke(app, ["verify", *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    assert isinstance(done.exception, SystemExit)
    assert told in done.stderr


def drawn(name: str, size: str, seeds: range = range(60)) -> list[Case]:
    return [draw_case(get_backend(name), seed, SIZES[size], "cpu") for seed in seeds]


@pytest.mark.parametrize("name", NAMES)
def test_a_case_follows_from_its_seed_in_any_order(name: str) -> None:
    seeds = list(range(40))
    first = {seed: draw_case(get_backend(name), seed, SIZES["large"], "cpu") for seed in seeds}
    Random(1).shuffle(seeds)
    assert all(draw_case(get_backend(name), seed, SIZES["large"], "cpu") == first[seed] for seed in seeds)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled
def test_cases_are_declared_and_within_their_size(name: str, size: str) -> None:
    heads = {(model.num_qo_heads, model.num_kv_heads) for model in published_models()}
    groups = {qo / kv for qo, kv in heads} | {qo / n for qo, kv in heads for n in (2, 4, 8, 16) if qo % n == 0}
    for case in drawn(name, size):
        for spec in case.form.specs:
            assert not undeclared(get_backend(name), spec, cache_of(case), "cpu")
            assert spec.num_qo_heads / spec.num_kv_heads in groups
            for episode in case.episodes:
                alone = len(episode.contexts) == 1 and max(episode.steps[0]) <= 16
                lens = episode.seq_lens(0, episode.new_kv_lens is not None)
                assert alone or fits(SIZES[size], spec, episode.steps[0], lens)


@pytest.mark.parametrize("name", NAMES)
def test_no_two_requests_share_more_than_their_prefix(name: str) -> None:
    for case in drawn(name, "medium"):
        for number, episode in enumerate(case.episodes):
            if episode.cached:
                shared = episode.shared_len // case.form.page_size
                pages = page_lists(case, episode, number)
                own = [page for row in pages for page in row[shared:]]
                assert len(own) == len(set(own))
                assert not set(own) & set(pages[0][:shared])
                assert min([*own, 1]) > 0
                assert max([*own, 1]) < cache_of(case).num_pages - 1


def test_every_kind_is_drawn() -> None:
    siblings = SIZES["large"].siblings
    cases = drawn("TORCH", "large", range(0, 400 * siblings, siblings // 2))
    kinds = {episode.kind for case in cases for episode in case.episodes}
    wanted = {"decode", "verify", "chunk", "mixed", "skewed", "prefix", "prompts", "profile", "encoder"}
    assert wanted | {"encoder_decoder"} == kinds
    specs = [spec for case in cases for spec in case.form.specs]
    assert {spec.dtype for spec in specs} == get_backend("TORCH").capabilities().dtypes
    assert {spec.cache_dtype for spec in specs} == get_backend("TORCH").capabilities().cache_dtypes
    features = [(s.window_left >= 0, s.logits_soft_cap is not None, s.alibi_slopes is not None, s.sinks, not s.causal,
                 s.chunk_size is not None) for s in specs]  # fmt: skip
    pairs = {(i, j) for each in features for i in range(6) for j in range(i) if each[i] and each[j]}
    assert pairs == {(i, j) for i in range(6) for j in range(i)} - {(5, 0)}  # a chunk excludes a window
    float_scales = [c.form for c in cases if c.form.specs[0].cache_dtype.itemsize > 1 and c.form.scales[0][0] != 1]
    assert float_scales
    assert {case.form.layout for case in cases} == {"NHD", "HND"}
    for flag in ("over_table", "fused", "want_lse"):
        assert {getattr(case, flag) for case in cases} == {False, True}
    assert {case.form.interleaved for case in cases} == {False, True}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled
def test_cases_pass(name: str, seed: int) -> None:
    outcome = run_seed(Asked(name, "cpu", "medium", None, ()), get_backend(name), seed)
    assert outcome.finding is None
    assert sum(outcome.kinds.values()) > 0


@pytest.mark.parametrize("seed", [0, 3, 9])
def test_latent_rows_of_one_number_do_not_cancel(seed: int) -> None:
    """Outputs that are near zero by chance have no relative error to speak of."""
    layer = MLASpec(1, head_dim=24, head_dim_vo=16, kv_lora_rank=1, qk_rope_head_dim=8, dtype=torch.bfloat16)
    (case,) = drawn("TORCH_MLA", "medium", range(seed, seed + 1))
    case = replace(case, form=replace(case.form, specs=(layer,), scales=((1.0, 1.0),)))
    assert run_case(get_backend("TORCH_MLA"), case, "cpu").finding is None


@pytest.mark.parametrize("seed", range(6))
def test_few_outputs_of_latent_rows_do_not_cancel(seed: int) -> None:
    """One head of one value over rows of many numbers."""
    case = draw_case(get_backend("TORCH_MLA"), seed, SIZES["medium"], "cpu")
    spec = MLASpec(1, head_dim=9, head_dim_vo=1, kv_lora_rank=256, qk_rope_head_dim=8, dtype=torch.float16)
    form = replace(case.form, specs=(spec,), scales=((1.0, 1.0),))
    assert run_case(get_backend("TORCH_MLA"), replace(case, form=form, graph_rows=0), "cpu").finding is None


@pytest.mark.parametrize("cached", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_whoever_divides_by_a_scale_rounds_alike(cached: torch.dtype) -> None:
    """Quotients a little larger and a little smaller are the same numbers of the cache."""
    spec = AttentionSpec(4, 2, 64, dtype=torch.float32, cache_dtype=cached)
    for scale in (2.45, 0.3, 1.7):
        new = torch.randn(1000, 2, 64)
        read = as_read(new, spec, scale)
        one, other = (stored(read * factor, cached, scale) for factor in (1 + 2**-20, 1 - 2**-20))
        assert torch.equal(as_bits(one), as_bits(other))
        assert torch.equal(as_bits(one), as_bits(stored(new, cached, scale)))
    assert torch.equal(as_read(new, spec, 0.5), new)


@pytest.mark.first
def test_the_command_reports(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = verify("torch", "--cases", "6", "--workers", "2", "--seed", "3", "--size", "small", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 cases" in done.stdout
    report = json.loads(file.read_text())
    assert (report["backend"], report["num_cases"], report["findings"]) == ("TORCH", 6, [])
    assert report["first_seed"] == 3 << 20
    assert sum(report["cases"].values()) == 6
    assert report["machine"]["cpu"]
    assert report["versions"]["torch"] == torch.__version__
    assert all(0 <= each["of_tolerance"] <= 1 for each in report["worst"].values())


@pytest.mark.first
@pytest.mark.rest
def test_a_process_that_dies_is_named_and_another_goes_on(tmp_path: Path) -> None:
    file, module = tmp_path / "report.json", "tests.helpers.dying_backend"
    done = verify("DYING", "--cases", "6", "--workers", "1", "--size", "small", "--import", module, "--json",
                  str(file))  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["num_cases"] == 6
    dead = [finding for finding in report["findings"] if "killed by signal 11" in finding["what"]]
    assert 0 < len(dead) < 6
    assert "the last words of a kernel" in dead[0]["what"]
    assert report["cases"]["(process died)"] == len(dead) == len(report["findings"])
    words = shlex.split(dead[0]["command"])
    assert words[:2] == ["attn-backends", "verify"]
    again = verify(*words[2:])
    assert again.returncode == -11
    assert f"repeat it: {dead[0]['command']}" in re.sub(r"\s+", " ", done.stdout)


@pytest.mark.first
@pytest.mark.rest
def test_a_process_that_memory_ended_is_followed_by_another_for_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, module = tmp_path / "report.json", "tests.helpers.dying_backend"
    monkeypatch.setenv("FULL", str(tmp_path / "full"))
    done = verify("FULL", "--cases", "2", "--workers", "1", "--size", "small", "--import", module, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text())["num_cases"] == 2
    assert (tmp_path / "full").exists()


OUT_OF_MEMORY = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"
FAILED_ALLOCATION = (
    'torch_call_dispatcher( "aten::new_empty", "", stack.data(), TORCH_ABI_VERSION) API call failed at o.h'
)


@pytest.mark.parametrize(
    ("raised", "runs", "becomes"),
    [
        ([RuntimeError(OUT_OF_MEMORY)], 2, None),
        ([torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")] * 2, 2, "refused"),
        ([RuntimeError(OUT_OF_MEMORY)] * 2, 2, "refused"),
        ([RuntimeError(FAILED_ALLOCATION)], 2, None),
        ([RuntimeError(FAILED_ALLOCATION)] * 2, 2, "a finding"),
        ([RuntimeError(OUT_OF_MEMORY), AssertionError("the output is off")], 2, "a finding"),
        ([RuntimeError("CUDA error: an illegal memory access was encountered")], 1, "a finding"),
    ],
)
def test_cases_that_memory_was_too_little_for(
    raised: list[Exception], runs: int, becomes: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run again once the process has given back what it kept, which it does behind each case too."""
    happened: list[str] = []
    left = list(raised)

    def run(backend: Any, case: Case, device: str) -> Outcome:
        happened.append("run")
        if left:
            raise left.pop(0)
        return Outcome(case.seed, case.kind)

    case = draw_case(get_backend("TORCH"), 3, SIZES["small"], "cpu")
    monkeypatch.setattr(worker, "cases_of", lambda *given: iter([case]))
    monkeypatch.setattr(worker, "run_case", run)
    monkeypatch.setattr(worker, "is_usable", lambda device: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("give back"))
    outcome = run_seed(Asked("TORCH", "cuda", "medium", None, ()), get_backend("TORCH"), 3)
    assert happened == ["run", "give back"] * runs
    refused = outcome.refused["too little device memory"] == 1
    assert (refused, outcome.finding is not None) == (becomes == "refused", becomes == "a finding")


def test_what_is_under_way_at_the_end_is_awaited_for_a_minute_in_all() -> None:
    """Not for one behind each case that ends: libraries compile for minutes."""
    jobs = Jobs([], time.monotonic() - 20)
    assert 39 < jobs.awaited_s < 41
    assert Jobs([], time.monotonic() - 90).awaited_s == 0
    ended = Jobs([], time.monotonic() + 1000)
    ended.end()
    assert 59 < ended.awaited_s < 61
    assert Jobs([], math.inf).awaited_s == threading.TIMEOUT_MAX  # a queue waits no longer


def test_ctrl_c_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """130, with a report of what ran until then."""
    run_campaign = campaign.run_campaign

    def interrupted(*given: Any) -> Any:
        def on_case(_: Any) -> None:
            raise KeyboardInterrupt

        return run_campaign(*given[:-1], on_case)

    monkeypatch.setattr(campaign, "run_campaign", interrupted)
    done = CliRunner().invoke(app, ["verify", "TORCH", "--cases", "3", "--workers", "1", "--size", "small"])
    assert done.exit_code == 130, done.output
    assert re.search(r"1 cases, .*: 0 findings, interrupted", done.output)


def test_one_case_alone() -> None:
    done = verify("TORCH", "--case", "5", "--size", "small")
    assert done.returncode == 0, done.stderr
    assert "found: nothing" in done.stdout
    assert "specs=" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("TRITON",), "TRITON needs cuda; there is none here (here: cpu). Type it on a machine"),
        (("TORCH", "--device", "cuda"), "--device 'cuda' cannot be used here"),
        (("TORCH", "--size", "huge"), "--size is 'huge'; allowed: large, medium, small"),
        (("TORHC",), "did you mean TORCH"),
        (("TORCH", "--import", "no_such_module"), "--import 'no_such_module': No module named 'no_such_module'; give"),
        (("TORCH", "--import", ""), "--import '': Empty module name; give a module that is installed"),
        (("AUTO",), "AUTO chooses a backend, and is none"),
        (("TORCH", "--seed", str(1 << 80)), "allowed: 0 to 1099511627775"),
        (("TORCH", "--case", str(1 << 60)), "allowed: 0 to 1152921504606846975"),
        (("TORCH", "--json", "/nowhere/report.json"), "--json /nowhere/report.json: there is no folder /nowhere"),
        (("TORCH", "--json", "/"), "--json /: it is a folder"),
    ],
)
def test_what_cannot_run_here_is_said(arguments: tuple[str, ...], told: str) -> None:
    if arguments[0] == "TRITON":
        pytest.importorskip("triton")
    if torch.cuda.is_available() and "cuda" in told:
        pytest.skip("there is a CUDA device here")
    check_refused(told, *arguments)


@pytest.mark.parametrize(
    "text", ["[]", "3", "{}", '{"backends": 5}', '{"backend": "TORCH"}', '{"backend": "TORCH", "values": {"dtype": 5}}',
             '{"backend": "TORCH", "values": {"a": [1]}, "pairs": {"run": ["x"]}}'],
)  # fmt: skip
def test_what_is_no_report_of_what_has_run_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    told = "--covered has no values of TORCH that ran: give a report of --json"
    check_refused(told, "TORCH", "--declared", "--covered", str(tmp_path / "report.json"))


def test_the_largest_case_runs() -> None:
    done = CliRunner().invoke(app, ["verify", "TORCH", "--case", str(campaign.MOST_CASE), "--size", "small"])
    assert done.exit_code == 0, done.output
    assert campaign.MOST_SEED * campaign.SEEDS_OF_A_RUN + campaign.SEEDS_OF_A_RUN - 1 == campaign.MOST_CASE


def test_it_needs_neither_pytest_nor_hypothesis() -> None:
    code = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from attn_backends.cli.app import app\n"
        "app(['verify', 'TORCH', '--case', '2', '--size', 'small'])"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_cpu_stands_for_any_gpu() -> None:
    cpu = torch.device("cpu")
    assert num_multiprocessors(cpu, interpreted=2) == 2
    with pretend_multiprocessors(46):
        assert num_multiprocessors(cpu, interpreted=2) == 46
        assert num_multiprocessors(cpu) == 132
    assert num_multiprocessors(cpu, interpreted=2) == 2


def report_of(seed: int, **changes: Any) -> dict[str, Any]:
    return {
        "backend": "TORCH", "size": "small", "first_seed": seed, "command": "c", "device": "cpu", "date": "d",
        "machine": {}, "versions": {}, "seconds": 2.0, "num_cases": 3, "num_steps": 5, "cases": {"decode": 3},
        "steps": {"decode": 5}, "refused": {}, "worst": {"output": {"of_tolerance": 0.1 * seed, "seed": seed}},
        "findings": [], **changes,
    }  # fmt: skip


def test_reports_are_merged() -> None:
    found = {"seed": 9, "kind": "decode", "what": "w", "command": "c"}
    one, two, other = report_of(1), report_of(2, findings=[found]), report_of(1, backend="OTHER")
    merged = merge([one, two, other])
    assert (merged["num_cases"], merged["num_findings"], len(merged["runs"])) == (9, 1, 3)
    torch_row = merged["backends"]["TORCH"]
    assert (torch_row["num_cases"], torch_row["cases"], torch_row["findings"]) == (6, {"decode": 6}, [found])
    assert torch_row["worst"]["output"]["seed"] == 2
    with pytest.raises(ValueError, match="TORCH from seed 1; give each run another --seed"):
        merge([one, one])


def test_what_was_merged_is_merged_further() -> None:
    found, alone = {"seed": 9, "kind": "decode", "what": "w", "command": "c"}, {"seed": 4}
    reports = [report_of(1), report_of(2, findings=[found]), report_of(1, backend="OTHER"), report_of(3)]
    before = merge(reports[:3])
    before["backends"]["OTHER"]["ran_alone"].append(alone)
    after, at_once = merge([before, reports[3]]), merge(reports)
    assert after["backends"]["TORCH"] == at_once["backends"]["TORCH"]
    assert after["backends"]["OTHER"]["ran_alone"] == [alone]
    assert len(after["runs"]) == 4
    with pytest.raises(ValueError, match="TORCH from seed 2; give each run another --seed"):
        merge([before, report_of(2, size="medium")])

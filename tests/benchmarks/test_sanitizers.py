"""The run under compute-sanitizer, with a stub in its place: logs, deadlines, and results of what ran until then."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOG = """\
========= COMPUTE-SANITIZER
what the program prints
========= Invalid __global__ read of size 4 bytes
=========     at void reader<int>(int *)+0x170 in {file}:{line}
=========     by thread ({thread},0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: main at main.cu:1+0x10 in main.cu:1
=========
========= Error: Race reported between Write access at prefill_hopper_kernel+0x1fc0 in {file}:{line}
=========     and Read access at prefill_hopper_kernel+0x2190 in {file}:{line} [2048 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
STUB = """#!/bin/bash
while [[ $1 == --* ]]; do case $1 in --log-file) log=$2;; --tool) tool=$2;; esac; shift 2; done
{said}
exec "$@"
"""
CHILD = """import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    seed = json.loads(line)["seed"]
    kind = ("decode", "verify in a mixed graph", "chunk", "decode in a graph")[seed % 4]
    captures = "graph" in kind and "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
    BEFORE
    found = "captured without torch's cache" if captures else None
    print(json.dumps({"kinds": {"decode": 2}, "kind": kind, "finding": found}), flush=True)
"""


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def line_of(code: str, path: str = "attn_backends/kernels/hopper.py") -> int:
    return next(i for i, line in enumerate((ROOT / path).read_text().splitlines(), 1) if code in line)


def log_text(file: str = "kernel.cu", line: int = 7, thread: int = 3) -> str:
    return LOG.format(file=file, line=line, thread=thread)


def read(tmp_path: Path, text: str) -> Any:
    (tmp_path / "log").write_text(text)
    return load("benchmarks.correctness.sanitizer_reports").Log(tmp_path / "log").new_reports(ended=True)


# Logs.


def test_reports_of_a_log(tmp_path: Path) -> None:
    invalid, race = read(tmp_path, log_text())
    assert invalid.places == [("", "void reader<int>", "0x170", "kernel.cu", 7)]
    assert race.places == [("Write", "prefill_hopper_kernel", "0x1fc0", "kernel.cu", 7),
                           ("Read", "prefill_hopper_kernel", "0x2190", "kernel.cu", 7)]  # fmt: skip


def test_a_log_that_grows_gives_each_report_once(tmp_path: Path) -> None:
    """However it is cut."""
    text, path = log_text(), tmp_path / "log"
    log = load("benchmarks.correctness.sanitizer_reports").Log(path)
    assert log.new_reports() == []  # it is not there yet
    found = []
    for stop in range(0, len(text), 37):
        path.write_text(text[:stop])
        found += log.new_reports()
    path.write_text(text)
    found += log.new_reports(ended=True)
    assert found == read(tmp_path, text)
    assert log.summaries == ["RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"]


def test_the_same_place_is_one_report_whatever_the_thread(tmp_path: Path) -> None:
    reports = load("benchmarks.correctness.sanitizer_reports").Reports()
    for text, seed in ((log_text(thread=3), 5), (log_text(thread=4), 6), (log_text(line=8), 7)):
        for report in read(tmp_path, text):
            reports.add("memcheck", report, "TRITON", seed)
    assert [(row["times"], row["first seed"]) for row in reports.rows()] == [(2, 5), (2, 5), (1, 7), (1, 7)]
    assert reports.counts("memcheck", "TRITON") == (4, 0)


def test_what_is_explained_is_told_from_what_is_new(tmp_path: Path) -> None:
    """By the function that a line is in, for one tool and one kernel; each place of a report."""
    here, elsewhere = (log_text("hopper.py", line_of(code)) for code in ("part.store(", "m_new = gl.maximum("))
    invalid, race = read(tmp_path, here)
    assert "zeros" in race.explanation("racecheck")
    assert race.explanation("memcheck") is None
    assert invalid.explanation("racecheck") is None
    assert [report.explanation("racecheck") for report in read(tmp_path, elsewhere)] == [None, None]
    at = line_of("tl.where(saw[:, None]", "attn_backends/kernels/tile_kernels.py")
    lines = read(tmp_path, log_text("tile_kernels.py", at))[1].lines
    of_decode = [line.replace("prefill_hopper_kernel", "decode_kernel") for line in lines]
    assert race._replace(lines=of_decode).explanation("racecheck") is None  # a read that nothing keeps from the write
    of_decode[1] = of_decode[1].replace("Read", "Write")
    assert "fused multiply-add" in race._replace(lines=of_decode).explanation("racecheck")
    both = race._replace(lines=(race.lines[0], read(tmp_path, elsewhere)[1].lines[1]))
    assert both.explanation("racecheck") is None


def test_every_explained_report_is_of_a_function_that_there_is() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "attn_backends").rglob("*.py"))
    explained = load("benchmarks.correctness.sanitizer_reports").explained()
    ours = [known for known in explained if known["functions"] is not None]
    assert ours
    for known in ours:
        assert all(f"def {function}(" in sources for function in known["functions"])
        assert f"def {known['kernel']}(" in sources


def test_what_libraries_compiled_is_explained_by_its_kernel(tmp_path: Path) -> None:
    """For one tool; a kernel of ours has to be at an explained function."""
    _, race = read(tmp_path, log_text())
    theirs = [line.replace("prefill_hopper_kernel", "flash_fwd_splitkv_mla_kernel<T>") for line in race.lines]
    assert "FlashMLA" in race._replace(lines=theirs).explanation("racecheck")
    assert race._replace(lines=theirs).explanation("memcheck") is None
    assert race.explanation("racecheck") is None


# Cases that wait, and processes.


def test_reads_of_what_the_tensor_memory_accelerator_wrote_are_explained_by_their_words() -> None:
    """Those that initcheck has reported, and not others of kernels that torch uses for much else."""
    module = load("benchmarks.correctness.sanitizer_reports")
    kept = json.loads((ROOT / "benchmarks" / "results" / "sanitizers.json").read_text())["reports"]
    found = [module.Report(tuple(row["report"])) for row in kept
             if (row["tool"], row["backend"]) == ("initcheck", "FLASHMLA")]  # fmt: skip
    starts = ("The concatenation", "output.mul_", "Told by its size")
    assert len(found) == len(starts)
    for report, start in zip(found, starts, strict=True):
        assert report.explanation("initcheck").startswith(start)
        assert report.explanation("memcheck") is None
        changed = {"int)3": "int)2", "MulFunctor": "AddFunctor", "cudaMemcpy source": "cudaMemset"}
        others = "\n".join(report.lines)
        for old, new in changed.items():
            others = others.replace(old, new)
        assert module.Report(tuple(others.split("\n"))).explanation("initcheck") is None


def test_the_backend_with_the_fewest_cases_is_next() -> None:
    process = load("benchmarks.correctness.sanitizer_process")
    waiting, soon = process.Waiting(), time.monotonic() + 0.05
    for name, seed in (("A", 1), ("A", 2), ("A", 3), ("B", 4)):
        waiting.put(process.Case(name, seed, False))
    assert [waiting.take(soon).seed for _ in range(4)] == [1, 4, 2, 3]
    assert waiting.take(soon) is None
    assert time.monotonic() >= soon
    waiting.close()
    assert waiting.take(time.monotonic() + 60) is None


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "print('no JSON', flush=True); input()", "1 / 0"])
def test_a_process_that_does_not_answer_is_not_waited_for(program: str) -> None:
    child = load("benchmarks.correctness.sanitizer_process").Child([sys.executable, "-c", program], dict(os.environ))
    begun = time.monotonic()
    assert child.answer(begun + 2) is None
    status, said = child.end(0.2)
    assert time.monotonic() - begun < 20
    assert status == -9 if "sleep" in program else status in (1, -9)
    assert ("ZeroDivisionError" in said) == (program == "1 / 0")


# A run.


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the script with a stub of the tool, over processes that run no case in truth; its status and its result."""

    def run(*arguments: str, said: str = "", before: str = "pass", minutes: str = "0.5") -> tuple[int, dict[str, Any]]:
        (tmp_path / "child.py").write_text(CHILD.replace("BEFORE", before))
        (tmp_path / "log.txt").write_text(said)
        stub = tmp_path / "compute-sanitizer"
        stub.write_text(STUB.replace("{said}", f'[ "$tool" = racecheck ] && cat {tmp_path}/log.txt > "$log"'))
        stub.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(load("benchmarks.correctness.sanitizer_process"), "CHILD", tmp_path / "child.py")
        given = [
            "--device",
            "cpu",
            "--workers",
            "1",
            "--cases",
            "2",
            "--minutes",
            minutes,
            "--out",
            str(tmp_path / "out"),
        ]
        status = load("benchmarks.correctness.sanitizers").main([*given, *arguments])
        return status, json.loads((tmp_path / "out" / "sanitizers.json").read_text())

    return run


def test_every_backend_under_every_tool(sanitize: Any) -> None:
    status, result = sanitize("--backend", "ONE", "TWO")
    assert status == 0
    ran = {(row["backend"], row["tool"]): (row["eager"], row["graphs"], row["steps"]) for row in result["rows"]}
    tools = ("none", "memcheck", "racecheck", "initcheck", "synccheck")
    whole = {(name, tool): (2, 2, 8) for name in ("ONE", "TWO") for tool in tools}
    assert ran == whole | {(name, "initcheck"): (2, 0, 4) for name in ("ONE", "TWO")}
    assert all(process["status"] == 0 for process in result["processes"])


def test_only_what_is_not_explained_fails(sanitize: Any) -> None:
    text = log_text("hopper.py", line_of("part.store("))
    race = text[text.index("========= Error") :]
    status, result = sanitize("--tool", "racecheck", said=race)
    assert (status, result["rows"][1]["explained"], result["rows"][1]["new"]) == (0, 1, 0)
    status, result = sanitize("--tool", "racecheck", said=text)
    assert (status, result["rows"][1]["explained"], result["rows"][1]["new"]) == (1, 1, 1)
    assert [row["why"] is None for row in result["reports"]] == [True, False]


def test_a_case_that_kills_its_process_is_found_and_the_others_run(sanitize: Any) -> None:
    alone = "if seed % 4 == 2 and 'PYTORCH_NO_CUDA_MEMORY_CACHING' in os.environ: os._exit(9)"
    status, result = sanitize("--tool", "memcheck", before=alone)
    assert status == 1
    row = result["rows"][1]
    assert (row["eager"], row["graphs"], row["mismatches"]) == (2, 2, 1)
    assert row["first"] == ["seed 1048578: the process died, or took more than 90 s"]


def test_a_tool_is_told_what_to_leave_out_and_where_to_listen(tmp_path: Path) -> None:
    """Each process has ports of its own; initcheck leaves out nothing, or what is written there would be unknown."""
    process = load("benchmarks.correctness.sanitizer_process")
    plan = process.Plan({}, 0.0, 1.0, tmp_path, {"print-limit": "5", "racecheck-report": "all"})
    lines = [plan._under(kind, number, tmp_path / "log") for number, kind in enumerate(process.KINDS)]
    assert len({line[line.index("--port") + 1] for line in lines}) == len(lines)
    for kind, line in zip(process.KINDS, lines, strict=True):
        assert line[line.index("--tool") + 1] == kind.tool
        assert line[line.index("--print-limit") + 1] == "5"
        assert line.count("--print-limit") == 1
        assert line[line.index("--racecheck-report") + 1] == "all"
        assert ("--kernel-name-exclude" in line) == (kind.tool != "initcheck")


def test_at_the_deadline_there_is_what_ran_before(sanitize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third case hangs, before a tool has seen it."""
    monkeypatch.setattr(load("benchmarks.correctness.sanitizer_run"), "GRACE_S", 0.5)
    hangs = "if seed == 1048578: time.sleep(100)"
    begun = time.monotonic()
    status, result = sanitize("--tool", "synccheck", before=hangs, minutes="0.1")
    assert time.monotonic() - begun < 40
    assert status == 0
    assert [(row["tool"], row["eager"], row["graphs"], row["cut off"]) for row in result["rows"]] == [
        ("none", 1, 1, 1), ("synccheck", 1, 1, 0)]  # fmt: skip


def test_a_backend_without_a_case_fails(sanitize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("benchmarks.correctness.sanitizer_run"), "GRACE_S", 0.5)
    status, result = sanitize("--tool", "synccheck", before="time.sleep(100)", minutes="0.05")
    assert status == 1
    assert [(row["eager"], row["graphs"]) for row in result["rows"]] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("name", ["TORCH", "TORCH_MLA"])
def test_a_process_runs_cases(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the lines it is given, with the reference on the CPU."""
    cases, answers = load("benchmarks.correctness.sanitizer_cases"), io.StringIO()
    for kind in (cases.Batch, cases.MLABatch):
        monkeypatch.setattr(kind, "expected", cases._on_cpu(kind.expected))
    lines = [json.dumps({"backend": backend, "seed": 1}) for backend in (name, "MISSING")]
    given = {"backends": [name, "MISSING"], "device": "cpu", "size": "small", "imports": []}
    cases.serve(given, io.StringIO("\n".join(lines)), answers)
    ready, ran, missing = map(json.loads, answers.getvalue().splitlines())
    assert ready == {"ready": True}
    assert (ran["finding"], sum(ran["kinds"].values()) > 0) == (None, True)
    assert "MISSING" in missing["finding"]

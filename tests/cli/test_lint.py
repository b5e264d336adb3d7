"""`attn-backends lint`: a name or a class, text or JSON, and the exit status."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attn_backends.cli.app import app
from attn_backends.registry import table
from attn_backends.testing.lint import run as lint_run
from attn_backends.testing.lint.finding import CODES

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin" / "attn_backends_naive.py"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of one's own with a plugin in it, whole and broken; and few checks, as all take seconds."""
    monkeypatch.setattr(table, "_classes", {})
    monkeypatch.setattr(table, "_rows", functools.cache(table._rows.__wrapped__))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(lint_run, "CHECKS", {"output": lint_run.CHECKS["output"], "lse": lint_run.CHECKS["lse"]})
    monkeypatch.chdir(tmp_path)
    source = PLUGIN.read_text()
    (tmp_path / "whole_plugin.py").write_text(source.replace('@ab.register_backend("NAIVE"', '# "NAIVE"'))
    broken = source.replace("lse=True", "lse=False")
    (tmp_path / "broken_plugin.py").write_text(broken.replace('"NAIVE"', '"BROKEN"'))
    yield
    for name in ("whole_plugin", "broken_plugin"):
        sys.modules.pop(name, None)


def test_a_class_that_is_not_registered_passes() -> None:
    done = CliRunner().invoke(app, ["lint", "whole_plugin:NaiveBackend"])
    assert done.exit_code == 0, done.output
    assert "NAIVE on cpu: 0 findings in 4 checks" in done.output


def test_findings_are_text_and_the_exit_status_is_1() -> None:
    done = CliRunner().invoke(app, ["lint", "broken_plugin:NaiveBackend"])
    assert done.exit_code == 1, done.output
    assert f"capability-undeclared: {CODES['capability-undeclared']}" in done.output
    assert "lse, decodes" in done.output
    assert "Declare lse, or raise Unsupported." in done.output


def test_findings_are_data() -> None:
    done = CliRunner().invoke(app, ["lint", "BROKEN", "--import", "broken_plugin", "--json", "--seed", "3"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert (report["backend"], report["device"], report["seed"]) == ("BROKEN", "cpu", 3)
    assert report["checks"] == ["output", "lse", "code", "options"]
    assert {each["code"] for each in report["findings"]} == {"capability-undeclared"}
    assert all(set(each) == {"code", "where", "what", "hint"} for each in report["findings"])


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("TORC", "did you mean TORCH"),
        ("auto", "AUTO chooses a backend, and is none: attn-backends explain says which; name one of TORCH, "),
        ("nowhere:X", "nowhere:X: No module named 'nowhere'"),  # which rich makes an emoji of
        ("nowhere:Backend", "No module named 'nowhere'; give package.module:Class of a backend, installed or below"),
        ("whole_plugin:Nothing", "has no attribute 'Nothing'; give package.module:Class"),
        ("whole_plugin:Row", "no subclass of attn_backends.AttentionBackend"),
        ("whole_plugin:", "must be 'package.module:Class'"),
    ],
)
def test_what_is_no_backend_is_said(target: str, words: str) -> None:
    done = CliRunner().invoke(app, ["lint", target])
    assert done.exit_code == 2
    assert words in done.output


def test_a_class_with_anothers_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "whole_plugin.py").write_text(PLUGIN.read_text().replace('"NAIVE"', '"TORCH"').replace("@ab.reg", "# "))
    done = CliRunner().invoke(app, ["lint", "whole_plugin:NaiveBackend"])
    assert done.exit_code == 2
    assert "calls itself TORCH" in done.output


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    done = CliRunner().invoke(app, ["lint", "FLASHINFER"])
    assert done.exit_code == 2
    assert "FLASHINFER cannot be used here" in done.output
    assert "pip install flashinfer-python" in done.output


def test_a_backend_of_another_contract_is_refused(tmp_path: Path) -> None:
    (tmp_path / "whole_plugin.py").write_text(PLUGIN.read_text().replace("(1, 0)", "(2, 0)").replace("@ab.reg", "# "))
    done = CliRunner().invoke(app, ["lint", "whole_plugin:NaiveBackend"])
    assert done.exit_code == 2
    assert "written for contract 2.0" in done.output


def test_help_says_what_it_finds() -> None:
    done = CliRunner().invoke(app, ["lint", "--help"])
    assert done.exit_code == 0
    assert "accepts and does not use" in done.output

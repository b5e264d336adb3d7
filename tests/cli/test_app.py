"""The command: what it prints, as text and JSON, and how it refuses."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from attn_backends.cli import app as cli
from attn_backends.registry import register_backend, table
from attn_backends.spec import AttentionSpec
from tests.helpers import forked
from tests.helpers.fake_backends import fake_backend

ROOT = Path(__file__).parents[2]
KERNELS = ("torch", "triton", "flashinfer", "flash_attn", "transformers")


@dataclass
class CheckResult:
    name: str
    ok: bool
    detail: str


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_classes", {})
    monkeypatch.setattr(table, "_rows", functools.cache(table._rows.__wrapped__))


@pytest.fixture
def quick_check(monkeypatch: pytest.MonkeyPatch) -> list[CheckResult]:
    """What the conformance kit's quick check is to answer."""
    results = [CheckResult("decode", True, "max error 1e-7")]
    kit = ModuleType("attn_backends.testing.quick_check")
    kit.quick_check = lambda backend, device: results  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kit.__name__, kit)
    return results


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def run_python(*arguments: str, **environ: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | environ, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize(
    "code",
    [
        "import attn_backends",
        "import attn_backends.registry; list(attn_backends.registry.backends)",
        "import registry",
        "import attn_backends.engine.config",
        "from attn_backends.cli.app import app; import sys; sys.argv = ['x', '--help']; app(standalone_mode=False)",
    ],
)
def test_importing_loads_no_kernel_library(code: str) -> None:
    loaded = run_python("-c", f"{code}\nimport sys\nprint('modules', *sys.modules)").rpartition("modules ")[2].split()
    assert not {*KERNELS} & {*loaded}


def test_list_says_why_not_and_what_to_type() -> None:
    register_backend("MISSING", "no_such_module:X", package="no-such", install="pip install no-such")
    register_backend("ELSEWHERE", fake_backend("ELSEWHERE", devices={"xpu"}))
    text = run("list").stdout
    assert "TORCH" in text
    assert "module 'no_such_module' is not installed" in text
    assert "pip install no-such" in text
    rows = {row["name"]: row for row in json.loads(run("list", "--json").stdout)}
    assert (rows["TORCH"]["package"], rows["TORCH"]["usable"]) == ("torch", True)
    assert rows["TORCH"]["version"].startswith("2.")
    assert (rows["MISSING"]["version"], rows["MISSING"]["fix"]) == (None, "pip install no-such")
    assert rows["ELSEWHERE"]["reason"].startswith("needs a device of type xpu; here: ")


def test_doctor(quick_check: list[CheckResult]) -> None:
    register_backend("WELL", fake_backend("WELL"))
    healthy = run("doctor", "well")
    assert healthy.exit_code == 0
    assert "max error 1e-7" in healthy.stdout
    assert "page_size_multiple" in healthy.stdout
    quick_check.append(CheckResult("window", False, "key 3 leaks"))
    sick = run("doctor", "WELL", "--device", "cpu", "--json")
    assert sick.exit_code == 1
    data = json.loads(sick.stdout)
    assert (data["ok"], data["device"], data["checks"][1]["detail"]) == (False, "cpu", "key 3 leaks")


@pytest.mark.usefixtures("quick_check")
def test_doctor_refuses() -> None:
    register_backend("MISSING", "no_such_module:X", install="pip install no-such")
    missing = run("doctor", "missing")
    assert missing.exit_code == 1
    assert "try: pip install no-such" in missing.stdout
    unknown = run("doctor", "torhc")
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "did you mean TORCH" in unknown.stderr
    register_backend("WELL", fake_backend("WELL"))
    assert "WELL does not run on meta; it runs on: cpu" in run("doctor", "WELL", "--device", "meta").stderr
    wrong = run("doctor", "WELL", "--device", "gpu")
    assert wrong.exit_code == 2
    assert "--device 'gpu' cannot be used here" in wrong.stderr


def test_doctor_runs_the_real_check_on_torch() -> None:
    assert json.loads(run("doctor", "TORCH", "--device", "cpu", "--json").stdout)["ok"]


@pytest.fixture
def _two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's layers without a model."""

    def layer_specs(config: Any, device: Any) -> dict[int, AttentionSpec]:
        return {0: AttentionSpec(4, 2, 64), 1: AttentionSpec(4, 2, 80)}

    monkeypatch.setattr("attn_backends.engine.resolve.layer_specs", layer_specs)


@pytest.mark.usefixtures("_two_layers")
def test_explain(tmp_path: Path) -> None:
    register_backend("NARROW", fake_backend("NARROW", head_dims={64}), priority=20)
    config = tmp_path / "config.yaml"
    config.write_text("device: cpu\ncache: {page_size: 32}\n")
    text = run("explain", "--config", str(config)).stdout
    assert "head_dim: got 80; supported: 64. Choose a backend that takes this head_dim. (layer 1)" in text
    assert "chosen: TORCH" in text
    assert re.search(r"TORCH +. yes +. 32 ", text)
    refused = run("explain", "--config", str(config), "--backend", "narrow", "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["chosen"] is None


@pytest.mark.usefixtures("_two_layers")
def test_explain_refuses_wrong_input(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("backend: TORCH\nbackend_options: {no_such_option: 1}\n")
    for arguments, message in {
        ("--backend", "torhc"): "did you mean TORCH",
        ("--config", str(tmp_path / "confg.yaml")): "near it: config.yaml",
        ("--config", str(config)): "backend_options.no_such_option",
        ("--device", "warp"): "warp",
    }.items():
        result = run("explain", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_the_support_table_is_markdown_and_json() -> None:
    table = forked.run_python("registry.py").stdout
    assert "| TORCH " in table
    assert "soft_cap" in table
    assert json.loads(forked.run_python("registry.py", "--json").stdout)[0]["capabilities"]["window"] is True


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, cli.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=str,
)
def test_threads_sleep_where_others_work(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", given)
    cli._main()
    assert given.get("GOMP_SPINCOUNT") == spins


def test_the_command_loads_no_torch_before() -> None:
    """It reads the variable when it is loaded."""
    assert run_python("-c", "import attn_backends.cli.app, sys; print('torch' in sys.modules)") == "False\n"


def test_version() -> None:
    assert run("--version").exit_code == 0

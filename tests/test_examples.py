"""The examples run as they are shown, are as short as promised, and the plugin works once it is installed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import forked

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
LIMITS = {
    "lower_road.py": 60,
    "generate.py": 60,
    "transformers_generate.py": 60,
    "step_table_scheduler.py": 65,
    "plugin/attn_backends_naive.py": 150,
}  # fewer lines than

FOUND_BY_ENTRY_POINT = """
import sys
from attn_backends import AttentionSpec, KVCacheSpec, Unsupported, get_backend, select_backend
from attn_backends.registry import backends, validate_options

row = backends["NAIVE"]
assert (row.source, row.package) == ("entry point", "attn-backends-naive"), row
assert "attn_backends_naive" not in sys.modules, "listing a plugin imported it"
assert get_backend("naive").get_name() == "NAIVE"
assert validate_options("NAIVE", {"accumulate": "float32"}).accumulate == "float32"

layer, cache = AttentionSpec(4, 2, 32), KVCacheSpec(4)
assert select_backend("NAIVE", [layer], cache, "cpu").name == "NAIVE"
assert select_backend("AUTO", [layer], cache, "cpu").name == "TORCH", "NAIVE states no priority, so AUTO leaves it"
try:
    select_backend("NAIVE", [AttentionSpec(4, 2, 32, window_left=7)], cache, "cpu")
except Unsupported as refusal:
    assert [rejection.code for rejection in refusal.rejections] == ["window"], refusal
else:
    raise AssertionError("a window that NAIVE does not declare was accepted")
"""
OPTION_DOES_SOMETHING = """
import torch
from attn_backends import AttentionSpec, KVCacheSpec, Limits, SequenceData, SequenceGroup, get_backend, plan_groups
from attn_backends.registry import validate_options

torch.manual_seed(0)
backend, spec, cache, limits = get_backend("NAIVE"), AttentionSpec(2, 1, 64), KVCacheSpec(1), Limits(1, 200, 200)
groups = plan_groups({0: spec})
batch = [SequenceGroup("profile run", (SequenceData(0, 200, None),))]
metadata = backend.get_builder_cls()(groups[0], cache, limits, "cpu").build_from_groups(batch)
step = backend.get_state_cls()(groups, cache, limits, "cpu").begin_forward(metadata)
query, key, value = torch.randn(200, 2, 64), torch.randn(200, 1, 64), torch.randn(200, 1, 64)
narrow, wide = (
    backend.get_impl_cls()(spec, cache, "cpu", options=validate_options("NAIVE", {"accumulate": dtype})).forward(
        query, key, value, None, step
    )
    for dtype in ("float32", "float64")
)
assert torch.allclose(narrow, wide, atol=1e-5)
assert not torch.equal(narrow, wide), "the option changes nothing"
"""

Python = Callable[..., str]


def run_python(*args: str, path: Path | None = None) -> str:
    """What Python prints, run in the checkout with `path` in front; a failure shows all of it."""
    paths = [str(folder) for folder in (path, ROOT) if folder]
    done = forked.run_python(*args, environ=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", LIMITS)
def test_length(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < LIMITS[name]


def test_lower_road() -> None:
    printed = run_python("examples/lower_road.py")
    assert printed.count("max error") == 10, printed


def test_step_table_scheduler() -> None:
    """Decodes alone, prompts alone, and both in a step; all pages but those of the last request come back."""
    steps = [line.split(":")[1].strip() for line in run_python("examples/step_table_scheduler.py").splitlines()]
    assert steps[0] == "0 decodes, 3 prefills"
    assert "2 decodes, 1 prefills" in steps
    assert steps[-1] == "1 decodes, 0 prefills"


@pytest.mark.first
def test_generate() -> None:
    printed = run_python("examples/generate.py")
    assert "The capital of France is▸ Paris" in printed
    assert "TORCH was asked for by name" in printed


@pytest.mark.first
def test_transformers_generate() -> None:
    """All three roads; the second turn of the session finds the first one's tokens."""
    printed = run_python("examples/transformers_generate.py")
    assert printed.count("Paris") == 2
    assert "over the pages of TORCH" in printed
    first, second = (int(line.split()[-3]) for line in printed.splitlines() if line.endswith("tokens cached"))
    assert first < second


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Python with the plugin installed, by pip and without a network, into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLES / "plugin", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run_python("-m", "pip", "install", "--quiet", *offline, "--target", str(target), str(source))
    return lambda *args: run_python(*args, path=target)


@pytest.mark.parametrize("code", [FOUND_BY_ENTRY_POINT, OPTION_DOES_SOMETHING], ids=["entry point", "option"])
def test_plugin(with_plugin: Python, code: str) -> None:
    with_plugin("-c", code)


def test_plugin_on_the_command_line(with_plugin: Python) -> None:
    listed = {row["name"]: row for row in json.loads(with_plugin("-m", "attn_backends.cli.app", "list", "--json"))}
    assert listed["NAIVE"]["usable"]
    assert listed["NAIVE"]["version"] == "0.1.0"
    healthy = json.loads(with_plugin("-m", "attn_backends.cli.app", "doctor", "NAIVE", "--json"))
    assert healthy["ok"], healthy["checks"]
    assert len(healthy["checks"]) > 10


@pytest.mark.first
def test_plugin_conformance(with_plugin: Python) -> None:
    """Some of the kit, by the plugin's own two lines; all of it takes minutes in plain loops."""
    some = "plain_layer or declared_features or views_split or profile or static or building or upper_bounds"
    printed = with_plugin("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/plugin/tests", "-k", some)
    assert " passed" in printed
    assert "skipped" not in printed

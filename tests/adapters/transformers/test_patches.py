"""The patches that docs/engines/transformers.md offers to transformers: they apply, and no wrap is needed then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import GenerationMixin
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import attn_backends.adapters.transformers as ab
from attn_backends.adapters.transformers.register import BATCHING_HOOK, CACHE_HOOK, WRAPPED

VERSION = "5.23.0"  # the one that the patches are for
ROOT = Path(__file__).parents[3]
PATCHES = sorted((ROOT / "docs" / "engines" / "patches").glob("*.patch"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder that looks like transformers' repository: `generation` is a copy, all else of the package is linked."""
    if transformers.__version__ != VERSION:
        pytest.skip(f"the patches are for transformers {VERSION}, and {transformers.__version__} is installed")
    if shutil.which("git") is None:
        pytest.skip("git, which applies patches, is not installed")
    installed, package = Path(transformers.__file__).parent, tmp_path / "src" / "transformers"
    package.mkdir(parents=True)
    for path in installed.iterdir():
        if path.name not in ("generation", "__pycache__"):
            (package / path.name).symlink_to(path)
    shutil.copytree(installed / "generation", package / "generation", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def apply(patch: Path, folder: Path, *options: str) -> None:
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # no repository around it counts
    subprocess.run(["git", "apply", *options, str(patch)], cwd=folder, env=environment, check=True)


def test_each_applies_alone(copy: Path) -> None:
    assert [patch.stem for patch in PATCHES] == ["continuous-batching", "generate-cache"]
    for patch in PATCHES:
        apply(patch, copy, "--check", "--whitespace=error-all")


def test_a_patched_transformers_runs_on_our_cache_without_wraps(copy: Path) -> None:
    for patch in PATCHES:
        apply(patch, copy)
    paths = [copy / "src", ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, str(Path(__file__).with_name("patched.py")), str(copy)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("hooks", [(), (CACHE_HOOK,), (BATCHING_HOOK,), (CACHE_HOOK, BATCHING_HOOK)], ids=str)
def test_what_has_a_hook_is_not_wrapped(monkeypatch: pytest.MonkeyPatch, hooks: tuple[str, ...]) -> None:
    owners = {CACHE_HOOK: GenerationMixin, BATCHING_HOOK: ContinuousBatchingManager}
    methods = {
        (GenerationMixin, "_prepare_cache_for_generation"): CACHE_HOOK,
        (ContinuousBatchingManager, "switch_to_cb_friendly_attn"): BATCHING_HOOK,
        (ContinuousBatchingManager, "__init__"): BATCHING_HOOK,
    }
    for owner, name in methods:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, method.__wrapped__ if hasattr(method, WRAPPED) else method)
    for hook, owner in owners.items():
        monkeypatch.delattr(owner, hook, raising=False)
        if hook in hooks:
            monkeypatch.setattr(owner, hook, None, raising=False)
    ab.register()
    wrapped = {key: hasattr(getattr(*key), WRAPPED) for key in methods}
    assert wrapped == {key: hook not in hooks for key, hook in methods.items()}

